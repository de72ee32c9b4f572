"""What figures of load mean: whether they are the server's at all, whether it keeps up, and one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from microbatch.units import format_number, format_percent, format_seconds
from microbatch.web.load.tally import LATE

if TYPE_CHECKING:
    from microbatch.web.load.result import Run

BUSY = 0.9
"""Share of a core above which a client can no longer tell its own delays from the server's."""
LATE_SHARE = 0.1
"""Of the median latency: a request in a hundred may be sent so late, or `LATE`, whichever is more."""
GROWTH_SHARE = 0.05
"""A queue that grows by more than this share of what comes will grow for ever."""
BURST = 16
"""Requests by which a queue may differ between two moments although it does not grow."""


def void_reason(run: Run) -> str:
    """Why the figures are not the server's; empty where they are."""
    if run.client_cpu > BUSY:
        return f"the client's own core was {format_percent(run.client_cpu)} busy"
    lateness, worst = run.lateness["p99"] or 0.0, run.lateness["worst"] or 0.0
    if lateness > max(LATE, LATE_SHARE * (run.latency["p50"] or 0.0)):
        share = format_percent(run.late / run.requests)
        return f"the client sent {share} of its requests late, up to {format_seconds(worst)}"
    return ""


def keeps_up(run: Run) -> bool:
    """Whether the server answers as many requests as come, so that what waits does not grow, and none fails."""
    grows = run.backlog_growth is not None and run.backlog_growth > max(GROWTH_SHARE * run.requests, BURST)
    return not (grows or run.errors)


def sentence(runs: tuple[Run, ...], target: float | None) -> str:
    """What a reader should know, in one sentence."""
    if not runs or not any(run.requests for run in runs):
        return "Nothing was measured."
    if not any(run.throughput for run in runs):
        return f"No request was answered: {told(runs[-1])}."
    if void := [run for run in runs if run.void]:
        which = "Void" if len(runs) == 1 else f"Void at {' and '.join(named(run) for run in void)}"
        return (
            f"{which}: {void[0].void}, so these are not the server's figures; give it less load or a core of its own."
        )
    return _of_one(runs[0], target) if len(runs) == 1 else _of_many(runs)


def named(run: Run) -> str:
    """``250/s`` or ``8 clients``."""
    if run.clients is not None:
        return f"{format_number(run.clients)} client{'s' * (run.clients != 1)}"
    return f"{format_number(run.rate if run.rate is not None else run.offered or 0.0)}/s"


def told(run: Run) -> str:
    """``12 × 429 (the queue is full)``"""
    said = {status: f" ({text})" for status, text in run.samples.items()}
    return ", ".join(f"{format_number(count)} × {status}{said.get(status, '')}" for status, count in run.errors.items())


def _of_one(run: Run, target: float | None) -> str:
    answers = f"{format_number(run.throughput)} answers a second"
    subject = f"{named(run)[0].upper()}{named(run)[1:]}"
    if run.clients is not None:
        start = f"{subject} {'get' if run.clients != 1 else 'gets'} {answers}"
    elif run.errors:
        start = f"Does not keep up with {named(run)}: {answers}, {format_percent(_failed(run))} of the requests fail"
    elif not keeps_up(run):
        more = format_number(run.backlog_growth or 0)
        return f"Does not keep up with {named(run)}: {answers}, and {more} more were waiting at the end than at first."
    else:
        start = f"Keeps up with {named(run)}"
    return f"{start}; {_latency(run)}{_within(run, target)}{_and_errors(run)}."


def _latency(run: Run) -> str:
    p50, p99 = run.latency["p50"], run.latency["p99"]
    if p50 is None or p99 is None:
        return "no latency is known"
    return f"half are answered within {format_seconds(p50)}, 99 % within {format_seconds(p99)}"


def _within(run: Run, target: float | None) -> str:
    if target is None or run.goodput is None or not run.throughput:
        return ""
    return f", {format_percent(run.goodput / run.throughput)} within {format_seconds(target)}"


def _and_errors(run: Run) -> str:
    return f"; {told(run)}" if run.errors else ""


def _failed(run: Run) -> float:
    return sum(run.errors.values()) / run.requests


def _of_many(runs: tuple[Run, ...]) -> str:
    if runs[0].clients is not None:
        best = max(runs, key=lambda run: run.throughput)
        return f"Most answers with {named(best)}: {format_number(best.throughput)} a second; {_latency(best)}."
    held = [run for run in runs if keeps_up(run)]
    lost = [run for run in runs if not keeps_up(run)]
    if not held:
        return (
            f"Keeps up with none of these rates; of {named(lost[0])} it answers {format_number(lost[0].throughput)}/s."
        )
    best = max(held, key=lambda run: run.rate or 0.0)
    but = f", not with {named(min(lost, key=lambda run: run.rate or 0.0))}" if lost else ""
    return f"Keeps up with {named(best)}{but}; at {named(best)} {_latency(best)}."
