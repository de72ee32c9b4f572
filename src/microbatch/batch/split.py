"""Cutting a batch into pieces, whatever it is made of.

A batch is a tensor or array, or members in a mapping, dataclass, named tuple, tuple or list, nested as deep as one
likes; a list may also hold the samples themselves. Dimension 0 is the batch. What has no batch (numbers, text, None,
tensors of no dimension, or of size 1 beside larger ones, which broadcast) goes whole into every piece.
Pieces are views of the batch's tensors: nothing is copied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from microbatch.batch.members import (
    is_leaf,
    is_plain_sequence,
    joined,
    leaf_size,
    leaves,
    members,
    rebuilt,
    rebuilt_mapping,
)
from microbatch.batch.packed import cut_packed, cut_special, packed_size
from microbatch.errors import InvalidBatch, InvalidBatchSizes

Items = range | list[int]
"""Which items of a batch: a range is cut out as views, a list is copied together."""

_Cut = Callable[[Items], Any]
"""These items of what it was made for."""

_TOP = ""
"""Path of the batch itself."""

_ANOTHER_KIND = "Use a tensor, a list of samples, or members in a dict, tuple, named tuple or data class."
_SAME = "Give every member one entry per item; what belongs to the whole batch goes into forward and loss by itself."


def batch_size_of(batch: object, *, list_of_samples: bool | None = None) -> int:
    """Items in a batch.

    Args:
        batch: see the module.
        list_of_samples: whether a list at the top holds samples (True) or members (False). By default a list of
            tensors that differ in dtype or number of dimensions holds members (a DataLoader gives ``[inputs,
            targets]`` so), and a list of alike tensors of different lengths, or of anything else, holds samples.

    Raises:
        InvalidBatch: members of different lengths, no member with a batch, or a list that can be read in both ways.
    """
    return _read(batch, list_of_samples).size


def split(batch: Any, sizes: Sequence[int], *, list_of_samples: bool | None = None) -> Iterator[Any]:
    """Pieces of a batch, in order, each of the batch's own type and made when it is asked for.

    Args:
        batch: see the module.
        sizes: items of each piece; they add up to the batch.
        list_of_samples: see `batch_size_of`.

    Raises:
        InvalidBatch: as `batch_size_of`.
        InvalidBatchSizes: a size below 1, or sizes that do not add up to the batch.
    """
    reading = _read(batch, list_of_samples)
    if min(sizes, default=1) < 1 or sum(sizes) != reading.size:
        raise InvalidBatchSizes(
            f"Pieces of {list(sizes)} do not add up to a batch of {reading.size}.", "Give sizes of 1 or more."
        )
    return _pieces(batch, sizes, reading)


def take(batch: Any, items: Items, *, list_of_samples: bool | None = None) -> Any:
    """Some items of a batch, in that order, as a batch of the same type.

    Args:
        batch: see the module; sequences that lie end to end can only be cut out as a range.
        items: their places; those of a list are copied together, but for the whole batch as it is.
        list_of_samples: see `batch_size_of`.

    Raises:
        InvalidBatch: as `batch_size_of`.
    """
    return taking(batch, list_of_samples=list_of_samples)(items)


def taking(batch: Any, *, list_of_samples: bool | None = None) -> Callable[[Items], Any]:
    """`take` for one batch, which is read once."""
    reading = _read(batch, list_of_samples)
    cut, every = reading.cut(batch), range(reading.size)
    return lambda items: batch if len(items) == len(every) and list(items) == list(every) else cut(items)


def to_device(piece: Any, device: torch.device) -> Any:
    """The piece with its tensors on a device; a copy from pinned memory does not block."""
    if isinstance(piece, Tensor):
        return piece.to(device, non_blocking=True)
    if isinstance(piece, PackedSequence):
        return piece.to(device)  # type: ignore[arg-type]  # the stub knows dtypes only
    return rebuilt(piece, "", lambda _, item: to_device(item, device))


def is_list_of_samples(batch: object) -> bool | None:
    """How a list at the top is read when its sizes leave no doubt; None for all other batches."""
    return bool(_read(batch, None).samples) if type(batch) is list else None


@dataclasses.dataclass(frozen=True, slots=True)
class _Reading:
    """How a batch is read.

    Attributes:
        size: items.
        samples: whether sequences that may hold samples or members hold samples; None where members beyond doubt
            give the size, which then decides for each.
        told: what `samples` is told to be for a list at the top.
        packed: whether cumulative lengths say where its sequences end.
    """

    size: int
    samples: bool | None
    told: bool | None
    packed: bool = False

    def cut(self, batch: Any) -> _Cut:
        """What gives items of the batch.

        Raises:
            InvalidBatch: what has entries, but not one per item.
        """
        if self.packed:
            return lambda items: cut_packed(batch, items[0], items[-1] + 1)
        return _plan(batch, _TOP, self) or (lambda items: batch)  # noqa: ARG005


def _pieces(batch: Any, sizes: Sequence[int], reading: _Reading) -> Iterator[Any]:
    cut, start = reading.cut(batch), 0
    for size in sizes:
        yield batch if size == reading.size else cut(range(start, start + size))
        start += size


def _part(value: Any, items: Items) -> Any:
    """Items of a sequence of samples, a tensor or an array."""
    if isinstance(items, list):
        return _chosen(value, items)
    start, stop = items.start, items.stop
    if type(value) is Tensor and value.layout == torch.strided and not value.is_nested:
        return value[start:stop]
    if (special := cut_special(value, start, stop)) is not None:
        return special
    if isinstance(value, Tensor) and value.layout != torch.strided:
        return value.index_select(0, torch.arange(start, stop, device=value.device))
    return value[start:stop]


def _chosen(value: Any, items: list[int]) -> Any:
    if isinstance(value, PackedSequence) or (isinstance(value, Tensor) and value.is_nested):
        raise InvalidBatch("Sequences that lie end to end are cut in their order.", "Give padded members, or a list.")
    if isinstance(value, Tensor):
        return value.index_select(0, torch.tensor(items, device=value.device))
    if isinstance(value, np.ndarray):
        return value[items]
    chosen = [value[item] for item in items]
    return chosen if type(value) is list else type(value)(chosen)


def _read(batch: Any, told: bool | None) -> _Reading:
    if (packed := packed_size(batch)) is not None:
        return _Reading(packed, None, told, packed=True)
    firm, open_ = dict(_firm(_TOP, batch, told)), dict(_undecided(_TOP, batch, told))
    reading = _Reading(_agreed(firm), None, told) if firm else _read_sequences(batch, open_, told)
    reading.cut(batch)  # refuses now what could not be cut later
    return reading


def _read_sequences(batch: Any, sequences: dict[str, Sequence[Any]], told: bool | None) -> _Reading:
    """Sequences alone: samples when their lengths agree, members when their tensors do; never a guess between both."""
    if not sequences:
        raise InvalidBatch(f"A batch of type {type(batch).__name__} has no dimension to cut.", _ANOTHER_KIND)
    lengths = {path: len(sequence) for path, sequence in sequences.items()}
    inside = {name: size for path, sequence in sequences.items() for name, size in leaves(path, sequence)}
    only_samples = told is True or any(_holds_samples_only(sequence) for sequence in sequences.values())
    as_members = bool(inside) and not only_samples and len(set(inside.values())) == 1
    as_samples = len(set(lengths.values())) == 1
    if as_samples and as_members:
        what = next(iter(lengths)) or "The batch"
        raise InvalidBatch(
            f"{what} can be read as {next(iter(lengths.values()))} samples or as members with "
            f"{_agreed(inside)} items each.",
            "Give members as a tuple, or say list_of_samples=True or False.",
        )
    return _Reading(_agreed(inside), False, told) if as_members else _Reading(_agreed(lengths), True, told)


def _firm(path: str, value: Any, told: bool | None) -> Iterator[tuple[str, int]]:
    """Sizes of the tensors that are members beyond doubt: not inside a sequence that may hold samples."""
    if is_leaf(value):
        if (size := leaf_size(value)) is not None:
            yield path, size
    elif not _may_hold_samples(path, value, told):
        for name, item in members(path, value):
            yield from _firm(name, item, told)


def _undecided(path: str, value: Any, told: bool | None) -> Iterator[tuple[str, Sequence[Any]]]:
    """The outermost sequences that may hold samples."""
    if is_leaf(value):
        return
    if _may_hold_samples(path, value, told):
        yield path, value
    else:
        for name, item in members(path, value):
            yield from _undecided(name, item, told)


def _may_hold_samples(path: str, value: Any, told: bool | None) -> bool:
    """A sequence whose elements are of one kind; a tuple at the top holds members, as a call's arguments do."""
    if not is_plain_sequence(value) or (path == _TOP and isinstance(value, tuple)):
        return False
    if path == _TOP and told is not None:
        return told
    kinds = {(type(i), i.dtype, i.ndim) if isinstance(i, (Tensor, np.ndarray)) else (type(i), None, 0) for i in value}
    return len(kinds) <= 1


