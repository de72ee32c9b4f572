"""The best schedule for given times under a memory limit, with its reason and what was rejected."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from microbatch.errors import DoesNotFit
from microbatch.pipeline.costs import Costs
from microbatch.pipeline.placement import loop, zigzag
from microbatch.pipeline.regroup import regroup, stages_in
from microbatch.pipeline.schedule import BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Schedule, prove
from microbatch.pipeline.schedules import SCHEDULES, make_schedule
from microbatch.pipeline.simulate import simulate
from microbatch.pipeline.timeline import Timeline
from microbatch.units import format_bytes, format_number, format_percent

MOST_SEARCHED = 1_000
"""Actions up to which orders of their own are searched for; named schedules are compared at any size."""
_NAMED = tuple(name for name in SCHEDULES if name != "forward_only")


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A schedule that was compared.

    Attributes:
        name: of the schedule.
        chunks: stages on each rank.
        seconds: makespan, with reduction and optimizer.
        peak_activations: of the worst rank.
        verdict: ``chosen``, or why not.
    """

    name: str
    chunks: float
    seconds: float
    peak_activations: float
    verdict: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"schedule": self.name, "chunks": self.chunks, "seconds": self.seconds,
                "peak_activations": self.peak_activations, "verdict": self.verdict}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The schedule to use.

    Attributes:
        timeline: its simulation.
        reason: why it, in one sentence.
        tried: everything that was compared, the best first.
        optimal: whether it reaches a lower bound, so that no order of these stages is shorter.
    """

    timeline: Timeline
    reason: str
    tried: tuple[Tried, ...]
    optimal: bool

    @property
    def schedule(self) -> Schedule:
        """The order itself."""
        return self.timeline.schedule

    def to_json(self) -> dict[str, Any]:
        """The timeline, the reason, and all that was compared."""
        return {**self.timeline.to_json(), "reason": self.reason, "optimal": self.optimal,
                "tried": [one.to_json() for one in self.tried]}  # fmt: skip


def recommend(
    costs: Costs,
    *,
    ranks: int,
    num_micro_batches: int,
    memory_limit: float | None = None,
    memory_limit_bytes: int | None = None,
    chunks: tuple[int, ...] | None = None,
    executable: bool = True,
    synchronised: bool = True,
    rounds: int = 600,
    seed: int = 0,
) -> Recommendation:
    """Compare every named schedule, and search for an order of these stages' own.

    Args:
        costs: of the stages, in the order of the model.
        ranks: p.
        num_micro_batches: m.
        memory_limit: most activations of a rank, in micro-batches on one rank's layers.
        memory_limit_bytes: most bytes of a rank; needs ``activation_bytes``.
        chunks: stages on each rank that are considered; by default as many as the costs have. Another number joins or
            halves the stages: times are added, or shared out evenly.
        executable: leave out what torch's runtime cannot run, such as schedules that hold every stage twice.
        synchronised: all ranks end a step together, as clipping by a global norm asks; otherwise the longest span of a
            rank counts, which is what zero bubble shortens.
        rounds: of the search; 0 compares named schedules only.
        seed: of the search.

    Raises:
        DoesNotFit: nothing stays within the limit; says which comes nearest.
    """
    from microbatch.pipeline.search import lower_bound  # what only compares named schedules starts sooner without

    given = stages_in(costs, ranks)
    allowed = chunks or (given // ranks,)
    limits: dict[str, Any] = {"memory_limit": memory_limit, "memory_limit_bytes": memory_limit_bytes}
    timelines = named_timelines(costs, ranks, num_micro_batches, allowed, given=given, executable=executable, **limits)
    for number in allowed:
        if rounds and 3 * ranks * number * num_micro_batches <= MOST_SEARCHED:
            timelines += _searched(timelines, costs, given, ranks, number, num_micro_batches, rounds, seed, limits)
    fitting = [timeline for timeline in timelines if timeline.fits is not False]
    if not fitting:
        raise _nothing_fits(timelines)
    merit = partial(_order_of_merit, synchronised=synchronised)
    best = min(fitting, key=merit)
    named = min((t for t in fitting if t.schedule.name != "searched"), key=merit, default=best)
    if _seconds(named, synchronised) <= _seconds(best, synchronised) * (1 + 1e-9):
        best = named
    tried = [_tried(timeline, best, synchronised) for timeline in sorted(timelines, key=merit)]
    bound = lower_bound(best.schedule, regroup(costs, given, best.schedule.stages))
    optimal = synchronised and best.makespan <= bound * (1 + 1e-9)
    return Recommendation(
        timeline=best, reason=_reason(best, timelines, optimal, synchronised), tried=tuple(tried), optimal=optimal
    )


def named_timelines(
    costs: Costs,
    ranks: int,
    num_micro_batches: int,
    chunks: tuple[int, ...],
    *,
    given: int,
    executable: bool = False,
    memory_limit: float | None = None,
    memory_limit_bytes: int | None = None,
) -> list[Timeline]:
    """Every named schedule of these chunks, simulated; ``given`` is the number of stages that the costs speak of."""
    timelines = []
    for name in _NAMED:
        row = SCHEDULES[name]
        for number in chunks:
            if (row.only and number not in row.only) or (row.even and ranks % 2) or (number == 1 and not row.only):
                continue
            schedule = make_schedule(name, ranks, num_micro_batches, number)
            if not (executable and schedule.only_simulated):
                fitted = regroup(costs, given, schedule.stages)
                timelines.append(
                    simulate(schedule, fitted, memory_limit=memory_limit, memory_limit_bytes=memory_limit_bytes)
                )
    return timelines


def _searched(
    named: list[Timeline],
    costs: Costs,
    given: int,
    ranks: int,
    chunks: int,
    count: int,
    rounds: int,
    seed: int,
    limits: dict[str, Any],
) -> list[Timeline]:
    """Orders of their own for each placement of so many stages on a rank."""
    from microbatch.pipeline.search import greedy_schedules, improve

    found = []
    for placement in {loop(ranks, chunks), zigzag(ranks, chunks)}:
        fitted = regroup(costs, given, len(placement))
        limit = _limit_in_units(fitted, placement, limits)
        starts = [
            timeline.schedule
            for timeline in named
            if timeline.schedule.placements == (placement,) and not timeline.schedule.is_joined.any()
        ]
        starts = [_split(schedule) for schedule in starts]
        starts += greedy_schedules(placement, fitted, count, limit, seed)
        best = improve(starts, fitted, limit=limit, rounds=rounds, seed=seed)
        if best is not None:
            found.append(simulate(best, fitted, **limits))
    return found


def _split(schedule: Schedule) -> Schedule:
    """Full backwards as input and weight gradient, one behind the other."""
    orders = []
    for order in schedule.orders:
        full = (order & 3) == BACKWARD
        doubled = np.repeat(order, np.where(full, 2, 1))
        second = np.cumsum(np.where(full, 2, 1))[full] - 1
        doubled[second] += WEIGHT_GRADIENT - BACKWARD
        doubled[second - 1] += INPUT_GRADIENT - BACKWARD
        orders.append(doubled)
    return prove(schedule.name, schedule.num_micro_batches, schedule.placements, orders)


def _limit_in_units(costs: Costs, placement: tuple[int, ...], limits: dict[str, Any]) -> float | None:
    """The limit in micro-batches on one rank's layers; a limit in bytes as what the tightest rank can hold."""
    units: list[float] = [] if limits["memory_limit"] is None else [float(limits["memory_limit"])]
    if limits["memory_limit_bytes"] is not None:
        stages = len(placement)
        held, fixed = np.zeros(1 + max(placement)), np.zeros(1 + max(placement))
        np.add.at(held, list(placement), costs.per_stage("activation_bytes", stages))
        np.add.at(fixed, list(placement), costs.per_stage("weight_bytes", stages))
        room = (limits["memory_limit_bytes"] - fixed) / np.maximum(held, 1e-300)
        units.append(float(room.min()))
    return min(units, default=None)


