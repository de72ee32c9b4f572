"""Prediction and measurement by size, as a table."""

from __future__ import annotations

from microbatch.curves.beside import BesidePoint
from microbatch.curves.explanation import Explanation
from microbatch.reporting.table import Table
from microbatch.units import format_number, format_percent, format_seconds

MOST_ROWS = 60


def beside_table(explanation: Explanation) -> Table:
    """One row for each measured size; an even choice of them when there are many."""
    points = explanation.beside.points if explanation.beside else ()
    shown = _even(points)
    notes = []
    if len(shown) < len(points):
        notes.append(f"{len(shown)} of {len(points)} sizes are shown; the JSON has all of them.")
    if any(not point.computed for point in shown):
        notes.append("A prediction with ~ was read between two computed sizes.")
    return Table(
        title="Prediction beside measurement",
        columns=("batch size", "measured", "predicted", "difference"),
        rows=tuple(map(_row, shown)),
        note=" ".join(notes),
    )


def _even(points: tuple[BesidePoint, ...]) -> tuple[BesidePoint, ...]:
    if len(points) <= MOST_ROWS:
        return points
    return tuple(points[round(i * (len(points) - 1) / (MOST_ROWS - 1))] for i in range(MOST_ROWS))


def _row(point: BesidePoint) -> tuple[str, ...]:
    sign = "+" if point.error >= 0 else "-"
    about = "" if point.computed else "~ "
    return (
        format_number(point.batch_size), format_seconds(point.measured), f"{about}{format_seconds(point.predicted)}",
        f"{sign}{format_percent(abs(point.error))}",
    )  # fmt: skip
