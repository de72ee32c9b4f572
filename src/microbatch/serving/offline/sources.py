"""The data of offline work, whatever it is: rows of tensors, or items one by one; handed out in blocks.

A block holds items that are alike, as many as were asked for; or items of different lengths, a whole window of them,
which the caller then sorts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, IterableDataset

from microbatch.batch.lengths import (
    Length,
    checked,
    columns_of,
    length_of,
    lengths_of,
    shown_by,
    spans,
    trimmed,
)
from microbatch.batch.members import is_leaf, rebuilt
from microbatch.batch.split import batch_size_of, taking
from microbatch.batch.token_budget import longest_first
from microbatch.errors import InvalidBatch
from microbatch.serving.engine.collating import as_tensor, collated, is_numeric, kind_of

WINDOW = 4096
"""Items of a data set or an iterator that are held at a time where lengths differ."""

_FETCHED = 64
"""Items of a data set that are asked for at a time, where it can give several."""

_EXAMPLES = 3
"""Items on which is seen what padding does; one alone may hold the same token as its padding."""

_FORMS = "Give a tensor, an array, a dict or tuple of them, a data set, a list of items, or an iterable of items."

Collate = Callable[[list[Any]], Any]
"""``collate(items) -> batch``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """A batch of some items.

    Attributes:
        batch: what the model gets.
        spans: columns of each item that are no padding; None where items are not padded.
        offset: column of the data that is the batch's first.
        width: columns of the batch; None where items are not padded.
    """

    batch: Any
    spans: list[range] | None = None
    offset: int = 0
    width: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Items that wait to run.

    Attributes:
        start: place of the first in the data.
        count: items.
        lengths: tokens of each, or of every one where all are alike.
        kinds: items of different kinds cannot share a piece; None where all are of one.
        padded: whether items of a piece are padded to its longest.
        make: these items of the block, as a batch.
    """

    start: int
    count: int
    lengths: list[int] | int
    kinds: list[Hashable] | None = None
    padded: bool = True
    make: Callable[[list[int] | range], Made]


class Source(Protocol):
    """Data in blocks.

    Attributes:
        size: items; None where only the end tells.
        longest: tokens of the longest item as far as is known before anything runs.
        width: columns that a padded output must have; None where items come one by one.
    """

    @property
    def size(self) -> int | None: ...
    @property
    def longest(self) -> int: ...
    @property
    def width(self) -> int | None: ...

    def block(self, count: int) -> Block | None:
        """The next items: `count` of them where they are alike; None at the end."""

    def sample(self, count: int) -> Any:
        """A batch of some of the first items, which stay where they are."""

    def examples(self) -> list[tuple[Made, Made]]:
        """A few single items, each with the data's padding and without; none where items come one by one."""

    def keep_padding(self) -> None:
        """Padding changes the outputs: all items have the data's width."""


def source_of(
    data: Any, *, collate: Collate | None = None, length: Length | None = None, window: int = WINDOW, tokens: str = "no"
) -> Source:
    """
    Args:
        data: see `microbatch.map`.
        collate: makes a batch of a list of items.
        length: of an item.
        window: items of different length that are sorted at a time; of a list all.
        tokens: whether lengths count: "no", "yes", or "if they differ".

    Raises:
        InvalidBatch: no data, data of another form, or members of different lengths.
    """
    if isinstance(data, DataLoader):
        raise InvalidBatch(
            "A DataLoader has formed batches already.", "Give its loader.dataset, and collate=loader.collate_fn."
        )
    if isinstance(data, (str, bytes)) or data is None:
        raise InvalidBatch(f"A {type(data).__name__} is no data to map over.", _FORMS)
    if _is_rows(data):
        if collate is not None:
            raise InvalidBatch("collate= is for items that come one by one.", "Leave it out, or give a list of items.")
        return Rows(data, length, tokens)
    size = len(data) if hasattr(data, "__len__") else None
    held = max(size or 1, 1) if isinstance(data, list) else window
    return Items(_items_of(data, size), size, collate=collate, length=length, window=held, tokens=tokens)


def _is_rows(data: Any) -> bool:
    if isinstance(data, (Tensor, np.ndarray, Mapping, tuple, PackedSequence)):
        return True
    return dataclasses.is_dataclass(data) and not hasattr(data, "__getitem__") and not hasattr(data, "__iter__")


def _items_of(data: Any, size: int | None) -> Iterator[Any]:
    """The items of a data set by index, else by iteration."""
    by_index = hasattr(data, "__getitem__") and size is not None and not isinstance(data, IterableDataset)
    if by_index and not isinstance(data, list):
        return _by_index(data, size or 0)
    if not isinstance(data, Iterable):
        raise InvalidBatch(f"A {type(data).__name__} has no items.", _FORMS)
    return iter(data)


def _by_index(data: Any, size: int) -> Iterator[Any]:
    several = getattr(data, "__getitems__", None)
    if several is None:
        yield from (data[index] for index in range(size))
        return
    for start in range(0, size, _FETCHED):
        yield from several(list(range(start, min(start + _FETCHED, size))))


