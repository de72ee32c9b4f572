"""A dry run as text: the maximum rate, latencies by rate, and what other limits would do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from microbatch.reporting.table import Table
from microbatch.reporting.text import align
from microbatch.units import format_number, format_seconds

if TYPE_CHECKING:
    from microbatch.serving.decisions.dry_run import AtRate, DryRun, WhatIf

NONE = "-"


def lines(result: DryRun) -> Iterable[str]:
    """The answer first, then the tables behind it."""
    most = format_number(result.max_rate)
    yield f"At most {most} requests/s, in batches of up to {result.max_batch_size} (policy {result.policy}; simulated)."
    yield from align(Table(
        title="Latency by rate",
        columns=("requests/s", "p50", "p99", "mean batch"),
        rows=tuple(_at(row) for row in result.at),
        note="Above the maximum rate latency only grows." if any(row.p50 is None for row in result.at) else "",
    ))  # fmt: skip
    if result.what_if:
        yield from align(Table(
            title="Other limits",
            columns=("max batch size", "at most requests/s", "at requests/s", "p50", "p99"),
            rows=tuple(_what_if(row) for row in result.what_if),
        ))  # fmt: skip
    sizes = ", ".join(f"{size}: {format_seconds(seconds)}" for size, seconds in result.curve)
    yield f"Seconds of a batch, by size: {sizes}"
    yield from (f"note: {note}" for note in result.notes)


def _at(row: AtRate) -> tuple[str, ...]:
    batch = NONE if row.mean_batch is None else format_number(row.mean_batch)
    return format_number(row.rate), _seconds(row.p50), _seconds(row.p99), batch


def _what_if(row: WhatIf) -> tuple[str, ...]:
    rate = NONE if row.rate is None else format_number(row.rate)
    return str(row.max_batch_size), format_number(row.max_rate), rate, _seconds(row.p50), _seconds(row.p99)


def _seconds(value: float | None) -> str:
    return NONE if value is None else format_seconds(value)
