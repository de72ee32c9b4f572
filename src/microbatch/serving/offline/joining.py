"""Outputs of pieces put together as if they came from one pass: the same form, every item in its place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from microbatch.batch.members import members, rebuilt
from microbatch.errors import InvalidModel, InvalidSettings

Axes = dict[str, tuple[int, ...]]
"""Dimensions of an output that have an entry per token, by the output's path."""

_ROWS, _ITEMS, _SAME = "rows", "items", "same"
_FORWARD = "Give forward=lambda model, batch: ... that returns what has one row per item."


@dataclass(frozen=True, slots=True)
class Done:
    """A piece that ran.

    Attributes:
        places: of its items in the data.
        output: of the model.
        spans: columns of each item that are no padding; None where nothing is padded.
        offset: column of the data that is the piece's first.
    """

    places: Sequence[int]
    output: Any
    spans: list[range] | None = None
    offset: int = 0


class Form:
    """What the outputs of all pieces have in common, as the first shows it.

    A leaf is a tensor or an array with a row per item, a list with an entry per item, or what is the same in every
    piece (None, numbers, texts).
    """

    def __init__(self, output: Any, count: int) -> None:
        self._first = output
        self._kinds = dict(_kinds("", output, count))
        self._leaves = dict(_leaves("", output, self._kinds))

    def leaves(self, output: Any, count: int) -> dict[str, Any]:
        """The leaves of a piece's output that have one entry per item, by path.

        Raises:
            InvalidModel: it has another form, or a leaf without an entry per item.
        """
        found: dict[str, Any] = {}
        seen = dict(_leaves("", output, self._kinds))
        if seen.keys() != self._kinds.keys():
            other = sorted(seen.keys() ^ self._kinds.keys())
            raise InvalidModel(f"The model's outputs differ in form from piece to piece: {other}.", _FORWARD)

        for path, leaf in seen.items():
            if self._kinds[path] == _SAME:
                if leaf is not self._leaves[path] and leaf != self._leaves[path]:
                    first = self._leaves[path]
                    raise InvalidModel(f"{_named(path)} is {first!r} in one piece, {leaf!r} in another.", _FORWARD)
            elif len(leaf) != count:
                raise InvalidModel(f"{_named(path)} has {len(leaf)} entries for {count} items.", _FORWARD)
            else:
                found[path] = leaf
        return found

    def filled(self, leaves: dict[str, Any]) -> Any:
        """An output of this form with other leaves."""
        return self._filled("", self._first, leaves)

    def _filled(self, path: str, value: Any, leaves: dict[str, Any]) -> Any:
        if path in leaves:
            return leaves[path]
        if path in self._kinds:
            return value
        return rebuilt(value, path, lambda name, item: self._filled(name, item, leaves))


def tensors_of(output: Any) -> dict[str, Tensor]:
    """Every tensor in an output, by path."""
    return {path: leaf for path, leaf in _leaves("", output, {}) if isinstance(leaf, Tensor) and leaf.ndim}


def _kinds(path: str, value: Any, count: int) -> Iterator[tuple[str, str]]:
    if isinstance(value, (Tensor, np.ndarray)):
        if not value.ndim or len(value) != count:
            shape = tuple(value.shape)
            raise InvalidModel(f"{_named(path)} has shape {shape}: no row for each of {count} items.", _FORWARD)
        yield path, _ROWS
    elif type(value) is list and len(value) == count and not _holds_members(value, count):
        yield path, _ITEMS
    elif inside := list(members(path, value)):
        for name, item in inside:
            yield from _kinds(name, item, count)
    elif value is None or isinstance(value, (str, bytes, bool, int, float)) or not _has_state(value):
        yield path, _SAME
    else:
        raise InvalidModel(f"{_named(path)} is a {type(value).__name__}, which has no rows.", _FORWARD)


def _holds_members(value: list[Any], count: int) -> bool:
    """Whether a list holds tensors with a row per item, not one entry per item."""
    tensors = [item for item in value if isinstance(item, Tensor)]
    return len(tensors) == len(value) and all(tensor.ndim and len(tensor) == count for tensor in tensors)


