"""A pipeline's timeline in words: one sentence on top, and the figures behind it."""

from __future__ import annotations

from microbatch.pipeline.critical_path import what_to_change
from microbatch.pipeline.recommend import Tried, alternatives
from microbatch.pipeline.schedule import INPUT_GRADIENT
from microbatch.pipeline.timeline import Timeline
from microbatch.units import format_bytes, format_number, format_percent, format_seconds


def time(timeline: Timeline, value: float) -> str:
    """A time: in seconds where any was measured, else in the unit of the costs."""
    return format_seconds(value) if timeline.in_seconds else format_number(value)


def subject(timeline: Timeline) -> str:
    """``one_f_one_b, 4 ranks, 8 micro-batches``."""
    schedule = timeline.schedule
    stages = f", {schedule.stages} stages" if schedule.stages != schedule.ranks else ""
    count = _count(schedule.num_micro_batches, "micro-batch")
    return f"{schedule.name}, {_count(schedule.ranks, 'rank')}{stages}, {count}"


def _count(number: float, word: str) -> str:
    plural = f"{word}es" if word.endswith("h") else f"{word}s"
    return f"{format_number(number)} {word if number == 1 else plural}"


def headline(timeline: Timeline) -> str:
    """The bubble, the bottleneck, and the best alternative, in one sentence."""
    waits = f"Ranks wait {format_percent(timeline.bubble_fraction)} of the step{_expected(timeline)}"
    parts = [part for part in (bottleneck(timeline), alternative(timeline)) if part]
    return "; ".join([waits, *parts]) + "."


def _expected(timeline: Timeline) -> str:
    """The bubble of the other one that is shown, in brackets; empty where there is none."""
    other = timeline.beside
    return "" if other is None else f" ({format_percent(other.bubble_fraction)} {other.source})"


def _beside(timeline: Timeline, hint: str) -> str:
    """A hint, with the makespan of the other one that is shown."""
    other = timeline.beside
    return hint if other is None else f"{hint}; {time(timeline, other.makespan)} {other.source}"


def bottleneck(timeline: Timeline) -> str:
    """What to shorten first; empty where nothing alone gains anything."""
    changes = what_to_change(timeline.predicted)
    if not changes:
        return ""
    first = changes[0]
    gain = f"{format_percent(first.shorter_by)} shorter saves {format_percent(first.share)}"
    return f"{first.what} is the bottleneck ({gain})"


def alternative(timeline: Timeline) -> str:
    """The fastest other schedule within the same limit; empty where none was compared."""
    others = alternatives(timeline.predicted)
    if not others:
        return ""
    best = others[0]
    whole = timeline.predicted.makespan_with_optimizer
    gain = 1 - best.seconds / whole if whole else 0.0
    if gain <= 5e-4:
        return "no other named schedule is faster" + (" within the limit" if timeline.fits is not None else "")
    return f"{named(best, timeline)} would take {format_percent(gain)} less time"


def named(tried: Tried, timeline: Timeline) -> str:
    """A schedule with its chunks where they are not those of the timeline."""
    chunks = timeline.schedule.chunks
    if tried.chunks == chunks:
        return tried.name
    plural = "" if tried.chunks == 1 else "s"
    return f"{tried.name} ({format_number(tried.chunks)} chunk{plural})"


def facts(timeline: Timeline) -> list[tuple[str, str, str]]:
    """Label, value and hint of each figure."""
    rows = [
        ("makespan", time(timeline, timeline.makespan), _beside(timeline, "until the last action of any rank")),
        ("with optimizer", time(timeline, timeline.makespan_with_optimizer), _ending(timeline)),
        ("bubble", format_percent(timeline.bubble_fraction), f"of the step, over all ranks{_expected(timeline)}"),
        ("bubble over ideal", format_percent(timeline.bubble_over_ideal), "waiting over working"),
        ("longest wait inside a rank", format_percent(float(timeline.bubble_per_rank.max())),
         "between its first action and its last"),
        ("peak", _count(max(timeline.peak_activations), "micro-batch"), _limit(timeline)),
    ]  # fmt: skip
    if timeline.peak_bytes is not None:
        rows.append(("peak bytes", format_bytes(max(timeline.peak_bytes)), "of the fullest rank, weights included"))
    return rows


def _ending(timeline: Timeline) -> str:
    return "all ranks wait for the norm of all gradients" if timeline.costs.global_clip else "reduction and update"


def _limit(timeline: Timeline) -> str:
    if timeline.fits is None:
        return "held at once by the fullest rank"
    bound = (
        format_bytes(timeline.memory_limit_bytes)
        if timeline.memory_limit_bytes is not None
        else format_number(timeline.memory_limit or 0)
    )
    return f"{'within' if timeline.fits else 'ABOVE'} the limit of {bound}"


def notes(timeline: Timeline) -> list[str]:
    """What a reader must know about the figures."""
    told = [timeline.schedule.only_simulated] if timeline.schedule.only_simulated else []
    if timeline.schedule.is_joined.any() and not timeline.costs.pairs_apart:
        told.append("A forward and a backward that are drawn joined run as one action, and send at its end.")
    if timeline.beside is not None and timeline.source == "measured":
        told.append("What is simulated has the costs that this step was measured to have, so that it differs only by "
                    "what the simulation leaves out.")  # fmt: skip
        if timeline.costs.full_backward is not None and not (timeline.schedule.kind == INPUT_GRADIENT).any():
            told.append("Only full backwards were measured: for schedules that split them, halves are taken.")
    return told
