"""A step that was measured, as a timeline; and the costs of its stages and messages, with which others are predicted.

Times come from the clocks of the ranks. On one machine that is one clock. Between machines clocks are moved so that no
message arrives before it was sent, in the middle of what the messages of both directions leave open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from microbatch.errors import InvalidCosts, NoAnswer
from microbatch.pipeline.costs import Costs, Floats
from microbatch.pipeline.schedule import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Integers, Schedule
from microbatch.pipeline.simulate import simulate
from microbatch.pipeline.timeline import Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """What a rank did in one step, by its own clock.

    Attributes:
        clock: equal for ranks that read the same clock.
        actions: stage, kind and micro-batch of each action.
        start: seconds.
        end: seconds.
        began: when the step began on this rank, before its batch was cut; None where only the schedule was run.
        ended: when its weights were updated.
    """

    clock: str
    actions: tuple[tuple[int, int, int], ...]
    start: tuple[float, ...]
    end: tuple[float, ...]
    began: float | None = None
    ended: float | None = None


def measured_timeline(schedule: Schedule, ranks: Sequence[RankTimes]) -> Timeline:
    """The step on a time axis that begins with its first action, held against its simulation with its own costs.

    Args:
        schedule: what was run.
        ranks: in the order of the schedule's ranks.

    Raises:
        NoAnswer: an action of the schedule was not timed.
    """
    start, end = _in_order(schedule, ranks)
    offsets = _offsets(schedule, ranks, start, end)
    start, end = start + offsets[schedule.rank], end + offsets[schedule.rank]
    first = float(start.min())
    start, end = start - first, end - first
    bare = Timeline(schedule=schedule, costs=Costs(), start=start, end=end, source="measured")
    costs = replace(measured_costs(bare), optimizer=_around(bare, ranks, offsets, first))
    return replace(bare, costs=costs, beside=simulate(schedule, costs))


def _in_order(schedule: Schedule, ranks: Sequence[RankTimes]) -> tuple[Floats, Floats]:
    """Start and end of each action in the order of the schedule, by the clock of its rank."""
    timed = {action: times for rank in ranks for action, *times in zip(rank.actions, rank.start, rank.end)}
    if len(ranks) != schedule.ranks:
        raise NoAnswer(f"{len(ranks)} ranks were timed, and {schedule.name} has {schedule.ranks}.", "Run a step first.")
    rows = []
    for action in zip(schedule.stage.tolist(), schedule.kind.tolist(), schedule.micro_batch.tolist()):
        if action not in timed:
            raise NoAnswer(f"{Action(*action)} was not timed.", "Run a whole step, and then ask for its timeline.")
        rows.append(timed[action])
    table = np.asarray(rows, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _offsets(schedule: Schedule, ranks: Sequence[RankTimes], start: Floats, end: Floats) -> Floats:
    """What is added to each rank's clock; 0 for the first rank and for all that share its clock."""
    offsets = np.full(len(ranks), np.nan)
    offsets[0] = 0.0
    clocks = [rank.clock for rank in ranks]
    crossing = np.flatnonzero(schedule.crosses())
    for _ in ranks:
        for rank in np.flatnonzero(np.isnan(offsets)):
            same = [
                other for other in range(len(ranks)) if clocks[other] == clocks[rank] and not np.isnan(offsets[other])
            ]
            offsets[rank] = offsets[same[0]] if same else _between(schedule, crossing, start, end, offsets, int(rank))
    return np.asarray(np.nan_to_num(offsets), dtype=float)


def _between(schedule: Schedule, crossing: Integers, start: Floats, end: Floats, offsets: Floats, rank: int) -> float:
    """The offset of a rank from those that are known, by the messages between them; NaN where there are none."""
    low, high = -np.inf, np.inf
    for index in crossing.tolist():
        needed = int(schedule.needs[index])
        here, there = int(schedule.rank[index]), int(schedule.rank[needed])
        if here == rank and not np.isnan(offsets[there]):  # start + offset ≥ end of the sender
            low = max(low, float(end[needed] + offsets[there] - start[index]))
        elif there == rank and not np.isnan(offsets[here]):
            high = min(high, float(start[index] + offsets[here] - end[needed]))
    if np.isinf(low) and np.isinf(high):
        return float("nan")
    return float(low if np.isinf(high) else high if np.isinf(low) else (low + high) / 2)


def _around(timeline: Timeline, ranks: Sequence[RankTimes], offsets: Floats, first: float) -> Floats:
    """What a step takes beside its actions: cutting the batch before them, reduction and update after them.

    For each stage, so that all stages of a rank together have the rank's time.
    """
    schedule, placement = timeline.schedule, np.asarray(timeline.schedule.placement)
    done = np.maximum.reduceat(timeline.end, schedule.offsets[:-1])
    seconds = np.zeros(schedule.ranks)
    for number, rank in enumerate(ranks):
        if rank.began is not None and rank.ended is not None:
            before = min(first - (rank.began + offsets[number]), rank.ended - rank.began)
            seconds[number] = max(before, 0.0) + max(rank.ended + offsets[number] - first - float(done[number]), 0.0)
    counts = np.bincount(placement, minlength=schedule.ranks)
    return np.asarray((seconds / counts)[placement], dtype=float)


