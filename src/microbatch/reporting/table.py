"""A table as plain rows of text, and its cells."""

from __future__ import annotations

from dataclasses import dataclass

from microbatch.units import format_percent, format_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of text under a title; ``words`` names columns of sentences, ``left`` others that begin at the left."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    words: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    def is_left(self, column: int) -> bool:
        """True for a column of names or sentences; numbers stand at the right."""
        return column == 0 or self.columns[column] in (*self.words, *self.left, "kind", "bound", "what")


def without_empty(
    title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]], note: str = "", left: tuple[str, ...] = ()
) -> Table:
    """A table less the columns that no row fills."""
    kept = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    slim = tuple(tuple(row[index] for index in kept) for row in rows)
    return Table(title=title, columns=tuple(columns[index] for index in kept), rows=slim, note=note, left=left)


def percent(share: float | None) -> str:
    """A share as a cell; empty when unknown."""
    return "" if share is None else format_percent(share)


def duration(seconds: float | None) -> str:
    """A time as a cell; empty when unknown."""
    return "" if seconds is None else format_seconds(seconds)
