"""What determines the makespan: the chain of actions without slack, and what would shorten it most."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from microbatch.pipeline.costs import Floats
from microbatch.pipeline.schedule import Action
from microbatch.pipeline.simulate import Waits, time_actions, waits_of
from microbatch.pipeline.timeline import Timeline

SHORTER_BY = 0.1
"""The change that is tried: a tenth."""
_CANDIDATES = 3
"""Stages, and as many links, that are simulated again; those with the largest share of the path."""


_LEAST = 5e-4
"""Share of the makespan below which a change gains nothing to speak of."""


@dataclass(frozen=True, slots=True)
class Step:
    """An action of the critical path.

    Attributes:
        action: what is done.
        rank: who does it.
        start: seconds.
        end: seconds.
        waited_for: ``rank`` (its rank was busy until then), ``message`` (what it needs came then), or ``start``.
    """

    action: Action
    rank: int
    start: float
    end: float
    waited_for: str

    def to_json(self) -> dict[str, Any]:
        """The action as text."""
        return {"action": str(self.action), "rank": self.rank, "start": self.start, "end": self.end,
                "waited_for": self.waited_for}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Change:
    """What a faster stage or link would gain.

    Attributes:
        what: ``stage 3`` or ``link 1-2`` (between stages 1 and 2).
        shorter_by: how much of its time was taken away.
        seconds: by how much the makespan fell.
        share: the same over the makespan.
    """

    what: str
    shorter_by: float
    seconds: float
    share: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def critical_path(timeline: Timeline) -> list[Step]:
    """The chain from the start to the last end in which every action begins as soon as the one before allows."""
    index = int(timeline.end.argmax())
    waits, leaves = waits_of(timeline.schedule, timeline.costs), _leaves(timeline)
    path: list[Step] = []
    while index >= 0:
        before, why = _binding(timeline, index, waits, leaves)
        path.append(
            Step(
                timeline.schedule.action(index),
                int(timeline.schedule.rank[index]),
                float(timeline.start[index]),
                float(timeline.end[index]),
                why,
            )
        )
        index = before
    return path[::-1]


def _leaves(timeline: Timeline) -> Floats:
    """When the result of each action is sent: at its end, or at the end of its pair."""
    leaves = timeline.end.copy()
    if not timeline.costs.pairs_apart:
        first = np.flatnonzero(timeline.schedule.is_joined)
        leaves[first] = timeline.end[first + 1]
    return leaves


def _binding(timeline: Timeline, index: int, waits: Waits, leaves: Floats) -> tuple[int, str]:
    """What an action waited for last: the action before it on its rank, or the one that it needs."""
    schedule = timeline.schedule
    first = int(schedule.offsets[schedule.rank[index]])
    parts = [index]
    if not timeline.costs.pairs_apart:
        if index > first and schedule.is_joined[index - 1]:
            return index - 1, "rank"  # the second part of a pair follows the first
        if schedule.is_joined[index]:
            parts.append(index + 1)
    arrivals = [
        (float(leaves[schedule.needs[part]] + waits.travel[part]), int(schedule.needs[part]))
        for part in parts
        if schedule.needs[part] >= 0
    ]
    arrival, needed = max(arrivals, default=(-1.0, -1))
    free = float(timeline.end[index - 1] + waits.send[index - 1]) if index > first else 0.0
    if arrival > free:
        return needed, "message"
    return (index - 1, "rank") if index > first else (-1, "start")


def what_to_change(timeline: Timeline, shorter_by: float = SHORTER_BY) -> list[Change]:
    """Stages and links whose shortening gains most, the best first; each simulated again. Empty for a measured one."""
    if timeline.source != "simulated" or not timeline.makespan:
        return []
    costs, schedule = timeline.costs, timeline.schedule
    factor = 1 - shorter_by
    path, changes = critical_path(timeline), []
    for stage in _most(_stage_seconds(path)):
        faster = costs.scaled(stage, factor, schedule)
        changes.append(_change(timeline, f"stage {stage}", shorter_by, time_actions(schedule, faster)[1]))
    for link in _most(_link_seconds(timeline, path)):
        faster = costs.with_link(link, factor, schedule.stages)
        changes.append(_change(timeline, f"link {link}-{link + 1}", shorter_by, time_actions(schedule, faster)[1]))
    gaining = (change for change in changes if change.share >= _LEAST)
    return sorted(gaining, key=lambda change: -change.seconds)


def _change(timeline: Timeline, what: str, shorter_by: float, end: np.ndarray) -> Change:
    gained = timeline.makespan - float(end.max())
    return Change(what, shorter_by, gained, gained / timeline.makespan)


def _most(seconds: dict[int, float]) -> list[int]:
    """The places with the most seconds of the critical path; none without any."""
    return sorted((place for place, time in seconds.items() if time > 0), key=lambda place: -seconds[place])[
        :_CANDIDATES
    ]


def _stage_seconds(path: list[Step]) -> dict[int, float]:
    seconds: dict[int, float] = {}
    for step in path:
        seconds[step.action.stage] = seconds.get(step.action.stage, 0.0) + step.end - step.start
    return seconds


def _link_seconds(timeline: Timeline, path: list[Step]) -> dict[int, float]:
    """Travel time over each link between two actions of the path."""
    seconds: dict[int, float] = {}
    links = timeline.costs.links(timeline.schedule.stages) if timeline.schedule.stages > 1 else np.zeros(0)
    for one, two in pairwise(path):
        if two.waited_for == "message" and one.rank != two.rank:
            link = min(one.action.stage, two.action.stage)
            seconds[link] = seconds.get(link, 0.0) + float(links[link])
    return seconds
