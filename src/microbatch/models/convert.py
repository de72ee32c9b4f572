"""A GGUF file as a Hugging Face folder: config, weights as safetensors, tokenizer; whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from microbatch.errors import InvalidModel, InvalidSettings
from microbatch.models.gguf_architectures import Architecture, find_architecture, settings_of
from microbatch.models.gguf_file import GgufFile, open_gguf
from microbatch.models.gguf_weights import Weight, list_weights, read_weight
from microbatch.models.hugging_face import import_transformers, quiet
from microbatch.units import format_bytes

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LARGEST_SHARD = 4 * 10**9
"""Bytes of one file of weights, as far as a single weight is no larger."""

Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was written.

    Attributes:
        path: the folder.
        source: the GGUF file.
        architecture: the transformers class.
        parameters: how many.
        quantisation: elements of the file by its types, the most first.
        dtype: of the weights written.
        bytes: of the weights written.
        files: names in the folder.
        notes: what is missing, one sentence each.
    """

    path: str
    source: str
    architecture: str
    parameters: int
    quantisation: dict[str, int]
    dtype: str
    bytes: int
    files: tuple[str, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def convert(source: Path, folder: Path, *, dtype: str | None = None, progress: Progress | None = None) -> Conversion:
    """Writes `folder` from the GGUF file `source`; whatever fails, nothing is left behind.

    Args:
        dtype: fp32, fp16 or bf16; by default as the file's largest part has it, and for quantised files fp16, or bf16
            for models whose activations overflow fp16.

    Raises:
        InvalidModel: see `open_gguf`, `find_architecture`, `list_weights`; or the weights do not fit the architecture.
        InvalidSettings: an unknown dtype, a folder that holds something, or too little room on the disk.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InvalidSettings(f"Weights cannot be written in {dtype!r}.", f"Use one of {', '.join(DTYPES)}.")
    _check_target(folder)
    file = open_gguf(source)
    architecture = find_architecture(file)
    chosen = dtype or _own_dtype(file, architecture)
    weights = list_weights(file, architecture)
    transformers = import_transformers("Conversion writes a Hugging Face folder")
    with quiet(), _written_whole(folder) as unfinished:
        config = _write_config(transformers, file, architecture, DTYPES[chosen], unfinished)
        _check_fit(transformers, file, architecture, config, weights)
        written = _write_weights(file, architecture, weights, DTYPES[chosen], unfinished, progress)
        notes = _write_tokenizer(transformers, file, unfinished)
        files = tuple(sorted(entry.name for entry in unfinished.iterdir()))
    return Conversion(
        path=str(folder),
        source=str(source),
        architecture=architecture.kind,
        parameters=sum(_elements(weight.shape) for weight in weights),
        quantisation=file.types(),
        dtype=chosen,
        bytes=written,
        files=files,
        notes=notes,
    )


def _check_target(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise InvalidSettings(f"{folder} is a file.", "Name a folder.")
    if folder.is_dir() and any(folder.iterdir()):
        raise InvalidSettings(f"The folder {folder} is not empty.", "Name another, or empty it.")
    if not folder.absolute().parent.is_dir():
        raise InvalidSettings(f"The folder {folder.parent} does not exist.", f"Create it: mkdir -p {folder.parent}")


@contextmanager
def _written_whole(folder: Path) -> Iterator[Path]:
    """A folder beside, which takes the place of `folder` when the block has run through, and vanishes when not."""
    target = folder.absolute()
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield unfinished
        mask = os.umask(0)
        os.umask(mask)
        for path in unfinished.iterdir():
            path.chmod(0o666 & ~mask)  # safetensors writes for its owner alone
        unfinished.chmod(0o777 & ~mask)
        unfinished.replace(target)  # over an empty folder too
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _own_dtype(file: GgufFile, architecture: Architecture) -> str:
    most = next(iter(file.types()))
    own = {"F32": "fp32", "F64": "fp32", "BF16": "bf16", "F16": "fp16"}.get(most, "fp16")
    return "bf16" if own == "fp16" and architecture.needs_range else own


def _write_config(
    transformers: Any, file: GgufFile, architecture: Architecture, dtype: torch.dtype, folder: Path
) -> Any:
    kind = getattr(transformers, architecture.kind)
    try:
        config = kind.config_class(**settings_of(file, architecture))
    except InvalidModel:
        raise
    except Exception as error:
        raise InvalidModel(
            f"The metadata of {file.path} make no {architecture.kind}: {str(error).strip().splitlines()[0]}",
            "Take a file that llama.cpp's converter wrote.",
        ) from error
    config.architectures, config.dtype = [architecture.kind], dtype
    config.save_pretrained(folder)
    return config


def _check_fit(
    transformers: Any, file: GgufFile, architecture: Architecture, config: Any, weights: Sequence[Weight]
) -> None:
    """Every weight of the model is there in its shape, and no other.

    Experts, which transformers may stack, are compared by their number of elements.
    """
    with torch.device("meta"):
        model = getattr(transformers, architecture.kind)(config)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {}) if config.tie_word_embeddings else set()
    wanted = {name: tuple(value.shape) for name, value in model.named_parameters() if name not in tied}
    found = {weight.name: weight.shape for weight in weights}
    plain = {name: shape for name, shape in wanted.items() if not _is_expert(name)}
    for name, shape in plain.items():
        if found.get(name) != shape:
            has = f"has {found[name]}" if name in found else "is not there"
            raise InvalidModel(f"{file.path}: {name} should be {shape} and {has}.", "Take another file.")
    extra = sorted(name for name in found if name not in wanted and not _is_expert(name))
    if extra or _expert_elements(wanted) != _expert_elements(found):
        what = f"the weight {extra[0]}" if extra else "experts of other sizes"
        raise InvalidModel(f"{file.path} holds {what}, which {architecture.kind} has not.", "Take another file.")


def _is_expert(name: str) -> bool:
    return ".experts." in name or ".mlp.gate." in name or ".block_sparse_moe." in name


def _expert_elements(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(_elements(shape) for name, shape in shapes.items() if _is_expert(name))


def _elements(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _write_weights(
    file: GgufFile,
    architecture: Architecture,
    weights: Sequence[Weight],
    dtype: torch.dtype,
    folder: Path,
    progress: Progress | None,
) -> int:
    """Files of at most `LARGEST_SHARD` bytes, one in memory at a time, with an index where there are several."""
    from safetensors.torch import save_file

    shards = _shards(weights, dtype.itemsize)
    total = sum(_elements(weight.shape) for weight in weights) * dtype.itemsize
    _check_room(folder, total)
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        for weight in shard:
            values = read_weight(file, architecture, weight)
            tensors[weight.name] = torch.from_numpy(values).to(dtype).clone(memory_format=torch.contiguous_format)
            index[weight.name] = name
            if progress is not None:
                progress(len(index) / len(weights), weight.name)
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if len(shards) > 1:
        content = {"metadata": {"total_size": total}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    return total


def _shards(weights: Sequence[Weight], itemsize: int) -> list[list[Weight]]:
    shards: list[list[Weight]] = []
    room = 0
    for weight in weights:
        size = _elements(weight.shape) * itemsize
        if size > room or not shards:
            shards.append([])
            room = LARGEST_SHARD
        shards[-1].append(weight)
        room -= size
    return shards


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InvalidSettings(
            f"The weights need {format_bytes(needed)}, and {folder.parent} has {format_bytes(free)} left.",
            "Make room, or choose a 16-bit dtype.",
        )


def _write_tokenizer(transformers: Any, file: GgufFile, folder: Path) -> tuple[str, ...]:
    """The tokenizer out of the file, by transformers' own converter.

    It looks for further settings beside the file, so it sees the file alone in a folder of its own.
    """
    if "tokenizer.ggml.tokens" not in file.metadata:
        return (f"{file.path} holds no tokenizer, so none was written.",)
    with tempfile.TemporaryDirectory() as alone:
        (Path(alone) / "model.gguf").symlink_to(file.path.absolute())
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                alone, gguf_file="model.gguf", local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            return (f"The tokenizer could not be converted: {reason[0]}",)
        tokenizer.save_pretrained(folder)
    return ()
