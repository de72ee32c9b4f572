"""The weights of a GGUF file under transformers' names and in its order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from microbatch.errors import InvalidModel
from microbatch.models.gguf_architectures import NAMES, UNUSED, Architecture
from microbatch.models.gguf_file import GgufFile


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight as transformers stores it.

    Attributes:
        name: transformers' name.
        source: the tensor of the file that holds it.
        expert: which part of that tensor; None: all of it.
        shape: its own.
    """

    name: str
    source: str
    expert: int | None
    shape: tuple[int, ...]


def list_weights(file: GgufFile, architecture: Architecture) -> list[Weight]:
    """Every weight, in the order of the file.

    Raises:
        InvalidModel: a tensor for which the architecture has no place.
    """
    return [weight for source in file.tensors for weight in _weights(file, architecture, source)]


def _weights(file: GgufFile, architecture: Architecture, source: str) -> Iterator[Weight]:
    *block, part, suffix = source.split(".")
    if part in UNUSED:
        return
    name = {**NAMES, **architecture.names}.get(part)
    if (
        name is None
        or suffix not in ("weight", "bias")
        or (block and (block[0] != "blk" or len(block) != _BLOCK_PARTS))
    ):
        raise InvalidModel(
            f"{file.path} holds the tensor {source!r}, for which {architecture.kind} has no place.",
            "Its config would be a guess; take the original model.",
        )
    full = f"model.layers.{block[1]}.{name}.{suffix}" if block else f"{name}.{suffix}"
    shape = file.shape(source)
    if "*" not in full:
        # A gate for one shared expert is one row, which llama.cpp stores flat.
        yield Weight(full, source, None, (1, *shape) if part == "ffn_gate_inp_shexp" and len(shape) == 1 else shape)
        return
    for expert in range(shape[0]):
        yield Weight(full.replace("*", str(expert)), source, expert, shape[1:])


def read_weight(file: GgufFile, architecture: Architecture, weight: Weight) -> npt.NDArray[np.float32]:
    """The values of one weight, with what llama.cpp changed undone."""
    values = file.values(weight.source)
    part = weight.source.split(".")[-2]
    if architecture.permuted and part in ("attn_q", "attn_k"):
        heads = "attention.head_count" if part == "attn_q" else "attention.head_count_kv"
        values = _unpermuted(values, int(file.metadata.get(heads, file.metadata["attention.head_count"])))
    if architecture.norm_offset and part.endswith("norm"):
        values = values - np.float32(architecture.norm_offset)
    chosen: npt.NDArray[Any] = values if weight.expert is None else values[weight.expert]
    return chosen.reshape(weight.shape)


def _unpermuted(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of each head from pairs (0, d/2, 1, d/2 + 1, …) to halves (0, 1, …, d/2, …); the inverse of llama.cpp's."""
    paired = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return paired.swapaxes(1, 2).reshape(values.shape)


_BLOCK_PARTS = 2
