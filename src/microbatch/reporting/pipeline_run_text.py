"""A run of a pipeline in a terminal: step, bubble, memory, exactness, what to change, and the lanes."""

from __future__ import annotations

from collections.abc import Iterable

from microbatch.pipeline.run_report import PipelineRun
from microbatch.reporting import timeline_text
from microbatch.reporting import timeline_wording as wording
from microbatch.units import format_bytes, format_number, format_percent, format_seconds


def lines(run: PipelineRun) -> Iterable[str]:
    """The figures, the sentence, the lanes."""
    simulated = run.timeline.predicted
    off = run.simulated_seconds / run.seconds - 1 if run.seconds else 0.0
    beside = f"{format_percent(abs(off))} {'more' if off > 0 else 'less'}"
    yield f"{run.model}, {run.mode}: {wording.subject(run.timeline)}, batch {run.batch_size}"
    rows = [
        ("step", format_seconds(run.seconds),
         f"simulated {format_seconds(run.simulated_seconds)}, {beside}"),
        ("bubble", format_percent(run.timeline.bubble_fraction),
         f"simulated {format_percent(simulated.bubble_fraction)}; share of the actions' time in which ranks wait"),
        ("first step", format_seconds(run.first_step_seconds), "meets, plans and allocates as well"),
        *_memory(run),
        *_exactness(run),
    ]  # fmt: skip
    width = max(len(label) for label, _, _ in rows)
    yield from (f"  {label.ljust(width)}  {value}  ({hint})" for label, value, hint in rows)
    yield f"  To change: {run.advice}"
    yield ""
    yield from timeline_text.lanes(run.timeline)
    yield from (f"Note: {note}" for note in (*run.notes, *wording.notes(run.timeline)))


def _memory(run: PipelineRun) -> list[tuple[str, str, str]]:
    state = "weights, gradients, optimizer" if run.mode == "training" else "weights"
    peak = "most in the process" if run.device == "cpu" else "most on the device"
    return [
        (f"rank {rank}", format_bytes(one.state), f"{state}; {peak} {format_bytes(one.peak)}")
        for rank, one in enumerate(run.memory)
    ]


def _exactness(run: PipelineRun) -> list[tuple[str, str, str]]:
    if run.exact is None:
        return []
    difference = format_number(run.exact.largest_difference or 0.0)
    what = "gradients" if run.mode == "training" else "outputs"
    verdict = "as one process" if run.exact.exact else "NOT as one process"
    return [("exact", verdict, f"largest difference of {what} {difference}, in {run.exact.dtype}")]
