"""A GGUF file as metadata and tensors: opened, checked, and dequantised one tensor at a time.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from microbatch.errors import InvalidModel
from microbatch.models.folder import INSTALL

MAGIC = b"GGUF"


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open file.

    Attributes:
        path: the file.
        architecture: as in "llama", by llama.cpp's names.
        metadata: by key; those of the architecture without its name, as in "attention.head_count".
        tensors: by name, each with `shape`, `tensor_type` and `data` of the package gguf; read when asked for.
    """

    path: Path
    architecture: str
    metadata: dict[str, Any]
    tensors: dict[str, Any]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, in torch's order: the last dimension is the one that lies together."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def values(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor dequantised, in torch's order.

        Raises:
            InvalidModel: a quantisation that the package gguf cannot undo.
        """
        tensor = self.tensors[name]
        quants: Any = importlib.import_module("gguf.quants")
        try:
            values: npt.NDArray[np.float32] = quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise InvalidModel(
                f"{self.path}: the tensor {name} is quantised as {tensor.tensor_type.name}, which cannot be undone.",
                "Install a newer gguf, or take another quantisation of the model.",
            ) from error
        return values.reshape(self.shape(name))

    def types(self) -> dict[str, int]:
        """Elements by quantisation, the most first."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors.values():
            counts[tensor.tensor_type.name] += int(tensor.n_elements)
        return dict(counts.most_common())


def open_gguf(path: Path) -> GgufFile:
    """Opens a file and reads its metadata; tensors stay on disk until they are asked for.

    Raises:
        InvalidModel: no such file, not GGUF, cut off, one part of several, without an architecture; or the package
            gguf is missing.
    """
    _check_start(path)
    try:
        reader_of: Any = importlib.import_module("gguf").GGUFReader
    except ImportError as error:
        raise InvalidModel(f"{path} needs the package gguf, which is not installed.", INSTALL) from error
    try:
        reader = reader_of(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError, MemoryError) as error:
        raise InvalidModel(
            f"{path} is cut off or broken: {str(error).splitlines()[0] if str(error) else type(error).__name__}.",
            "Download it again.",
        ) from error
    return _described(path, fields, tensors)


def _check_start(path: Path) -> None:
    if not path.is_file():
        raise InvalidModel(f"There is no file {str(path)!r}.", "Check the path.")
    with path.open("rb") as file:
        start = file.read(len(MAGIC))
    if start != MAGIC:
        raise InvalidModel(f"{path} is no GGUF file: it begins with {start!r}, not {MAGIC!r}.", "Name a .gguf file.")


def _described(path: Path, fields: dict[str, Any], tensors: dict[str, Any]) -> GgufFile:
    architecture = fields.get("general.architecture")
    if not isinstance(architecture, str):
        raise InvalidModel(f"{path} names no architecture.", "Take a file that llama.cpp's converter wrote.")
    parts = fields.get("split.count", 1)
    if parts > 1:
        raise InvalidModel(
            f"{path} is one of {parts} parts of a model.", "Join them first: llama-gguf-split --merge FIRST_PART OUT."
        )
    if not tensors:
        raise InvalidModel(f"{path} holds no weights.", "Take the file of the whole model.")
    metadata = {name.removeprefix(f"{architecture}."): value for name, value in fields.items()}
    return GgufFile(path, architecture, metadata, tensors)