def _seconds(timeline: Timeline, synchronised: bool) -> float:
    """What a step takes."""
    return timeline.makespan_with_optimizer if synchronised else timeline.step_without_sync


def _order_of_merit(timeline: Timeline, *, synchronised: bool = True) -> tuple[float, float, bool]:
    """Shorter, then less memory, then what torch can run."""
    return (
        float(f"{_seconds(timeline, synchronised):.9g}"),
        max(timeline.peak_activations),
        bool(timeline.schedule.only_simulated),
    )


def _tried(timeline: Timeline, best: Timeline, synchronised: bool = True) -> Tried:
    slower = _beyond(timeline, best, synchronised)
    if timeline is best:
        verdict = "chosen"
    elif timeline.fits is False:
        verdict = f"does not fit: {_excess(timeline)}"
    else:
        verdict = _compared(slower)
    return Tried(
        name=timeline.schedule.name,
        chunks=timeline.schedule.chunks,
        seconds=_seconds(timeline, synchronised),
        peak_activations=max(timeline.peak_activations),
        verdict=verdict,
    )


def _beyond(one: Timeline, best: Timeline, synchronised: bool) -> float:
    """How much longer a step takes than the best, as a share of that; 0 where neither takes any time."""
    base = _seconds(best, synchronised)
    return _seconds(one, synchronised) / base - 1 if base else 0.0


