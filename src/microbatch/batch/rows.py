"""Which part of a whole batch's tensor belongs to a piece, found from the two shapes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from microbatch.batch.exactness import largest_value, relative_difference


@dataclass(frozen=True, slots=True)
class Rows:
    """A piece: items `start` to `stop` of a batch of `whole` items (or tokens of a sequence of `whole` tokens)."""

    whole: int
    start: int
    stop: int

    @property
    def count(self) -> int:
        """Items in the piece."""
        return self.stop - self.start


def pieces_of(sizes: Sequence[int]) -> list[Rows]:
    """The rows of each piece when a batch is cut into those sizes in order."""
    whole, start, found = sum(sizes), 0, []
    for size in sizes:
        found.append(Rows(whole, start, start + size))
        start += size
    return found


@dataclass(frozen=True, slots=True)
class Match:
    """How a piece's tensor compares with the whole batch's.

    Attributes:
        difference: relative; None where the shapes do not tell which part belongs to the piece.
        has_rows: a dimension grows with the batch.
        is_floating: whole numbers that differ may be numbers of rows, which say nothing.
        is_alike: as many tensors, of as many dimensions.
    """

    difference: float | None
    has_rows: bool
    is_floating: bool
    is_alike: bool = True


def parts_of(full: Tensor, shape: Sequence[int], rows: Rows) -> list[Tensor]:
    """What of `full` can belong to a piece's tensor of that shape; several where the order of rows is ambiguous.

    A dimension of k·whole items becomes k·count: as k for each item, or as all items k times (k is seconds, heads,
    tokens). A dimension that is shorter for another reason, as after unpadding, is cut at its end.
    """
    if full.dim() != len(shape):
        return []
    choices = [_choices(full.shape[axis], shape[axis], rows) for axis in range(full.dim())]
    if any(axis is not None and not axis for axis in choices):
        return []
    found = []
    stay: list[Tensor | None] = [None]
    for chosen in product(*[axis or stay for axis in choices]):
        part = full
        for axis, index in enumerate(chosen):
            part = part if index is None else part.index_select(axis, index.to(full.device))
        found.append(part)
    return found


def _choices(full: int, part: int, rows: Rows) -> list[Tensor] | None:
    """Index tensors to try for one dimension; None: the dimension stays as it is."""
    if full == part:
        return None
    times, rest = divmod(full, rows.whole)
    if not rest and part == times * rows.count:
        items = torch.arange(rows.start, rows.stop)
        each = torch.arange(times)
        by_item = (items[:, None] * times + each).flatten()
        return [by_item] if times == 1 else [by_item, (each[:, None] * rows.whole + items).flatten()]
    return [torch.arange(part)] if part < full else []


def match(full: Tensor, part: Tensor, rows: Rows) -> Match:
    """Compares a piece's tensor with its part of the whole batch's."""
    has_rows = full.shape != part.shape
    is_floating = full.is_floating_point() or full.is_complex()
    scale = largest_value(full)
    found = [relative_difference(expected, part, scale) for expected in parts_of(full, part.shape, rows)]
    return Match(min(found) if found else None, has_rows, is_floating, full.dim() == part.dim())


def match_all(full: Sequence[Tensor], part: Sequence[Tensor], rows: Rows) -> list[Match]:
    """The same for all tensors of an output; a list with a tensor for each item is compared item by item."""
    if len(full) == len(part):
        return [match(one, other, rows) for one, other in zip(full, part, strict=True)]
    each, rest = divmod(len(full), rows.whole)
    if rest or len(part) != each * rows.count:
        return [Match(None, has_rows=True, is_floating=True, is_alike=False)]
    own = full[each * rows.start : each * rows.stop]
    return [
        dataclasses.replace(match(one, other, Rows(1, 0, 1)), has_rows=True)
        for one, other in zip(own, part, strict=True)
    ]


def largest(matches: Sequence[Match], *, whole_numbers: bool) -> float | None:
    """The largest difference that was found; None where nothing could be compared."""
    known = [m.difference for m in matches if m.difference is not None and (whole_numbers or m.is_floating)]
    return max(known) if known else None


def leaves(value: object) -> Iterator[Tensor]:
    """Tensors in tuples, lists, mappings and data classes; no other objects are looked into."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from leaves(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name, None))
