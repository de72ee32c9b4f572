"""A global batch in micro-batches, in words and as a table."""

from __future__ import annotations

from collections.abc import Sequence

from microbatch.curves.explanation import Explanation
from microbatch.curves.micro_batches import MicroBatch, MicroBatches, even_sizes
from microbatch.reporting import wording
from microbatch.reporting.table import Table, without_empty
from microbatch.reporting.wording import Fact, clean, rounded
from microbatch.units import format_bytes, format_number, format_percent, format_seconds

LINES_OF_SIZES = 14
"""A summary lists at most so many sizes: those that cut the batch evenly, the one to use, and both ends."""
ROWS_OF_SIZES = 60
"""The same of a table in a report."""
BAR = 8
"""Cells of the bar of the fastest size."""


def headline(explanation: Explanation, found: MicroBatches) -> str:
    """``Use micro-batches of 16.``"""
    chosen = found.chosen
    if chosen is None:
        return "No micro-batch fits."
    predicted = "" if explanation.recommended.measured else " (predicted, not run)"
    return f"Use micro-batches of {format_number(chosen.micro_batch_size)}{predicted}."


def outcome(explanation: Explanation, found: MicroBatches) -> str:
    """``8 make a step of 128: 41.2 ms, 3 110 rows/s, 38 % of memory.``"""
    chosen = found.chosen
    if chosen is None:
        return f"A step of {format_number(found.global_batch_size)} {wording.unit_of(explanation.profile)} cannot run."
    rate = f"{rounded(chosen.samples_per_second)} {wording.unit_of(explanation.profile)}/s"
    parts = (format_seconds(chosen.step_seconds), rate, _memory(explanation, chosen))
    return f"{_pieces(found, chosen)}: {', '.join(part for part in parts if part)}."


def _pieces(found: MicroBatches, chosen: MicroBatch) -> str:
    whole = f"a step of {format_number(found.global_batch_size)}"
    if chosen.num_micro_batches == 1:
        return f"A{whole[1:]} is one piece"
    last = f", the last one of {format_number(chosen.tail)}," if chosen.tail else ""
    return f"{format_number(chosen.num_micro_batches)}{last} make {whole}"


def _memory(explanation: Explanation, row: MicroBatch) -> str:
    memory = explanation.profile.memory
    if row.peak_bytes is None:
        return ""
    limited = memory is not None and memory.limit_bytes > 0
    share = format_percent(row.peak_bytes / memory.limit_bytes) if memory and limited else format_bytes(row.peak_bytes)
    return f"{share} of memory"


def reason(found: MicroBatches) -> str:
    """What keeps the pieces from being larger."""
    return clean(found.reason)


def trained_whole(explanation: Explanation) -> Fact:
    """The batch that is best where every piece is a step of its own."""
    chosen = explanation.recommended
    return Fact(label="best whole step", value=format_number(chosen.batch_size), hint=wording.throughput(explanation))


def micro_batch_table(explanation: Explanation, most: int = ROWS_OF_SIZES) -> Table:
    """One row for each micro-batch size; without rows where no global batch was given."""
    found = explanation.micro_batches
    if found is None:
        return Table(title="Micro-batches", columns=("micro-batch",), rows=())
    shown = _shown(found, most)
    left = len(found.rows) - len(shown)
    notes = [f"{len(shown)} of {len(found.rows)} sizes are shown; the JSON has all of them."] if left else []
    if any(not row.measured for row in shown):
        notes.append("A time with ~ was read between two measured sizes.")
    fastest = min(row.step_seconds for row in found.rows)
    columns = (
        "micro-batch", "pieces", "last of", "time per step", "90 % interval",
        f"{wording.unit_of(explanation.profile)}/s", "speed", "peak memory", "bound", "verdict",
    )  # fmt: skip
    return without_empty(
        f"Micro-batches of a global batch of {format_number(found.global_batch_size)}",
        columns,
        [_row(row, fastest) for row in shown],
        " ".join(notes),
        left=("speed", "verdict"),
    )


def _shown(found: MicroBatches, most: int) -> Sequence[MicroBatch]:
    if len(found.rows) <= most:
        return found.rows
    even = even_sizes(found.global_batch_size)
    ends = (found.rows[0], found.rows[-1])
    return [row for row in found.rows if row.chosen or row in ends or row.micro_batch_size in even]


def _row(row: MicroBatch, fastest: float) -> tuple[str, ...]:
    interval = ""
    if row.low is not None and row.high is not None:
        interval = f"{format_seconds(row.low)} - {format_seconds(row.high)}"
    return (
        format_number(row.micro_batch_size), format_number(row.num_micro_batches),
        format_number(row.tail) if row.tail else "",
        f"{'' if row.measured else '~ '}{format_seconds(row.step_seconds)}", interval,
        rounded(row.samples_per_second), bar(fastest / row.step_seconds),
        "" if row.peak_bytes is None else format_bytes(row.peak_bytes), row.bound,
        "does not fit" if row.fits is False else "use" if row.chosen else "",
    )  # fmt: skip


def bar(share: float) -> str:
    """A share of 1 as full and half cells: 0.5 → ``████``."""
    halves = round(2 * BAR * min(share, 1.0))
    return "█" * (halves // 2) + "▌" * (halves % 2)