def measured_costs(*timelines: Timeline) -> Costs:
    """What the actions and messages of steps that were measured cost, as medians: for `simulate` and `recommend`.

    Time of F, I, W and B by stage. Where a step has full backwards only, they are shared out evenly between I and W;
    where it has both kinds, as `mixed` makes them, all three are known. What a message costs both its ranks is read
    off where a rank goes from one action to the next without waiting; the travel time of a link, off where it waits.

    Args:
        timelines: steps of the same stages; of several the median is surer.
    """
    if not timelines:
        raise InvalidCosts("There is no step to read costs off.", "Measure one.")
    stages = timelines[0].schedule.stages
    if any(one.schedule.stages != stages for one in timelines):
        raise InvalidCosts("The steps have different numbers of stages.", "Measure steps of the same stages.")
    forward, inputs, weights, full = (
        _medians(timelines, kind, stages) for kind in (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, BACKWARD)
    )
    split = inputs + weights
    whole = np.where(np.isnan(full), split, full)
    inputs, weights = (np.nan_to_num(np.where(np.isnan(each), whole / 2, each)) for each in (inputs, weights))
    per_message, links = _messages(timelines, stages)
    return Costs(
        forward=forward,
        input_gradient=inputs,
        weight_gradient=weights,
        full_backward=np.nan_to_num(whole) if not np.isnan(full).all() else None,
        message=links if stages > 1 else 0.0,
        per_message=per_message,
        pairs_apart=True,
        optimizer=_middle(np.stack([one.costs.per_stage("optimizer", stages) for one in timelines])),
        global_clip=True,  # the ranks of a step meet before they update
    )


def _middle(values: Floats) -> Floats:
    return np.asarray(np.median(values, axis=0), dtype=float)


def _medians(timelines: Sequence[Timeline], kind: int, stages: int) -> Floats:
    """Seconds of one kind by stage; NaN where a stage has none."""
    found = np.full(stages, np.nan)
    for stage in range(stages):
        times = [
            one.end[chosen] - one.start[chosen]
            for one in timelines
            for chosen in [(one.schedule.kind == kind) & (one.schedule.stage == stage)]
        ]
        joined = np.concatenate(times)
        if len(joined):
            found[stage] = np.median(joined)
    return found


def _messages(timelines: Sequence[Timeline], stages: int) -> tuple[float, Floats]:
    """What a message costs each of its two ranks, and the travel time of each link."""
    own = [value for one in timelines for value in _own_time(one)]
    per_message = max(float(np.median(own)), 0.0) if own else 0.0
    travels: list[list[float]] = [[] for _ in range(max(stages - 1, 0))]
    for one in timelines:
        for link, seconds in _travels(one):
            travels[link].append(seconds - 2 * per_message)
    known = [max(float(np.median(times)), 0.0) if times else np.nan for times in travels]
    unknown = float(np.nanmedian(known)) if not np.isnan(known).all() else 0.0
    return per_message, np.nan_to_num(np.asarray(known, dtype=float), nan=unknown)


def _own_time(timeline: Timeline) -> list[float]:
    """Seconds for each message between two actions of a rank where the second one's need had come long before."""
    schedule = timeline.schedule
    crosses = schedule.crosses()
    sends = np.bincount(schedule.needs[crosses], minlength=len(schedule))
    found = []
    for index in range(1, len(schedule)):
        needed = int(schedule.needs[index])
        messages = int(sends[index - 1]) + int(crosses[index])
        follows = schedule.rank[index] == schedule.rank[index - 1]
        # A need that was met before the action in between began has arrived while that one ran.
        waits = crosses[index] and timeline.end[needed] > timeline.start[index - 1]
        if follows and messages and not waits:
            found.append(float(timeline.start[index] - timeline.end[index - 1]) / messages)
    return found


def _travels(timeline: Timeline) -> list[tuple[int, float]]:
    """Link and seconds from the end of an action to the start of the one that waited for it on another rank."""
    schedule = timeline.schedule
    found = []
    for index in np.flatnonzero(schedule.crosses()).tolist():
        needed = int(schedule.needs[index])
        alone = index == int(schedule.offsets[schedule.rank[index]])
        if alone or timeline.end[needed] > timeline.end[index - 1]:
            link = min(int(schedule.stage[index]), int(schedule.stage[needed]))
            found.append((link, float(timeline.start[index] - timeline.end[needed])))
    return found
