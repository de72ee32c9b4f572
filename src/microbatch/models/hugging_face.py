"""A Hugging Face folder as a model: any architecture that the installed transformers knows.

Nothing is fetched, no code of the folder runs, and no pickle is opened: weights come from safetensors or not at all.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from microbatch.errors import InvalidModel
from microbatch.models.folder import INSTALL, Folder, read_folder
from microbatch.models.loaded import Loaded, Weights
from microbatch.models.torchvision_operators import make_torchvision_importable

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


def load_folder(text: str, *, dtype: torch.dtype | None = None, weights: Weights = "load") -> Loaded:
    """The model of a folder with config.json, in eval mode.

    A causal language model offers prefill and decode beside inference and training.

    Args:
        dtype: of the floating-point weights; by default what config.json says, else fp32.
        weights: ``"load"`` takes safetensors where there are any and a random start else; ``"random"``; ``"meta"``
            builds shapes only, without memory.

    Raises:
        InvalidModel: see `microbatch.models.folder.read_folder`; transformers is missing, cannot build or cannot load
            the model; or no example is known for one of its inputs.
    """
    transformers = import_transformers(f"{text} is a Hugging Face folder")
    from microbatch.models.folder_modes import describe

    folder = read_folder(Path(text), list(transformers.CONFIG_MAPPING.keys()))
    with quiet():
        model, notes = _build(transformers, folder, dtype, weights)
    for note in notes:
        logger.warning(note)
    return describe(text, model.eval(), folder.path, notes)


def load_encoder(path: Path, *, dtype: torch.dtype | None = None) -> tuple[Any, tuple[str, ...]]:
    """The model of a folder without the head that config.json names, in eval mode: what embeddings are made of.

    Returns:
        The model, and what a user must know of it, one sentence each.

    Raises:
        InvalidModel: as `load_folder`.
    """
    transformers = import_transformers(f"{path} is a Hugging Face folder")
    folder = read_folder(path, list(transformers.CONFIG_MAPPING.keys()))
    with quiet():
        model, notes = _build(transformers, folder, dtype, "load", bare=True)
    return model.eval(), notes


def import_transformers(why: str) -> Any:
    """The package, made quiet: without progress bars, and with errors only unless TRANSFORMERS_VERBOSITY says more.

    Raises:
        InvalidModel: it is not installed; the message begins with `why`.
    """
    make_torchvision_importable()
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise InvalidModel(f"{why}, and the package transformers is not installed.", INSTALL) from error
    transformers.utils.logging.disable_progress_bar()
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers.utils.logging.set_verbosity_error()
    return transformers


@contextmanager
def quiet() -> Iterator[None]:
    """What transformers says while it builds and loads is not the user's concern; errors pass through."""
    their_logging: Any = importlib.import_module("transformers.utils.logging")
    before = their_logging.get_verbosity()
    their_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        their_logging.set_verbosity(before)


def _build(
    transformers: Any, folder: Folder, dtype: torch.dtype | None, weights: Weights, *, bare: bool = False
) -> tuple[Any, tuple[str, ...]]:
    make_config = transformers.CONFIG_MAPPING[folder.model_type].from_dict
    config = _attempt(f"{folder.path / 'config.json'} is not valid", lambda: make_config(folder.settings))
    kind, options = (_bare_class if bare else _model_class)(transformers, folder, config)
    target = dtype or _own_dtype(config)
    if weights == "load" and folder.has_weights:
        return _with_weights(kind, folder, config, target, options)
    notes = folder.notes
    stored = folder.settings.get("quantization_config")
    if isinstance(stored, dict):
        method = stored.get("quant_method", "a method of its own")
        notes += (f"{folder.path} stores its weights quantised ({method}); here they are {str(target)[6:]}.",)
    if weights == "load":
        notes += (f"{folder.path} has no safetensors: the weights are random.",)
    device = "meta" if weights == "meta" else "cpu"
    build = partial(kind, **options)
    return _attempt(f"{kind.__name__} cannot be built", lambda: _without_weights(build, config, target, device)), notes