def _holds_samples_only(sequence: Sequence[Any]) -> bool:
    """Members are tensors: a list of dicts, tuples, texts or numbers is one of samples, a tuple of texts too."""
    if isinstance(sequence, list):
        return not any(is_leaf(item) for item in sequence)
    return not dict(leaves("", sequence))


def _plan(value: Any, path: str, reading: _Reading) -> _Cut | None:
    """How the batch is cut, found once for all pieces; None for what goes whole into every piece."""
    if is_leaf(value):
        own = leaf_size(value)
        if own is None or (own == 1 and reading.size > 1):
            return None
        _check(path, own, reading)
        return partial(_part, value)
    if _may_hold_samples(path, value, reading.told) and _is_one_per_item(path, value, reading):
        _check(path, len(value), reading)
        return partial(_part, value)
    if isinstance(value, Mapping):
        return _plan_of_mapping(value, path, reading)
    cuts = {name: _plan(item, name, reading) for name, item in members(path, value)}
    if not any(cuts.values()):
        return None
    return lambda items: rebuilt(value, path, lambda name, item: _piece_of(item, cuts[name], items))


def _plan_of_mapping(value: Mapping[Any, Any], path: str, reading: _Reading) -> _Cut | None:
    cuts = [(key, item, _plan(item, joined(path, key), reading)) for key, item in value.items()]
    if not any(cut for _, _, cut in cuts):
        return None
    return lambda items: rebuilt_mapping(value, {key: item if cut is None else cut(items) for key, item, cut in cuts})


