"""Sequence × batch as a grid of cells, for the table and the picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from microbatch.curves.objective import NEAR_BEST
from microbatch.curves.prediction import SurfacePoint
from microbatch.curves.profile import Profile
from microbatch.reporting.table import Table
from microbatch.reporting.wording import rounded, unit_of
from microbatch.units import format_number, format_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Throughput by sequence (rows) and batch size (columns); None where the batch was not computed."""

    sequences: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    throughput: tuple[tuple[float | None, ...], ...]
    best: tuple[int, ...]
    """The batch to use for each sequence."""


def grid_of(surface: Sequence[SurfacePoint]) -> Grid:
    """The points as a grid."""
    sequences = tuple(sorted({point.sequence for point in surface}))
    sizes = tuple(sorted({point.batch_size for point in surface}))
    at = {(point.sequence, point.batch_size): point.throughput for point in surface}
    return Grid(
        sequences=sequences,
        batch_sizes=sizes,
        throughput=tuple(tuple(at.get((sequence, size)) for size in sizes) for sequence in sequences),
        best=tuple(point.batch_size for point in best_rows(surface)),
    )


def best_rows(surface: Sequence[SurfacePoint]) -> list[SurfacePoint]:
    """For each sequence, in order, the smallest batch within 2 % of its best throughput among those that fit."""
    rows = []
    for sequence in sorted({point.sequence for point in surface}):
        points = [point for point in surface if point.sequence == sequence]
        usable = [point for point in points if point.fits is not False] or points
        most = max(point.throughput for point in usable)
        rows.append(next(point for point in usable if point.throughput >= NEAR_BEST * most))
    return rows


def surface_table(profile: Profile) -> Table:
    """One row for each sequence length: the batch to use, its time and throughput, and the largest that fits."""
    rows = tuple(_row(point, profile.surface) for point in best_rows(profile.surface))
    unit = unit_of(profile)
    columns = (
        "context" if profile.mode == "decode" else "sequence",
        "best batch",
        "time",
        f"{unit}/s",
        "largest tried",
    )
    return Table(title="Sequence × batch", columns=columns, rows=rows)


def _row(point: SurfacePoint, surface: Sequence[SurfacePoint]) -> tuple[str, ...]:
    largest = max(other.batch_size for other in surface if other.sequence == point.sequence and other.fits is not False)
    return (
        format_number(point.sequence), format_number(point.batch_size), format_seconds(point.seconds),
        rounded(point.throughput), format_number(largest),
    )  # fmt: skip
