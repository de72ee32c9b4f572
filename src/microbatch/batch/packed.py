"""Batches whose sequences lie end to end without padding: packed members with offsets, packed and nested tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from microbatch.errors import InvalidBatch

_OFFSETS = ("cu_seq", "cu_len")
"""How the names of cumulative lengths begin: cu_seqlens, cu_seqlens_q, cu_seq_lens_k."""


def packed_size(batch: object) -> int | None:
    """Sequences in a packed batch; None for a batch that has no cumulative lengths.

    Raises:
        InvalidBatch: cumulative lengths that do not start at 0, fall, or disagree in number.
    """
    offsets = _offsets(_named(batch))
    if not offsets:
        return None
    sizes = {name: len(values) - 1 for name, values in offsets.items()}
    if len(set(sizes.values())) != 1:
        raise InvalidBatch(f"The cumulative lengths disagree on the number of sequences: {sizes}.", "Make them agree.")
    for name, values in offsets.items():
        if len(values) < 2 or values[0] != 0 or any(b < a for a, b in pairwise(values)):
            raise InvalidBatch(f"{name} holds no cumulative lengths: {values[:8]}.", "They start at 0 and never fall.")
    return next(iter(sizes.values()))


def packed_offsets(batch: object) -> list[int] | None:
    """Where the sequences of a packed batch end, from 0 on; None for a batch that has no cumulative lengths."""
    return next(iter(_offsets(_named(batch)).values()), None)


def cut_packed(batch: Any, start: int, stop: int) -> Any:
    """Sequences `start` to `stop` of a packed batch; None for a batch that has no cumulative lengths.

    Tensors with one entry per token (in dimension 0, or in dimension 1 after one of size 1) are cut at the borders
    of the sequences, those with one entry per sequence by sequence; ``max_...`` is computed anew.
    """
    named = _named(batch)
    offsets = _offsets(named)
    if not offsets:
        return None
    return _renewed(batch, {name: _cut(name, item, start, stop, offsets) for name, item in named.items()})


def special_size(value: object) -> int | None:
    """Sequences in a PackedSequence or a nested tensor; None for everything else."""
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    return int(value.size(0)) if isinstance(value, Tensor) and value.is_nested else None


def cut_special(value: Any, start: int, stop: int) -> Any:
    """Sequences `start` to `stop` of a PackedSequence or a nested tensor; None for everything else."""
    if isinstance(value, PackedSequence):
        return pack_sequence(unpack_sequence(value)[start:stop], enforce_sorted=value.sorted_indices is None)
    if not value.is_nested if isinstance(value, Tensor) else True:
        return None
    return torch.nested.as_nested_tensor(list(value.unbind()[start:stop]), layout=value.layout)


def _named(batch: Any) -> dict[str, Any]:
    if isinstance(batch, Mapping):
        return {str(name): item for name, item in batch.items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {}


def _offsets(named: dict[str, Any]) -> dict[str, list[int]]:
    return {
        name: item.tolist()
        for name, item in named.items()
        if name.startswith(_OFFSETS) and isinstance(item, Tensor) and item.dim() == 1
    }


def _cut(name: str, item: Any, start: int, stop: int, offsets: dict[str, list[int]]) -> Any:
    if name in offsets:
        return item[start : stop + 1] - item[start]
    if name.startswith("max_") and (isinstance(item, int) or (isinstance(item, Tensor) and item.dim() == 0)):
        return _longest(name, item, start, stop, offsets)
    if not isinstance(item, Tensor) or item.dim() == 0:
        return item
    for values in offsets.values():
        tokens = values[-1]
        if item.shape[0] == tokens:
            return item[values[start] : values[stop]]
        if item.dim() > 1 and item.shape[0] == 1 and item.shape[1] == tokens:
            return item[:, values[start] : values[stop]]
    sequences = len(next(iter(offsets.values()))) - 1
    if item.shape[0] == sequences:
        return item[start:stop]
    if item.shape[0] == 1:
        return item
    totals = {values[-1] for values in offsets.values()}
    raise InvalidBatch(
        f"{name} has {item.shape[0]} entries in a packed batch of {sequences} sequences and {totals} tokens.",
        "Give one entry per token or per sequence.",
    )


def _longest(name: str, item: Any, start: int, stop: int, offsets: dict[str, list[int]]) -> Any:
    same_end = [values for other, values in offsets.items() if other[-2:] == name[-2:]]
    values = (same_end or list(offsets.values()))[0][start : stop + 1]
    longest = max(b - a for a, b in pairwise(values))
    return torch.full_like(item, longest) if isinstance(item, Tensor) else longest


def _renewed(batch: Any, items: dict[str, Any]) -> Any:
    if type(batch) is dict:
        return items
    result = copy.copy(batch)
    if isinstance(batch, Mapping):
        if hasattr(result, "data"):
            result.data = dict(result.data)
        result.update(items)
        return result
    for name, item in items.items():
        object.__setattr__(result, name, item)
    return result