def _piece_of(item: Any, cut: _Cut | None, items: Items) -> Any:
    return item if cut is None else cut(items)


def _is_one_per_item(path: str, value: Sequence[Any], reading: _Reading) -> bool:
    """Beside members a list has one sample per item if its length allows, a tuple if it cannot be members."""
    if reading.samples is not None:
        return reading.samples
    if _holds_samples_only(value):
        return True
    if isinstance(value, list):
        return len(value) == reading.size
    return any(size not in (1, reading.size) for _, size in leaves(path, value)) and len(value) == reading.size


def _check(path: str, own: int, reading: _Reading) -> None:
    if own != reading.size:
        raise InvalidBatch(f"{path or 'The list'} has {own} entries in a batch of {reading.size} items.", _SAME)


def _agreed(sizes: dict[str, int]) -> int:
    """The one size of all members; those of size 1 fit every other, as in broadcasting."""
    if len(set(sizes.values()) - {1}) > 1:
        listed = ", ".join(f"{name or 'batch'} has {size}" for name, size in sizes.items())
        raise InvalidBatch(f"The batch's members have different lengths: {listed}.", _SAME)
    name, size = max(sizes.items(), key=lambda item: abs(item[1] - 1))
    if size < 1:
        raise InvalidBatch(f"The batch is empty: {name or 'batch'} has {size} items.", "Give 1 item or more.")
    return size
