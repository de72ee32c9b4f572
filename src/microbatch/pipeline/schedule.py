"""What a pipeline schedule is, and the proof that it can run. The rules of F, I, W and B stand here and nowhere else:

- a forward F of stage s needs the forward of stage s − 1 for the same micro-batch;
- an input gradient I of stage s needs its own forward, and the input gradient of stage s + 1;
- a weight gradient W needs its own input gradient, and nobody waits for it;
- a full backward B is I and W in one.

Stage × micro-batch are done exactly once: F, then either B, or I and later W; in a forward-only schedule F alone.
No torch, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from microbatch.errors import InvalidSchedule
from microbatch.pipeline.placement import Placement, shape_of

FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, BACKWARD = range(4)
LETTERS = "FIWB"
"""Torch's letters, by kind."""

Integers = NDArray[np.int64]
_JOINED = 4


class Action(NamedTuple):
    """One piece of work of a rank, written as torch writes it: ``2F0`` is the forward of stage 2, micro-batch 0."""

    stage: int
    kind: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{LETTERS[self.kind]}{self.micro_batch}"


def encode(kind: int, stage: Integers | int, micro_batch: Integers | int, count: int) -> Integers:
    """Actions as numbers, one each, for schedules of ``count`` micro-batches; stage or micro-batch may be an array."""
    return np.asarray((np.asarray(stage) * count + np.asarray(micro_batch)) * 8 + kind, dtype=np.int64)


def joined(code: Integers | int) -> Integers:
    """The same action, run as one with the action behind it (torch's ``OVERLAP_F_B``)."""
    return np.asarray(code, dtype=np.int64) | _JOINED


def is_joined(code: Integers | int) -> NDArray[np.bool_]:
    """Whether an action is run as one with the action behind it."""
    return np.asarray((np.asarray(code) & _JOINED) > 0)


@dataclass(frozen=True, eq=False)
class Schedule:
    """Who does what in which order, proved complete, ordered and free of deadlock: what does not run is never made.

    Make one with `Schedule.of`, read one with `Schedule.from_csv`. All actions stand in one row, rank after rank.

    Attributes:
        name: one of ``SCHEDULES``, or the file that it was read from.
        num_micro_batches: micro-batches in one step.
        placements: the rank of each stage, once per direction (two for Chimera and DualPipe).
        directions: the placement that each micro-batch goes by.
        orders: the actions of each rank as numbers of `encode`.
        only_simulated: why torch's runtime cannot run it, in one sentence; empty where it can.

    Raises:
        InvalidSchedule: what is missing, doubled, misplaced or too early, or which ranks wait for each other.
    """

    name: str
    num_micro_batches: int
    placements: tuple[Placement, ...]
    orders: tuple[Integers, ...]
    directions: Integers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    only_simulated: str = ""
    offsets: Integers = field(init=False, repr=False)
    """Where the actions of each rank begin; one more than ranks."""
    rank: Integers = field(init=False, repr=False)
    kind: Integers = field(init=False, repr=False)
    stage: Integers = field(init=False, repr=False)
    micro_batch: Integers = field(init=False, repr=False)
    is_joined: NDArray[np.bool_] = field(init=False, repr=False)
    """Run as one with the action behind it."""
    needs: Integers = field(init=False, repr=False)
    """The action of another stage that must be done before; −1 for none. What a rank itself did before is in order."""
    turns: list[int] = field(init=False, repr=False)
    """All actions in an order in which each comes after what it needs: the proof that there is no deadlock."""

    def __post_init__(self) -> None:
        _unpack(self)
        _check_places(self)
        tables = _where(self)
        _check_complete(self, *tables)
        _check_order(self, *tables)
        object.__setattr__(self, "needs", _needs(self, *tables))
        object.__setattr__(self, "turns", _take_turns(self))

    @classmethod
    def of(cls, name: str, *, ranks: int, num_micro_batches: int, chunks: int | None = None) -> Schedule:
        """A named schedule.

        Args:
            name: a key of ``SCHEDULES``, as in ``"one_f_one_b"``.
            ranks: p, the devices in a row.
            num_micro_batches: m.
            chunks: v, the stages on each rank; by default what the schedule is known for.

        Raises:
            InvalidSchedule: an unknown name, or sizes that make no sense for it; the nearest choice is named.

        >>> Schedule.of("one_f_one_b", ranks=2, num_micro_batches=2).to_csv()
        '0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1\\n'
        """
        from microbatch.pipeline.schedules import make_schedule

        return make_schedule(name, ranks, num_micro_batches, chunks)

    @classmethod
    def from_csv(cls, path: str | Path) -> Schedule:
        """A user's own order: one row per rank, torch's action text in the cells, empty cells ignored."""
        from microbatch.pipeline.action_text import read_schedule

        return read_schedule(path)

    def to_csv(self) -> str:
        """The text of a CSV that torch's runtime and `from_csv` read: one row per rank."""
        from microbatch.pipeline.action_text import schedule_csv

        return schedule_csv(self)

    @property
    def ranks(self) -> int:
        """p, the number of ranks."""
        return len(self.orders)

    @property
    def placement(self) -> Placement:
        """The rank of each stage (of the first direction)."""
        return self.placements[0]

    @property
    def stages(self) -> int:
        """Stages of the model, over all ranks."""
        return len(self.placement)

    @property
    def chunks(self) -> float:
        """v, stages on each rank; not whole in a user's own placement with more on one than on another."""
        return self.stages / self.ranks if self.stages % self.ranks else self.stages // self.ranks

    @property
    def shape(self) -> str:
        """How stages lie on ranks: ``loop``, ``v``, ``both ways`` or ``own``."""
        return shape_of(self.placement) if len(self.placements) == 1 else "both ways"

    @property
    def has_backward(self) -> bool:
        """False for a schedule of forwards only."""
        return bool((self.kind != FORWARD).any())

    def __len__(self) -> int:
        return len(self.kind)

    def __eq__(self, other: object) -> bool:
        """The same actions at the same places; the name does not count."""
        if not isinstance(other, Schedule):
            return NotImplemented
        same_size = self.num_micro_batches == other.num_micro_batches and self.ranks == other.ranks
        return same_size and all(np.array_equal(a, b) for a, b in zip(self.orders, other.orders))

    def __hash__(self) -> int:
        return hash((self.num_micro_batches, *(order.tobytes() for order in self.orders)))

    def action(self, index: int) -> Action:
        """The action at a place of the row."""
        return Action(int(self.stage[index]), int(self.kind[index]), int(self.micro_batch[index]))

    def of_rank(self, rank: int) -> range:
        """The places of a rank's actions in the row."""
        return range(int(self.offsets[rank]), int(self.offsets[rank + 1]))

    def crosses(self) -> NDArray[np.bool_]:
        """For each action whether what it needs comes from another rank."""
        return np.asarray((self.needs >= 0) & (self.rank[self.needs] != self.rank))