def _has_state(value: Any) -> bool:
    return bool(getattr(value, "__dict__", None))


def _leaves(path: str, value: Any, kinds: dict[str, str]) -> Iterator[tuple[str, Any]]:
    inside = [] if path in kinds or isinstance(value, (Tensor, np.ndarray)) else list(members(path, value))
    if not inside:
        yield path, value
    for name, item in inside:
        yield from _leaves(name, item, kinds)


def _named(path: str) -> str:
    return f"The output's {path}" if path else "The output"


class Column:
    """One leaf of the output over all items.

    Rows of one shape are one tensor; rows of different shapes a list, an item's own tokens only. Where the data is
    padded to `width`, rows are laid out in it as one pass over all of it would have them, with 0 for padding.
    """

    def __init__(self, path: str, size: int | None, width: int | None, out: Tensor | None) -> None:
        self._path, self._size, self._width, self._out = path, size, width, out
        self._buffer: Tensor | None = out
        self._rows: dict[int, Any] | None = None
        self._count = 0
        self._is_array = False

    def put(self, done: Done, leaf: Any, axes: tuple[int, ...]) -> None:
        """The rows of a piece.

        Raises:
            InvalidSettings: rows that do not fit into ``out``.
        """
        self._count = max(self._count, max(done.places) + 1)
        if isinstance(leaf, list):
            self._put_each(done.places, leaf)
            return
        if isinstance(leaf, np.ndarray):
            self._is_array, leaf = True, torch.from_numpy(leaf)
        if axes and self._width is not None:
            leaf = _laid_out(leaf, done, axes, self._width)
        elif axes and done.spans is not None:
            self._put_each(done.places, [_own(row, span, axes) for row, span in zip(leaf, done.spans, strict=True)])
            return
        self._put_rows(done.places, leaf)

    def joined(self) -> Any:
        """All of it."""
        if self._rows is not None:
            return [self._rows[place] for place in range(self._count)]
        assert self._buffer is not None
        if self._out is not None:
            return self._out
        whole = self._buffer if len(self._buffer) == self._count else self._buffer[: self._count].clone()
        return whole.numpy() if self._is_array else whole

    def _put_rows(self, places: Sequence[int], rows: Tensor) -> None:
        if self._rows is None and self._buffer is None:
            self._buffer = rows.new_empty((self._size or len(rows), *rows.shape[1:]))
        if self._buffer is None or self._buffer.shape[1:] != rows.shape[1:]:
            self._put_each(places, [row.clone() for row in rows])
            return
        if self._out is None and len(self._buffer) < self._count:  # data whose size is not known: room doubles
            larger = self._buffer.new_empty((max(self._count, 2 * len(self._buffer)), *rows.shape[1:]))
            larger[: len(self._buffer)] = self._buffer
            self._buffer = larger
        if self._out is not None and not torch.can_cast(rows.dtype, self._out.dtype):
            dtypes = f"out= holds {self._out.dtype}, the outputs are {rows.dtype}."
            raise InvalidSettings(dtypes, "Make it of that dtype.")
        if isinstance(places, range):
            self._buffer[places.start : places.stop] = rows
        else:
            self._buffer[torch.tensor(places, device=self._buffer.device)] = rows.to(self._buffer.dtype)

    def _put_each(self, places: Sequence[int], rows: Sequence[Any]) -> None:
        if self._out is not None:
            raise InvalidSettings(
                f"{_named(self._path)} does not fit into out=, which has shape {tuple(self._out.shape)}.",
                f"Its rows are {_shape_of(rows[0])}; where they differ leave out= away and take the list.",
            )
        if self._rows is None:
            self._rows = {}
            if self._buffer is not None:
                earlier = set(range(self._count)) - set(places)
                self._rows = {place: self._buffer[place].clone() for place in earlier if place < len(self._buffer)}
                self._buffer = None
        self._rows.update(zip(places, rows, strict=True))


