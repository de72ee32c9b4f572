"""When each action of a schedule runs, and what follows from that: bubble, memory, the end of the step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from microbatch.notebook import notebook_form
from microbatch.pipeline.costs import Costs, Floats
from microbatch.pipeline.schedule import BACKWARD, FORWARD, WEIGHT_GRADIENT, Integers, Schedule

SCHEMA_VERSION = 1


@dataclass(frozen=True, eq=False, kw_only=True)
class Timeline:
    """A step on a time axis that begins at 0, simulated or measured.

    Attributes:
        schedule: what was done.
        costs: what it was simulated with; of a measured one, the costs that it is held against.
        start: seconds, for each action in the order of the schedule.
        end: the same for its end.
        source: ``simulated`` or ``measured``.
        memory_limit: most activations of a rank (unit: one micro-batch on one rank's layers); None for no limit.
        memory_limit_bytes: most bytes of a rank; None for no limit.
        beside: another timeline of the same ranks, drawn under this one on the same axis (simulated under measured).
    """

    schedule: Schedule
    costs: Costs
    start: Floats
    end: Floats
    source: str = "simulated"
    memory_limit: float | None = None
    memory_limit_bytes: int | None = None
    beside: Timeline | None = None

    @property
    def shown(self) -> tuple[Timeline, ...]:
        """This one, and the one beside it."""
        return (self,) if self.beside is None else (self, self.beside)

    @property
    def in_seconds(self) -> bool:
        """Whether times are seconds, because one was measured; else they are in the unit of the costs."""
        return any(one.source == "measured" for one in self.shown)

    @property
    def predicted(self) -> Timeline:
        """The one that was simulated, of those that are shown; a measured one where there is no other."""
        return next((one for one in self.shown if one.source == "simulated"), self)

    @cached_property
    def makespan(self) -> float:
        """Seconds until the last action of any rank is done."""
        return float(self.end.max())

    @cached_property
    def makespan_with_optimizer(self) -> float:
        """Seconds until the last rank has reduced its gradients and updated its weights."""
        return float(self.finish_per_rank.max())

    @cached_property
    def finish_per_rank(self) -> Floats:
        """When each rank has updated its weights: after its own gradients, or with a global clip after all."""
        placed = np.asarray(self.schedule.placements)
        optimizer = self.costs.per_stage("optimizer", self.schedule.stages)
        update = np.zeros(self.schedule.ranks)
        for way in placed:
            np.add.at(update, way, optimizer)
        reduced = self._reduced()
        return (np.full_like(reduced, reduced.max()) if self.costs.global_clip else reduced) + update

    def _reduced(self) -> Floats:
        """When the gradients of each rank are reduced; a rank's reductions follow each other, beside its work."""
        done = np.maximum.reduceat(self.end, self.schedule.offsets[:-1])
        reduction = self.costs.per_stage("reduction", self.schedule.stages)
        if not reduction.any():
            return done
        last = np.zeros((self.schedule.ranks, self.schedule.stages))
        weights = np.isin(self.schedule.kind, (WEIGHT_GRADIENT, BACKWARD))
        np.maximum.at(last, (self.schedule.rank[weights], self.schedule.stage[weights]), self.end[weights])
        for rank in range(self.schedule.ranks):
            busy_until = 0.0
            for stage in sorted(np.flatnonzero(last[rank]), key=lambda s: float(last[rank, s])):
                busy_until = max(busy_until, float(last[rank, stage])) + float(reduction[stage])
            done[rank] = max(done[rank], busy_until)
        return done

    @cached_property
    def busy_per_rank(self) -> Floats:
        """Seconds in which each rank computes."""
        return np.add.reduceat(self.end - self.start, self.schedule.offsets[:-1])

    @cached_property
    def span_per_rank(self) -> Floats:
        """Seconds from the start of a rank's first action to the end of its last."""
        first, last = self.schedule.offsets[:-1], self.schedule.offsets[1:] - 1
        return self.end[last] - self.start[first]

    @property
    def idle_per_rank(self) -> Floats:
        """Seconds of the step in which each rank does not compute."""
        return self.makespan - self.busy_per_rank

    @property
    def bubble_fraction(self) -> float:
        """Idle ÷ (ranks × makespan)."""
        return float(self.idle_per_rank.sum() / (self.schedule.ranks * self.makespan)) if self.makespan else 0.0

    @property
    def bubble_over_ideal(self) -> float:
        """Idle per rank ÷ busy per rank."""
        busy = float(self.busy_per_rank.sum())
        return float(self.idle_per_rank.sum()) / busy if busy else 0.0

    @property
    def bubble_per_rank(self) -> Floats:
        """The share of a rank's own span, from its first action to its last, in which it waits."""
        span = self.span_per_rank
        return np.divide(span - self.busy_per_rank, span, out=np.zeros_like(span), where=span > 0)

    @cached_property
    def step_without_sync(self) -> float:
        """Seconds from step to step where ranks need not end together: the longest span of a rank, with its update.

        That is what "zero bubble" promises; clipping by a global norm then needs validation afterwards.
        """
        done = np.maximum.reduceat(self.end, self.schedule.offsets[:-1])
        begun = np.minimum.reduceat(self.start, self.schedule.offsets[:-1])
        return (
            float((self.finish_per_rank - begun).max()) if not self.costs.global_clip else float((done - begun).max())
        )

    @cached_property
    def _units(self) -> Floats:
        """The share of its rank's layers that each action's stage is: one over the stages of the rank and direction."""
        placed = np.asarray(self.schedule.placements)
        counts = np.stack([np.bincount(way, minlength=self.schedule.ranks) for way in placed])
        ways = self.schedule.directions[self.schedule.micro_batch]
        return np.asarray(1.0 / counts[ways, self.schedule.rank], dtype=float)

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """Most activations of each rank at once; unit: one micro-batch on one rank's layers."""
        return tuple(np.round(_peaks(self.schedule, self._units), 9).tolist())

    @cached_property
    def peak_bytes(self) -> tuple[int, ...] | None:
        """Most bytes of each rank, weights included; None where activations have no size."""
        held = self.held_bytes
        if held is None:
            return None
        peaks = _peaks(self.schedule, held) + self.fixed_bytes
        return tuple(round(peak) for peak in peaks.tolist())

    @property
    def held_bytes(self) -> Floats | None:
        """What each forward keeps; None where activations have no size."""
        if self.costs.activation_bytes is None:
            return None
        return self.costs.per_stage("activation_bytes", self.schedule.stages)[self.schedule.stage]

    @property
    def fixed_bytes(self) -> Floats:
        """Weights, gradients and optimizer state of each rank; twice where stages have copies."""
        weights = self.costs.per_stage("weight_bytes", self.schedule.stages)
        fixed = np.zeros(self.schedule.ranks)
        for way in np.asarray(self.schedule.placements):
            np.add.at(fixed, way, weights)
        return fixed

    @property
    def fits(self) -> bool | None:
        """Whether every rank stays within the memory limit; None without a limit."""
        checks = []
        if self.memory_limit is not None:
            checks.append(max(self.peak_activations) <= self.memory_limit * (1 + 1e-12))
        if self.memory_limit_bytes is not None and self.peak_bytes is not None:
            checks.append(max(self.peak_bytes) <= self.memory_limit_bytes)
        return all(checks) if checks else None

    def memory_steps(self, rank: int, *, in_bytes: bool = False) -> tuple[Floats, Floats]:
        """Times and the memory held from each on, as a staircase: up at a forward's start, down at a backward's end."""
        places = slice(int(self.schedule.offsets[rank]), int(self.schedule.offsets[rank + 1]))
        held = self.held_bytes if in_bytes else self._units
        assert held is not None
        change = held[places] * _signs(self.schedule)[places]
        times = np.where(change > 0, self.start[places], self.end[places])
        kept = change != 0
        return times[kept], np.cumsum(change[kept]) + (self.fixed_bytes[rank] if in_bytes else 0.0)

    def to_json(self, *, actions: bool = False) -> dict[str, Any]:
        """Plain numbers; every action with its times on request."""
        from microbatch.pipeline.critical_path import critical_path, what_to_change

        schedule = self.schedule
        document: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION, "schedule": schedule.name, "source": self.source,
            "ranks": schedule.ranks, "stages": schedule.stages, "num_micro_batches": schedule.num_micro_batches,
            "placement": [list(placement) for placement in schedule.placements],
            "makespan": self.makespan, "makespan_with_optimizer": self.makespan_with_optimizer,
            "step_without_sync": self.step_without_sync,
            "bubble_fraction": self.bubble_fraction, "bubble_over_ideal": self.bubble_over_ideal,
            "bubble_per_rank": self.bubble_per_rank.tolist(), "idle_per_rank": self.idle_per_rank.tolist(),
            "busy_per_rank": self.busy_per_rank.tolist(), "peak_activations": list(self.peak_activations),
            "peak_bytes": None if self.peak_bytes is None else list(self.peak_bytes),
            "memory_limit": self.memory_limit, "memory_limit_bytes": self.memory_limit_bytes, "fits": self.fits,
            "only_simulated": schedule.only_simulated or None,
            "critical_path": [step.to_json() for step in critical_path(self)],
            "change_first": [change.to_json() for change in what_to_change(self.predicted)],
            "beside": None if self.beside is None else self.beside.to_json(actions=actions),
        }  # fmt: skip
        if actions:
            document["actions"] = [
                {"rank": rank, "action": str(schedule.action(index)), "start": start, "end": end}
                for index, (rank, start, end) in enumerate(
                    zip(schedule.rank.tolist(), self.start.tolist(), self.end.tolist())
                )
            ]
        return document

    def _repr_html_(self) -> str | None:
        return notebook_form(self)


def _signs(schedule: Schedule) -> Integers:
    """+1 where an action begins to hold activations, −1 where it lets them go."""
    signs = np.zeros(len(schedule), dtype=np.int64)
    signs[schedule.kind == FORWARD] = 1
    signs[np.isin(schedule.kind, (WEIGHT_GRADIENT, BACKWARD))] = -1
    return signs if schedule.has_backward else np.zeros_like(signs)


def _peaks(schedule: Schedule, held: NDArray[np.float64]) -> Floats:
    """The most that each rank holds; a forward without a backward lets go at its end."""
    first = schedule.offsets[:-1]
    if not schedule.has_backward:
        return np.maximum.reduceat(held, first)
    running = np.cumsum(_signs(schedule) * held)
    before = np.concatenate(([0.0], running))[first]
    return np.maximum.reduceat(running, first) - before
