"""Cutting a batch into pieces, whatever it is made of.

A batch is a tensor or array, or members in a mapping, dataclass, named tuple, tuple or list, nested as deep as one
likes; a list may also hold the samples themselves. Dimension 0 is the batch. What has no batch (numbers, text, None,
tensors of no dimension, or of size 1 beside larger ones, which broadcast) goes whole into every piece.
Pieces are views of the batch's tensors: nothing is copied.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from microbatch.batch.packed import cut_packed, cut_special, packed_size, special_size
from microbatch.errors import InvalidBatch, InvalidBatchSizes

_SAY = "Give members as a tuple, or say list_of_samples=True or False."


def batch_size_of(batch: object, *, list_of_samples: bool | None = None) -> int:
    """Items in a batch.

    Args:
        batch: see the module.
        list_of_samples: whether a list at the top holds samples (True) or members (False). By default a list whose
            elements differ in dtype or number of dimensions holds members (a DataLoader gives ``[inputs, targets]``
            so), one of alike elements of different lengths holds samples.

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


def to_device(piece: Any, device: torch.device) -> Any:
    """The piece with its tensors on a device; a copy from pinned memory does not block."""
    return _mapped(piece, lambda tensor: tensor.to(device, non_blocking=True))


def is_list_of_samples(batch: object) -> bool | None:
    """How a list at the top is read when its sizes leave no doubt; None for all other batches."""
    return _read(batch, None).samples if type(batch) is list else None


@dataclasses.dataclass(frozen=True, slots=True)
class _Reading:
    """Items in a batch, and whether sequences without a firm member beside them hold samples."""

    size: int
    samples: bool


def _pieces(batch: Any, sizes: Sequence[int], reading: _Reading) -> Iterator[Any]:
    start = 0
    for size in sizes:
        yield batch if size == reading.size else _cut(batch, start, start + size, reading)
        start += size


def _read(batch: object, told: bool | None) -> _Reading:
    packed = packed_size(batch)
    if packed is not None:
        return _Reading(packed, samples=False)
    firm = dict(_firm("batch" if _is_leaf(batch) else "", batch, top=True))
    if firm and type(batch) is not list:
        return _Reading(_agreed(firm), samples=False)
    return _read_sequences(batch, told)


def _read_sequences(batch: object, told: bool | None) -> _Reading:
    """Sequences alone: samples when their lengths agree, members when their tensors do; never a guess between both."""
    lengths = dict(_lengths("batch", batch))
    leaves = dict(_leaves("", batch))
    as_samples = bool(lengths) and len(set(lengths.values())) == 1 and _may_be_samples(batch)
    as_members = bool(leaves) and _is_agreed(leaves)
    if told is None and as_samples and as_members:
        raise InvalidBatch(
            f"The batch can be read as {next(iter(lengths.values()))} samples or as members with "
            f"{_agreed(leaves)} items each.",
            _SAY,
        )
    if (told is True or told is None) and as_samples:
        return _Reading(_positive("batch", next(iter(lengths.values()))), samples=True)
    if leaves and told is not True:
        return _Reading(_agreed(leaves), samples=False)
    raise InvalidBatch(f"{_described(batch)} holds no member with a batch dimension.", "Give at least one tensor.")


def _may_be_samples(batch: object) -> bool:
    return not isinstance(batch, list) or _are_alike(batch)


def _are_alike(items: Sequence[Any]) -> bool:
    """Samples of one kind: one type, and for tensors one dtype and number of dimensions."""
    kinds = {(type(i), i.dtype, i.dim()) if isinstance(i, Tensor) else (type(i), None, None) for i in items}
    return len(kinds) == 1


def _firm(path: str, value: object, *, top: bool = False) -> Iterator[tuple[str, int]]:
    """Sizes of the tensors that are members beyond doubt: not inside a list or tuple below the top."""
    if _is_leaf(value):
        if (size := _leaf_size(value)) is not None:
            yield path, size
    elif top or not _is_plain_sequence(value):
        for name, item in _members(path, value):
            yield from _firm(name, item)


def _leaves(path: str, value: object) -> Iterator[tuple[str, int]]:
    if _is_leaf(value):
        if (size := _leaf_size(value)) is not None:
            yield path, size
    else:
        for name, item in _members(path, value):
            yield from _leaves(name, item)


def _lengths(path: str, value: object) -> Iterator[tuple[str, int]]:
    """Lengths of the outermost sequences: the batch itself if a list, else those that its members are."""
    if isinstance(value, list) or (isinstance(value, tuple) and path != "batch" and _is_plain_sequence(value)):
        yield path, len(value)
    elif not _is_leaf(value):
        for name, item in _members("" if path == "batch" else path, value):
            yield from _lengths(name, item)