class Rows:
    """Data whose members have one entry per item, see `Source`."""

    def __init__(self, data: Any, length: Length | None, tokens: str) -> None:
        self._count = batch_size_of(data)
        self._take, self._data, self._length, self._next = taking(data), data, length, 0
        self.longest = 1
        self.width: int | None = None
        self._lengths: list[int] | int = 1
        self._padded, self._must = True, tokens == "yes"
        if tokens != "no":
            self._read_lengths()

    @property
    def size(self) -> int | None:
        return self._count

    def _read_lengths(self) -> None:
        try:
            found = lengths_of(self._data, self._count, self._length)
        except InvalidBatch:
            if self._must or self._length is not None:
                raise
            return  # nothing says that the rows differ
        self._padded, alike = found.padded, len(set(found.values)) == 1
        if not alike:
            self._lengths, self.longest = found.values, max(found.values)
        elif self._must:
            self._lengths = self.longest = found.values[0]
        if found.padded and (not alike or self._must):
            self.width = columns_of(self._data, self._length)[0] or None

    def block(self, count: int) -> Block | None:
        """See `Source`; all at once where lengths differ."""
        start = self._next
        if start == self._count:
            return None
        self._next = min(start + count, self._count) if isinstance(self._lengths, int) else self._count
        return Block(
            start=start,
            count=self._next - start,
            lengths=self._lengths,
            padded=self._padded,
            make=lambda places: self._make(_moved(places, start)),
        )

    def sample(self, count: int) -> Any:
        """See `Source`."""
        return self._make(range(min(count, self._count))).batch

    def examples(self) -> list[tuple[Made, Made]]:
        """See `Source`."""
        if self.width is None or isinstance(self._lengths, int):
            return []
        ascending = longest_first(self._lengths)[::-1]
        places = {ascending[self._count * part // _EXAMPLES] for part in range(_EXAMPLES)}
        singles = [range(place, place + 1) for place in sorted(places) if self._lengths[place] < self.width]
        return [(self._whole(single, self.width), self._make(single)) for single in singles]

    def keep_padding(self) -> None:
        """See `Source`."""
        if self._must and self.width is not None:
            self._lengths = self.longest = self.width
        else:
            self._lengths = self.longest = 1
        self.width = None

    def _whole(self, places: list[int] | range, width: int) -> Made:
        """These rows with all of the data's columns."""
        batch = _with_tensors(self._take(places))
        shown = shown_by(batch)
        if shown is not None:
            return Made(batch, spans(shown), 0, width)
        return Made(batch, [range(n) for n in lengths_of(batch, len(places), self._length).values], 0, width)

    def _make(self, places: list[int] | range) -> Made:
        if self.width is None:
            return Made(_with_tensors(self._take(places)))
        whole = self._whole(places, self.width)
        assert whole.spans is not None
        batch = trimmed(whole.batch, self._length)
        if batch is whole.batch:
            return whole
        columns = columns_of(whole.batch, self._length)[1]
        moved = [range(span.start - columns.start, span.stop - columns.start) for span in whole.spans]
        return Made(batch, moved, columns.start, len(columns))


class Items:
    """Data that comes item by item, see `Source`."""

    width: int | None = None

    def __init__(
        self,
        items: Iterator[Any],
        size: int | None,
        *,
        collate: Collate | None,
        length: Length | None,
        window: int,
        tokens: str,
    ) -> None:
        self.size = size
        self._items, self._collate, self._window = items, collate, window
        self._length = None if tokens == "no" else length or length_of
        self._held: list[Any] = []
        self._lengths: list[int] = []
        self._kinds: list[Hashable] = []
        self._next = 0
        self._fill(1)
        if not self._held:
            raise InvalidBatch("There is nothing to map: the data has 0 items.", _FORMS)
        self.longest = max(1, self._lengths[0])

    def block(self, count: int) -> Block | None:
        """See `Source`."""
        self._fill(count)
        if not self._held:
            return None
        alike = len(set(self._kinds)) == 1 and len(set(self._lengths[:count])) == 1
        if not alike:
            self._fill(self._window)
            count = max(count, self._window)
        items, self._held = self._held[:count], self._held[count:]
        lengths, self._lengths = self._lengths[:count], self._lengths[count:]
        kinds, self._kinds = self._kinds[:count], self._kinds[count:]
        start, self._next = self._next, self._next + len(items)
        return Block(
            start=start,
            count=len(items),
            lengths=lengths[0] if len(set(lengths)) == 1 else lengths,
            kinds=kinds if len(set(kinds)) > 1 else None,
            make=lambda places: self._make([items[place] for place in places]),
        )

    def sample(self, count: int) -> Any:
        """See `Source`."""
        self._fill(count)
        return self._make([i for i, kind in zip(self._held[:count], self._kinds) if kind == self._kinds[0]]).batch

    def examples(self) -> list[tuple[Made, Made]]:
        """See `Source`."""
        return []

    def keep_padding(self) -> None:
        """See `Source`; never asked for."""

    def _fill(self, count: int) -> None:
        for item in islice(self._items, max(0, count - len(self._held))):
            place = self._next + len(self._held)
            self._held.append(item)
            self._lengths.append(1 if self._length is None else max(1, checked(self._length(item), place)))
            self._kinds.append(None if self._collate else kind_of(item))

    def _make(self, items: list[Any]) -> Made:
        batch = collated(items) if self._collate is None else self._collate(items)
        shown = shown_by(batch)
        return Made(batch) if shown is None else Made(batch, spans(shown), 0, int(shown.shape[1]))


def _moved(places: list[int] | range, start: int) -> list[int] | range:
    if isinstance(places, range):
        return range(places.start + start, places.stop + start)
    return [start + place for place in places]


def _with_tensors(batch: Any) -> Any:
    """Arrays as tensors: of a piece only, since the data may be a file that is mapped into memory."""
    if isinstance(batch, np.ndarray):
        return as_tensor(batch) if is_numeric(batch) else batch
    return batch if is_leaf(batch) else rebuilt(batch, "", lambda _, item: _with_tensors(item))