def _compared(slower: float) -> str:
    if abs(slower) <= 5e-4:
        return "as fast"
    return f"{format_percent(abs(slower))} {'more' if slower > 0 else 'less'} time"


def _excess(timeline: Timeline) -> str:
    if timeline.memory_limit is not None and max(timeline.peak_activations) > timeline.memory_limit:
        peak, limit = max(timeline.peak_activations), timeline.memory_limit
        return f"holds {format_number(peak)} micro-batches, and the limit is {format_number(limit)}"
    peak_bytes = max(timeline.peak_bytes or (0,))
    return f"needs {format_bytes(peak_bytes)}, and the limit is {format_bytes(timeline.memory_limit_bytes or 0)}"


def _nothing_fits(timelines: list[Timeline]) -> DoesNotFit:
    nearest = min(timelines, key=lambda t: max(t.peak_bytes or ()) if t.peak_bytes else max(t.peak_activations))
    return DoesNotFit(
        f"No schedule fits: the nearest, {nearest.schedule.name}, {_excess(nearest)}.",
        "Take smaller micro-batches, more ranks, or recompute activations.",
    )


def _reason(best: Timeline, timelines: list[Timeline], optimal: bool, synchronised: bool) -> str:
    others = [t for t in timelines if t is not best and t.schedule.name != "searched"]
    merit = partial(_order_of_merit, synchronised=synchronised)
    faster = [t for t in others if t.fits is False and _seconds(t, synchronised) < _seconds(best, synchronised)]
    fitting = [t for t in others if t.fits is not False]
    words = [f"{best.schedule.name} waits {format_percent(best.bubble_fraction)} of the step"]
    if fitting:
        second = min(fitting, key=merit)
        gain = _beyond(second, best, synchronised)
        words.append(f"{format_percent(gain)} less time than {second.schedule.name}" if gain > 5e-4
                     else f"as fast as {second.schedule.name}")  # fmt: skip
    if faster:
        quickest = min(faster, key=merit)
        words.append(f"{quickest.schedule.name} would be faster but {_excess(quickest)}")
    if optimal:
        words.append("no order of these stages can be shorter")
    return "; ".join(words) + "."


MOST_COMPARED = 6_000
"""Actions of a schedule up to which `alternatives` simulates the others as well."""


def alternatives(timeline: Timeline) -> list[Tried]:
    """Other named schedules for the same model, times and limit, the best first; stages joined or halved where needed.

    Empty for a measured timeline, one of forwards only, and one with more than `MOST_COMPARED` actions.
    """
    schedule = timeline.schedule
    if timeline.source != "simulated" or not schedule.has_backward or len(schedule) > MOST_COMPARED:
        return []
    if schedule.stages % schedule.ranks:
        return []
    chunks = tuple(sorted({1, 2, schedule.stages // schedule.ranks}))
    others = named_timelines(
        timeline.costs,
        schedule.ranks,
        schedule.num_micro_batches,
        chunks,
        given=schedule.stages,
        memory_limit=timeline.memory_limit,
        memory_limit_bytes=timeline.memory_limit_bytes,
    )
    here = (schedule.name, schedule.chunks)
    others = [other for other in others if (other.schedule.name, other.schedule.chunks) != here]
    ordered = sorted(others, key=lambda other: (other.fits is False, *_order_of_merit(other)))
    return [_tried(other, timeline) for other in ordered]