def _laid_out(rows: Tensor, done: Done, axes: tuple[int, ...], width: int) -> Tensor:
    """Rows in as many columns as the data has, 0 where it is padded."""
    assert done.spans is not None
    shape = [width if axis in axes else size for axis, size in enumerate(rows.shape)]
    result = rows.new_zeros(shape)
    for row, span in enumerate(done.spans):
        there = columns_at(range(span.start + done.offset, span.stop + done.offset), axes, rows.ndim)
        result[row][there] = rows[row][columns_at(span, axes, rows.ndim)]
    return result


def _own(row: Tensor, span: range, axes: tuple[int, ...]) -> Tensor:
    """A row without its padding."""
    return row[columns_at(span, axes, row.ndim + 1)].clone()


def columns_at(span: range, axes: tuple[int, ...], dimensions: int) -> tuple[slice, ...]:
    """Index of one row: the span along each dimension that has tokens.

    Args:
        dimensions: of the output, with that of the batch.
    """
    return tuple(slice(span.start, span.stop) if axis in axes else slice(None) for axis in range(1, dimensions))


def _shape_of(row: Any) -> str:
    return f"of shape {tuple(row.shape)}" if isinstance(row, Tensor) else f"a {type(row).__name__}"


class Measured(Protocol):
    """Data whose outputs are joined: its items, and the columns that outputs per token get, as far as known."""

    @property
    def size(self) -> int | None: ...
    @property
    def width(self) -> int | None: ...


class Join:
    """All outputs, as pieces come."""

    def __init__(self, source: Measured, out: Any = None) -> None:
        self._source, self._given = source, out
        self._form: Form | None = None
        self._columns: dict[str, Column] = {}

    def add(self, done: Done, axes: Axes) -> None:
        """The rows of a piece, with what is known of its dimensions.

        Raises:
            InvalidModel: outputs without rows, or of another form.
            InvalidSettings: ``out`` does not fit them.
        """
        if self._form is None:
            self._form = Form(done.output, len(done.places))
        leaves = self._form.leaves(done.output, len(done.places))
        if not self._columns:
            given = self._targets(set(leaves))
            self._columns = {p: Column(p, self._source.size, self._source.width, given.get(p)) for p in leaves}
        for path, leaf in leaves.items():
            self._columns[path].put(done, leaf, axes.get(path, ()))

    def result(self) -> Any:
        """The output of one pass; ``out`` itself where it was given."""
        assert self._form is not None
        if self._given is not None:
            return self._given
        return self._form.filled({path: column.joined() for path, column in self._columns.items()})

    def _targets(self, paths: set[str]) -> dict[str, Tensor]:
        """Where the rows go that the user made room for."""
        if self._given is None:
            return {}
        targets = {path: _writable(path, leaf) for path, leaf in _leaves("", self._given, {})}
        if targets.keys() != paths:
            raise InvalidSettings(
                f"out= has {sorted(targets)}, the outputs have {sorted(paths)}.", "Give it the form of the outputs."
            )
        for path, target in targets.items():
            if self._source.size is not None and len(target) != self._source.size:
                where = f" in {path}" if path else ""
                raise InvalidSettings(
                    f"out= has {len(target)} rows{where}, the data has {self._source.size} items.",
                    "Make room for every item.",
                )
        return targets


def _writable(path: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    if not isinstance(value, np.ndarray):
        where = f" in {path}" if path else ""
        raise InvalidSettings(f"out= holds a {type(value).__name__}{where}.", "Give tensors or arrays.")
    if not value.flags.writeable:
        raise InvalidSettings("out= cannot be written to.", 'Open it for writing, as in numpy.memmap(..., mode="w+").')
    return torch.from_numpy(value)


def rows_of(form: Form, done: Done, axes: Axes) -> list[Any]:
    """The output of each item of a piece by itself, without a batch dimension and without padding."""
    entries: dict[str, list[Any]] = {}
    for path, leaf in form.leaves(done.output, len(done.places)).items():
        own = axes.get(path, ())
        if isinstance(leaf, Tensor) and own and done.spans is not None:
            entries[path] = [_own(row, span, own) for row, span in zip(leaf, done.spans, strict=True)]
        else:
            entries[path] = [row.clone() if isinstance(row, Tensor) else row for row in leaf]
    return [form.filled({path: rows[row] for path, rows in entries.items()}) for row in range(len(done.places))]