def _is_leaf(value: object) -> bool:
    return isinstance(value, (Tensor, np.ndarray, PackedSequence))


def _leaf_size(value: Any) -> int | None:
    special = special_size(value)
    if special is not None:
        return special
    return int(value.shape[0]) if value.ndim else None


def _is_plain_sequence(value: object) -> bool:
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields") and not isinstance(value, torch.Size)


def _members(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((_joined(path, key), item) for key, item in value.items())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((_joined(path, f.name), getattr(value, f.name)) for f in dataclasses.fields(value))
    elif hasattr(value, "_fields"):
        yield from ((_joined(path, name), getattr(value, name)) for name in value._fields)
    elif _is_plain_sequence(value):
        yield from ((f"{path or 'batch'}[{index}]", item) for index, item in enumerate(value))


def _joined(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def _is_agreed(sizes: dict[str, int]) -> bool:
    return len(set(sizes.values()) - {1}) <= 1


def _agreed(sizes: dict[str, int]) -> int:
    if not _is_agreed(sizes):
        listed = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise InvalidBatch(
            f"The batch's members have different lengths: {listed}.", "Give every member the same number of items."
        )
    name, size = max(sizes.items(), key=lambda item: abs(item[1] - 1))
    return _positive(name, size)


def _positive(name: str, size: int) -> int:
    if size < 1:
        raise InvalidBatch(f"The batch is empty: {name} has {size} items.", "Give 1 item or more.")
    return size


def _described(batch: object) -> str:
    return f"A batch of type {type(batch).__name__}"


def _cut(value: Any, start: int, stop: int, reading: _Reading) -> Any:
    packed = cut_packed(value, start, stop)
    return _part("", value, start, stop, reading) if packed is None else packed


def _part(path: str, value: Any, start: int, stop: int, reading: _Reading) -> Any:
    if _is_leaf(value):
        return _part_of_leaf(path, value, start, stop, reading.size)
    if _is_plain_sequence(value) and _holds_samples(path, value, reading):
        return value[start:stop]
    return _rebuilt(value, path, lambda name, item: _part(name, item, start, stop, reading))


def _part_of_leaf(path: str, value: Any, start: int, stop: int, size: int) -> Any:
    own = _leaf_size(value)
    if own is None or (own == 1 and size > 1):
        return value
    if own != size:
        raise InvalidBatch(f"{path} has {own} items in a batch of {size}.", _SAY)
    special = cut_special(value, start, stop)
    return value[start:stop] if special is None else special


def _holds_samples(path: str, value: Sequence[Any], reading: _Reading) -> bool:
    """A list beside firm members holds samples if it has one per item; a tuple only if it cannot be members."""
    if path == "" or reading.samples:
        return reading.samples and len(value) == reading.size and (path != "" or isinstance(value, list))
    if len(value) != reading.size:
        return False
    leaves = dict(_leaves(path, value))
    as_members = bool(leaves) and all(size in (1, reading.size) for size in leaves.values())
    return not as_members or (isinstance(value, list) and _are_alike(value))


def _rebuilt(value: Any, path: str, change: Callable[[str, Any], Any]) -> Any:
    """A new container of the same type around changed members; what is no container is passed as it is."""
    if isinstance(value, Mapping):
        return _rebuilt_mapping(value, {key: change(_joined(path, key), item) for key, item in value.items()})
    items = [change(name, item) for name, item in _members(path, value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        result = copy.copy(value)
        for field, item in zip(dataclasses.fields(value), items):
            object.__setattr__(result, field.name, item)
        return result
    if hasattr(value, "_fields"):
        return type(value)(*items)
    if _is_plain_sequence(value):
        return items if type(value) is list else type(value)(items)
    return value


def _rebuilt_mapping(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return items
    if not isinstance(value, MutableMapping):
        return type(value)(items)  # type: ignore[call-arg]
    result = copy.copy(value)
    if isinstance(result, UserDict):
        result.data = {}  # a subclass with its own __copy__ may share the inner dict
    result.update(items)
    return result


def _mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, PackedSequence):
        return PackedSequence(
            change(value.data),
            value.batch_sizes,
            *(None if t is None else change(t) for t in (value.sorted_indices, value.unsorted_indices)),
        )
    if isinstance(value, Tensor):
        return change(value)
    return _rebuilt(value, "", lambda _, item: _mapped(item, change))
