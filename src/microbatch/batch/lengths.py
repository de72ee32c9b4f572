"""How long the items of a batch are, and the batch without the columns that are padding for all of them.

Lengths come from the user's function; from cumulative lengths, packed and nested sequences; from a mask of (items,
tokens): `attention_mask`, `input_mask` or `mask` with ones for tokens, or a name that ends in `padding_mask`,
`pad_mask` or `padding` with ones for padding; from the samples of a list; or, as they are all alike, from a tensor of
token ids without a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, unpack_sequence

from microbatch.batch.members import is_leaf, members, rebuilt
from microbatch.batch.packed import packed_offsets
from microbatch.batch.split import batch_size_of, split
from microbatch.errors import InvalidBatch

Length = Callable[[Any], int]
"""``length(item) -> tokens``."""

_SHOWS = ("attention_mask", "input_mask", "mask")
_HIDES = ("padding_mask", "pad_mask", "padding")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of every item, in the batch's order.

    Attributes:
        values: per item.
        padded: whether items that run together are padded to the longest; not those that lie end to end.
    """

    values: list[int]
    padded: bool


def lengths_of(batch: Any, size: int, length: Length | None = None, *, list_of_samples: bool | None = None) -> Lengths:
    """Lengths of a batch's items, see the module.

    Args:
        size: items in the batch.
        length: of an item, as the user says.

    Raises:
        InvalidBatch: nothing tells how long the items are, or a length that is no whole number.
    """
    packed = _end_to_end(batch)
    if length is not None:
        items = split(batch, [1] * size, list_of_samples=list_of_samples)
        single = is_list(batch, list_of_samples)
        values = [checked(length(item[0] if single else item), place) for place, item in enumerate(items)]
        return Lengths(values, packed is None)
    if packed is not None:
        return Lengths(packed, False)
    if is_list(batch, list_of_samples):
        return Lengths([length_of(sample) for sample in batch], True)
    if (shown := shown_by(batch)) is not None:
        return Lengths([max(1, len(span)) for span in spans(shown)], True)
    if (tokens := _token_ids(batch)) is not None:
        return Lengths([tokens] * size, True)
    raise InvalidBatch(
        "Nothing in the batch says how long its items are: it has no mask of (items, tokens) by the name of "
        "attention_mask, input_mask, mask, or ..._padding_mask, and no cumulative lengths.",
        'Say it: TokenBudget(8192, length=lambda item: int(item["lengths"])).',
    )


def is_list(batch: Any, list_of_samples: bool | None) -> bool:
    """Whether a batch is read as a list of samples."""
    return type(batch) is list and list_of_samples is not False


def checked(value: Any, place: int) -> int:
    """A length that the user's function returned.

    Raises:
        InvalidBatch: it is no whole number, or negative.
    """
    try:
        number = int(value)
        if number != value or number < 0:
            raise ValueError
    except (TypeError, ValueError):
        raise InvalidBatch(
            f"length(item) returned {value!r} for item {place}.", "Return the item's tokens, a whole number."
        ) from None
    return number


def length_of(sample: Any) -> int:
    """Tokens of one sample: characters of a text, entries of a list of numbers or of a tensor's first dimension;
    of members `input_ids` where there is one, else the longest."""
    if isinstance(sample, (str, bytes)):
        return len(sample)
    if isinstance(sample, (Tensor, np.ndarray)):
        return int(sample.shape[0]) if sample.ndim else 1
    if isinstance(sample, Mapping) and "input_ids" in sample:
        return length_of(sample["input_ids"])
    if isinstance(sample, (list, tuple)) and all(isinstance(item, (int, float)) for item in sample):
        return len(sample)
    return max((length_of(item) for _, item in members("", sample)), default=1)


def trimmed(batch: Any, length: Length | None = None) -> Any:
    """The batch without the columns that are padding for all of its items; the batch itself where none are.

    Nothing but padding is cut: the columns hold one value throughout in every member of (items, tokens), else all
    stay. Members with more dimensions are cut along their one dimension of that size, masks along each.

    Args:
        length: of an item, as the user says, where there is no mask; padding is then on the right.
    """
    whole, columns = columns_of(batch, length)
    if len(columns) >= whole:
        return batch
    try:
        return narrowed(batch, whole, columns, only_padding=True)
    except _NotPaddingError:
        return batch


