"""Which order a pipeline runs: named, the user's own, or the one that fits, for any number of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from microbatch.errors import InvalidBatchSizes, InvalidSchedule
from microbatch.pipeline.costs import Costs
from microbatch.pipeline.placement import Placement
from microbatch.pipeline.recommend import recommend
from microbatch.pipeline.schedule import Schedule, prove
from microbatch.pipeline.schedules import SCHEDULES
from microbatch.pipeline.steady import first_of, renumber

PER_RANK = 4
"""Micro-batches per rank unless the user says otherwise: (p − 1)/(5p − 1) of a step is then the bubble of 1F1B, below a
fifth, and more would make pieces too small to be fast."""


@dataclass
class Ordering:
    """Orders of one pipeline.

    Attributes:
        name: of the schedule; of the user's own order where there is one.
        ranks: p.
        chunks: stages on each rank.
        own: the user's own order, which has a fixed number of micro-batches.
        reason: why this one.
    """

    name: str
    ranks: int
    chunks: int
    own: Schedule | None = None
    reason: str = "asked for"
    _made: dict[int, Schedule] = field(default_factory=dict)

    @property
    def placement(self) -> Placement:
        """The rank of each stage."""
        return self.of(1).placement if self.own is None else self.own.placement

    @property
    def stages(self) -> int:
        """Over all ranks."""
        return len(self.placement)

    def of(self, count: int) -> Schedule:
        """The order for so many micro-batches.

        Raises:
            InvalidBatchSizes: more than the user's own order has.
        """
        if count not in self._made:
            self._made[count] = self._make(count)
        return self._made[count]

    def _make(self, count: int) -> Schedule:
        if self.own is None:
            return Schedule.of(self.name, ranks=self.ranks, num_micro_batches=count, chunks=self.chunks)
        made = self.own.num_micro_batches
        if count > made:
            raise InvalidBatchSizes(
                f"{self.name} has {made} micro-batches, not {count}.", f"Ask for {made}, or for a schedule by its name."
            )
        if count == made:
            return self.own
        orders = renumber(list(self.own.orders), first_of(made, count), count)  # what is left needs none of the others
        return prove(self.name, count, self.own.placements, orders)

    def count_of(self, items: int, wanted: int | str | None) -> int:
        """Micro-batches of a batch; each has an item at least."""
        if self.own is not None:
            most = self.own.num_micro_batches
            if isinstance(wanted, int) and wanted > most:
                self._make(wanted)
            return min(items, wanted if isinstance(wanted, int) else most)
        return min(items, wanted if isinstance(wanted, int) else PER_RANK * self.ranks)


def ordering_of(
    schedule: str | Path | Schedule, ranks: int, stages: int | Sequence[str] | None, chunks: int | None
) -> Ordering:
    """
    Args:
        schedule: ``"auto"``, a name, an order, or the path of a CSV.
        ranks: processes in the pipeline.
        stages: their number, or the names of the first layer of all but the first; None for what the schedule needs.
        chunks: stages on each rank.

    Raises:
        InvalidSchedule: an unknown name, an order for another number of ranks, one that is only simulated, or sizes
            that contradict each other.
    """
    own = _own(schedule)
    if own is not None:
        return _of_own(own, ranks, _number(stages))
    name = str(schedule)
    count = _number(stages)
    if count is not None:
        if count % ranks:
            below = count // ranks * ranks
            raise InvalidSchedule(
                f"{count} stages do not divide over {ranks} ranks.",
                f"Nearest: {below or ranks}" + (f" or {below + ranks} stages." if below else " stages."),
            )
        if chunks is not None and chunks * ranks != count:
            raise InvalidSchedule(
                f"{count} stages on {ranks} ranks are {count // ranks} chunks, not {chunks}.", "Leave chunks= out."
            )
        chunks = count // ranks
    if name != "auto":
        made = Schedule.of(name, ranks=ranks, num_micro_batches=ranks, chunks=chunks)
        if made.only_simulated:
            raise InvalidSchedule(f"{name} cannot be run. {made.only_simulated}", "Choose another to run.")
        if not made.has_backward:
            raise InvalidSchedule(f"{name} has no backward.", "Name a schedule for training; inference has its own.")
        return Ordering(name, ranks, made.stages // ranks)
    return _automatic(ranks, chunks or 1)


def _automatic(ranks: int, chunks: int) -> Ordering:
    """The shortest step among those that hold no more than 1F1B, for stages that cost the same."""
    if ranks == 1:
        name = "one_f_one_b" if chunks == 1 else "interleaved"
        return Ordering(name, ranks, chunks, reason="there is one rank")
    limit = float(ranks) if chunks == 1 else None  # what 1F1B holds; with more chunks each schedule has its own
    found = recommend(
        Costs(), ranks=ranks, num_micro_batches=PER_RANK * ranks, memory_limit=limit, chunks=(chunks,), rounds=0
    )
    return Ordering(found.schedule.name, ranks, chunks, reason=found.reason)


def _own(schedule: str | Path | Schedule) -> Schedule | None:
    if isinstance(schedule, Schedule):
        return schedule
    if isinstance(schedule, Path) or (schedule not in SCHEDULES and str(schedule).endswith(".csv")):
        return Schedule.from_csv(schedule)
    return None


def _number(stages: int | Sequence[str] | None) -> int | None:
    if stages is None or isinstance(stages, int):
        return stages
    return len(stages) + 1


def _of_own(own: Schedule, ranks: int, stages: int | None) -> Ordering:
    if own.only_simulated:
        raise InvalidSchedule(f"{own.name} cannot be run. {own.only_simulated}", "Choose another to run.")
    if not own.has_backward:
        raise InvalidSchedule(f"{own.name} has no backward.", "Give an order with B, or with I and W.")
    if own.ranks != ranks:
        raise InvalidSchedule(f"{own.name} is for {own.ranks} ranks, and there are {ranks}.", "Give one row per rank.")
    if stages is not None and stages != own.stages:
        raise InvalidSchedule(f"{own.name} has {own.stages} stages, not {stages}.", "Leave stages= out.")
    return Ordering(own.name, ranks, max(1, own.stages // ranks), own=own)