def _own_dtype(config: Any) -> torch.dtype:
    found = getattr(config, "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.float32


def _without_weights(kind: Any, config: Any, dtype: torch.dtype, device: str) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return kind(config).to(device)  # weight normalisation and its like leave parts behind
    finally:
        torch.set_default_dtype(before)


def _with_weights(
    kind: Any, folder: Folder, config: Any, dtype: torch.dtype, options: dict[str, Any]
) -> tuple[Any, tuple[str, ...]]:
    def load() -> Any:
        return kind.from_pretrained(
            folder.path,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # checked below, in words of one line
            output_loading_info=True,
            **options,
        )

    model, info = _attempt(f"The weights of {folder.path} cannot be loaded", load)
    for name, stored, wanted in sorted(info["mismatched_keys"]):
        raise InvalidModel(
            f"{folder.path}: the weight {name} is {tuple(stored)}, and config.json makes it {tuple(wanted)}.",
            "Check config.json against the model's own.",
        )
    missing = sorted(info["missing_keys"])
    if not missing:
        return model, folder.notes
    note = f"{folder.path} lacks {len(missing)} of the weights, as {missing[0]}: they are random."
    return model, (*folder.notes, note)


def _model_class(transformers: Any, folder: Folder, config: Any) -> tuple[Any, dict[str, Any]]:
    """The class that config.json names, else the one that fits the model type best."""
    named = folder.settings.get("architectures")
    if not named:
        return _fitting_class(transformers, folder.model_type, config), {}
    name = str(named[0]) if isinstance(named, list) else str(named)
    kind = getattr(transformers, name, None) if name.isidentifier() else None
    if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
        return kind, {}
    close = get_close_matches(name, [key for key in dir(transformers) if "For" in key or key.endswith("Model")], n=3)
    raise InvalidModel(
        f"transformers has no architecture {name!r}, which {folder.path / 'config.json'} names.",
        f"Did you mean {' or '.join(close)}?" if close else "Install a newer transformers, or use file.py:callable.",
    )


def _bare_class(transformers: Any, folder: Folder, config: Any) -> tuple[Any, dict[str, Any]]:  # noqa: ARG001
    """The class without a head, and how it is built without a pooling layer that nobody reads."""
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    name = auto.MODEL_MAPPING_NAMES.get(folder.model_type)
    if name is None:
        raise InvalidModel(f"A {folder.model_type} has no form without its head in transformers.", "Use --as module.")
    kind = getattr(transformers, name if isinstance(name, str) else name[0])
    pooled = "add_pooling_layer" in inspect.signature(kind.__init__).parameters
    return kind, {"add_pooling_layer": False} if pooled else {}


def _fitting_class(transformers: Any, model_type: str, config: Any) -> Any:
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    names = [
        table[model_type]
        for table in (
            auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if config.is_encoder_decoder else {},
            auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
            auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
            auto.MODEL_MAPPING_NAMES,
        )
        if model_type in table
    ]
    if not names:
        raise InvalidModel(
            f"config.json names no architectures, and {model_type!r} has no usual one.",
            'Add one, as in "architectures": ["LlamaForCausalLM"].',
        )
    name = names[0] if isinstance(names[0], str) else names[0][0]
    return getattr(transformers, name)


def _attempt(failed: str, run: Callable[[], Result]) -> Result:
    """What `run` returns.

    Raises:
        InvalidModel: it raised; the message is `failed` and the first line of that exception.
    """
    try:
        return run()
    except Exception as error:
        raise InvalidModel(
            f"{failed}: {type(error).__name__}: {_in_a_line(error)}.", "Check config.json against the model's own."
        ) from error


def _in_a_line(error: Exception) -> str:
    """The first line of what an exception says, and the next one where that only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return (f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]).rstrip(".")