def columns_of(batch: Any, length: Length | None = None) -> tuple[int, range]:
    """Columns of a padded batch, and those that some item needs; (0, none) where nothing tells."""
    if isinstance(batch, list):
        return 0, range(0)
    if (shown := shown_by(batch)) is not None:
        found, width = spans(shown), int(shown.shape[1])
        start, stop = min(span.start for span in found), max(span.stop for span in found)
        return width, range(min(start, width - 1), max(stop, start + 1))
    tensors = [tensor for _, tensor in _tensors("", batch) if tensor.ndim > 1]
    if length is None or not tensors:
        return 0, range(0)
    longest = max(lengths_of(batch, batch_size_of(batch), length).values)
    return int(tensors[0].shape[1]), range(max(1, longest))


def narrowed(batch: Any, whole: int, columns: range, *, only_padding: bool = False) -> Any:
    """Some columns of every member that has `whole` of them.

    Args:
        only_padding: raise `_NotPaddingError` where something else would be cut off.
    """
    return _narrowed("", batch, whole, columns, only_padding)


def shown_by(batch: Any) -> Tensor | None:
    """True where there is a token, (items, tokens), on the CPU; None without a mask."""
    if type(batch) is Tensor or isinstance(batch, (list, str)):
        return None
    for path, tensor in _tensors("", batch):
        name = path.rpartition(".")[2]
        hides = name.endswith(_HIDES)
        if (hides or name in _SHOWS) and tensor.ndim == 2 and tensor.shape[1]:
            mask = torch.as_tensor(tensor).detach().cpu()
            if bool(((mask == 0) | (mask == 1)).all()):
                return (mask == 0) if hides else (mask != 0)
    return None


def spans(shown: Tensor) -> list[range]:
    """The columns of each row from its first token to its last; up to the side where no row is padded."""
    width = int(shown.shape[1])
    places = torch.arange(width)
    first = torch.where(shown, places, width).amin(1)
    last = torch.where(shown, places + 1, 0).amax(1)
    at_left = bool(((last == width) | (last == 0)).all()) and bool((first > 0).any())
    if at_left:
        return [range(start, width) for start in first.tolist()]
    return [range(stop) for stop in last.tolist()]


class _NotPaddingError(Exception):
    """A column that would be cut holds something."""


def _narrowed(path: str, value: Any, whole: int, columns: range, only_padding: bool) -> Any:
    if not isinstance(value, (Tensor, np.ndarray)):
        if is_leaf(value):
            return value
        return rebuilt(value, path, lambda name, item: _narrowed(name, item, whole, columns, only_padding))
    axes = [axis for axis in range(1, value.ndim) if value.shape[axis] == whole]
    if only_padding and not _cuts_padding(path, value, axes, columns):
        raise _NotPaddingError
    for axis in axes:
        value = value[(slice(None),) * axis + (slice(columns.start, columns.stop),)]
    return value


def _cuts_padding(path: str, value: Any, axes: list[int], columns: range) -> bool:
    """Whether what would be cut off is one value throughout; of positions and of more dimensions it may be any."""
    if len(axes) > 1:
        return "mask" in path
    if value.ndim != 2 or not axes or "position" in path:
        return True
    dropped = [part for part in (value[:, : columns.start], value[:, columns.stop :]) if part.shape[1]]
    return all(bool((part == dropped[0][:1, :1]).all()) for part in dropped)


def _tensors(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (Tensor, np.ndarray)):
        yield path, value
    elif not is_leaf(value):
        for name, item in members(path, value):
            yield from _tensors(name, item)


def _end_to_end(batch: Any) -> list[int] | None:
    """Lengths of sequences that need no padding."""
    if (offsets := packed_offsets(batch)) is not None:
        return [stop - start for start, stop in pairwise(offsets)]
    for value in [batch] if is_leaf(batch) else [item for _, item in members("", batch)]:
        if isinstance(value, PackedSequence):
            return [len(sequence) for sequence in unpack_sequence(value)]
        if isinstance(value, Tensor) and value.is_nested:
            return [int(sequence.shape[0]) for sequence in value.unbind()]
    return None


def _token_ids(batch: Any) -> int | None:
    """Columns of the first two-dimensional tensor of whole numbers."""
    for _, tensor in _tensors("", batch):
        kind = tensor.dtype.kind if isinstance(tensor, np.ndarray) else ""
        whole = kind in "iu" if kind else not (tensor.is_floating_point() or tensor.dtype == torch.bool)
        if tensor.ndim == 2 and whole and tensor.shape[1]:
            return int(tensor.shape[1])
    return None