def prove(
    name: str,
    num_micro_batches: int,
    placements: Sequence[Placement],
    orders: Sequence[Integers],
    directions: Integers | None = None,
    only_simulated: str = "",
) -> Schedule:
    """A schedule from the actions of each rank; one direction unless ``directions`` says otherwise."""
    ways = np.zeros(num_micro_batches, dtype=np.int64) if directions is None else directions
    return Schedule(name, num_micro_batches, tuple(placements), tuple(orders), ways, only_simulated)


def _unpack(schedule: Schedule) -> None:
    codes = np.concatenate(schedule.orders) if schedule.orders else np.zeros(0, dtype=np.int64)
    if not len(codes) or schedule.num_micro_batches < 1:
        raise InvalidSchedule(f"{schedule.name} holds no action.", "Give at least one rank and one micro-batch.")
    lengths = [len(order) for order in schedule.orders]
    stage, micro_batch = np.divmod(codes >> 3, schedule.num_micro_batches)
    for name, value in {
        "offsets": np.concatenate(([0], np.cumsum(lengths))),
        "rank": np.repeat(np.arange(len(lengths)), lengths),
        "kind": codes & 3,
        "stage": stage,
        "micro_batch": micro_batch,
        "is_joined": is_joined(codes),
    }.items():
        object.__setattr__(schedule, name, value)


def _check_places(schedule: Schedule) -> None:
    """Every stage exists, and every action stands on the rank that holds its stage."""
    ends = schedule.offsets[1:] - 1
    alone = ends[schedule.is_joined[ends]]
    if len(alone):
        raise InvalidSchedule(
            f"{schedule.name}: {schedule.action(alone[0])} is joined with nothing.", "Add its partner."
        )
    table = np.asarray(schedule.placements)
    beyond = np.flatnonzero((schedule.stage >= table.shape[1]) | (schedule.stage < 0))
    if len(beyond):
        raise InvalidSchedule(
            f"{schedule.name}: {schedule.action(beyond[0])} names a stage, and there are {table.shape[1]}.",
            f"Stages are 0 to {table.shape[1] - 1}.",
        )
    home = table[schedule.directions[schedule.micro_batch], schedule.stage]
    astray = np.flatnonzero(home != schedule.rank)
    if len(astray):
        index = astray[0]
        raise InvalidSchedule(
            f"{schedule.name}: {schedule.action(index)} stands on rank {schedule.rank[index]}, "
            f"and its stage lies on rank {home[index]}.",
            "Move it to that rank.",
        )


def _where(schedule: Schedule) -> tuple[Integers, Integers, Integers]:
    """Where in the row stage × micro-batch has its F, its I or B, and its W or B; −1 for nowhere. Refuses doubles."""
    size = schedule.stages * schedule.num_micro_batches
    pair = schedule.stage * schedule.num_micro_batches + schedule.micro_batch
    tables = []
    for kinds in ((FORWARD,), (INPUT_GRADIENT, BACKWARD), (WEIGHT_GRADIENT, BACKWARD)):
        chosen = np.flatnonzero(np.isin(schedule.kind, kinds))
        counts = np.bincount(pair[chosen], minlength=size)
        if counts.max(initial=0) > 1:
            twice = chosen[pair[chosen] == np.argmax(counts > 1)][:2]
            names = " and ".join(str(schedule.action(index)) for index in twice)
            raise InvalidSchedule(f"{schedule.name}: {names} do the same work twice.", "Leave one of them out.")
        table = np.full(size, -1, dtype=np.int64)
        table[pair[chosen]] = chosen
        tables.append(table)
    return tables[0], tables[1], tables[2]


def _check_complete(schedule: Schedule, forward: Integers, inputs: Integers, weights: Integers) -> None:
    wanted = ((FORWARD, forward), (INPUT_GRADIENT, inputs), (WEIGHT_GRADIENT, weights))
    for kind, table in wanted if schedule.has_backward else wanted[:1]:
        missing = np.flatnonzero(table < 0)
        if len(missing):
            stage, micro_batch = divmod(int(missing[0]), schedule.num_micro_batches)
            action = Action(stage, kind, micro_batch)
            others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            either = "" if kind == FORWARD else f", and there is no {Action(stage, BACKWARD, micro_batch)} either"
            rank = schedule.placements[int(schedule.directions[micro_batch])][stage]
            raise InvalidSchedule(
                f"{schedule.name}: {action}{others} of rank {rank} is missing{either}.",
                "Every stage needs F, and either B or I and W, once for every micro-batch.",
            )


def _check_order(schedule: Schedule, forward: Integers, inputs: Integers, weights: Integers) -> None:
    """On its own rank F comes before I or B, and I before W."""
    if not schedule.has_backward:
        return
    for first, second in ((forward, inputs), (inputs, weights)):
        late = np.flatnonzero(first > second)
        if len(late):
            early, needed = schedule.action(int(second[late[0]])), schedule.action(int(first[late[0]]))
            raise InvalidSchedule(
                f"{schedule.name}: rank {schedule.rank[second[late[0]]]} does {early} before {needed}.",
                f"Put {needed} first.",
            )


def _needs(schedule: Schedule, forward: Integers, inputs: Integers, _: Integers) -> Integers:
    """The rules between stages, for all actions at once."""
    count, last = schedule.num_micro_batches, schedule.stages - 1
    pair = schedule.stage * count + schedule.micro_batch
    needs = np.full(len(schedule), -1, dtype=np.int64)
    forwards = (schedule.kind == FORWARD) & (schedule.stage > 0)
    needs[forwards] = forward[pair[forwards] - count]
    backwards = ((schedule.kind == INPUT_GRADIENT) | (schedule.kind == BACKWARD)) & (schedule.stage < last)
    needs[backwards] = inputs[pair[backwards] + count]
    return needs


def _take_turns(schedule: Schedule) -> list[int]:
    """Let every rank go on until it must wait, and again when what it waits for is done.

    Each action is needed by at most one other, so that at most one rank waits for it.
    """
    needs, is_joined = schedule.needs.tolist(), schedule.is_joined.tolist()
    at, stop = schedule.offsets[:-1].tolist(), schedule.offsets[1:].tolist()
    done = bytearray(len(needs) + 1)
    done[-1] = 1  # the need −1 is always met
    waiter = [-1] * len(needs)
    turns: list[int] = []
    awake = list(range(len(at)))
    while awake:
        rank = awake.pop()
        index, end = at[rank], stop[rank]
        while index < end:
            needed = needs[index]
            if done[needed] and is_joined[index]:
                needed = needs[index + 1]
            if not done[needed]:
                waiter[needed] = rank
                break
            done[index] = 1
            turns.append(index)
            if waiter[index] >= 0:
                awake.append(waiter[index])
            index += 1
        at[rank] = index
    if len(turns) < len(needs):
        raise _deadlock(schedule, at)
    return turns


def _deadlock(schedule: Schedule, at: list[int]) -> InvalidSchedule:
    done = np.zeros(len(schedule), dtype=bool)
    for rank, index in enumerate(at):
        done[schedule.offsets[rank] : index] = True
    waits = []
    for rank, index in enumerate(at):
        if index in schedule.of_rank(rank):
            needed = int(schedule.needs[index])
            if needed < 0 or done[needed]:  # the second of a pair is what waits
                needed = int(schedule.needs[index + 1])
            on = int(schedule.rank[needed])
            waits.append(f"rank {rank} waits at {schedule.action(index)} for {schedule.action(needed)} of rank {on}")
    shown = "; ".join(waits[:4]) + (f"; and {len(waits) - 4} ranks more" if len(waits) > 4 else "")
    return InvalidSchedule(f"{schedule.name} never ends: {shown}.", "Bring what is waited for forward.")
