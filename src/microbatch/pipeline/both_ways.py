"""Schedules whose micro-batches meet: from both ends of the row of ranks, or down and up a V."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from microbatch.pipeline.placement import both_ways, loop, zigzag
from microbatch.pipeline.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Integers,
    Schedule,
    encode,
    joined,
    prove,
)
from microbatch.pipeline.steady import first_of, one_each, renumber, slots_of

_UNIT_SLOTS = 2.4
"""Slots by which Chimera's units follow each other, per micro-batch of one direction; both directions work 4."""

TWO_COPIES = "Each rank holds two stages, copies of those of another rank: torch's runtime holds each stage once."


def dualpipe_v(ranks: int, count: int) -> Schedule:
    """DualPipe cut in half: two stages per rank in a V, forwards of one beside backwards of the other (DeepSeek)."""
    made = max(count, 2 * ranks)
    placement = zigzag(ranks, 2)
    orders = [_meeting(ranks, rank, made, (rank, 2 * ranks - 1 - rank), (0, 0), made) for rank in range(ranks)]
    return prove("dualpipe_v", count, (placement,), renumber(orders, first_of(made, count), count))


def dualpipe(ranks: int, count: int) -> Schedule:
    """Micro-batches from both ends; the first half go down, the others up (DeepSeek-V3 2024).

    An odd number is one fewer on the way up.
    """
    half = max(-(-count // 2), ranks)
    orders = []
    for rank in range(ranks):
        down = (rank, 0)
        up = (ranks - 1 - rank, half)
        near, far = (down, up) if rank < ranks // 2 else (up, down)
        depth = min(rank, ranks - 1 - rank)
        orders.append(_meeting(ranks // 2, depth, half, (near[0], far[0]), (near[1], far[1]), 2 * half))
    return _two_directions("dualpipe", ranks, count, half, orders)


def chimera(ranks: int, count: int) -> Schedule:
    """1F1B from both ends at once, each rank with a stage of either direction (Li and Hoefler 2021).

    Units of p micro-batches, half of them each way, follow each other; within one, what would start first does, if
    forwards and backwards took the same time and the other direction were not there.
    """
    half, unit = -(-count // 2), ranks // 2
    visits = [(np.full(unit, rank), np.arange(unit)) for rank in range(ranks)]
    orders = [one_each(visit, visit, ranks - 1 - rank, unit) for rank, visit in enumerate(visits)]
    alone = prove("one direction", unit, (loop(ranks),), orders)
    orders = []
    for rank in range(ranks):
        mine = [*_units(alone, rank, half, 0), *_units(alone, ranks - 1 - rank, half, half)]
        orders.append(
            np.asarray([int(encode(kind, stage, number, 2 * half)) for _, kind, stage, number in sorted(mine)])
        )
    return _two_directions("chimera", ranks, count, half, orders)


def _units(alone: Schedule, rank: int, half: int, first: int) -> Iterator[tuple[float, int, int, int]]:
    """(slot, kind, stage, micro-batch) of one direction on a rank, unit after unit."""
    unit = alone.num_micro_batches
    slots = slots_of(alone)
    for place in alone.of_rank(rank):
        action = alone.action(place)
        for number in range(action.micro_batch, half, unit):
            yield slots[place] + _UNIT_SLOTS * unit * (number // unit), action.kind, action.stage, first + number


def _two_directions(name: str, ranks: int, count: int, half: int, orders: list[Integers]) -> Schedule:
    """Orders made for ``half`` micro-batches each way, with what is beyond ``count`` left out at the end of each."""
    down = -(-count // 2)
    numbers = np.arange(2 * half)
    new = np.where(numbers < half, numbers, numbers - half + down)
    left_out = np.where(numbers < half, new >= down, new >= count)
    kept = renumber(orders, np.where(left_out, -1, new), count)
    directions = np.repeat((0, 1), (down, count - down))
    return prove(name, count, both_ways(ranks), kept, directions, TWO_COPIES)


def _meeting(
    depth: int, place: int, each: int, stages: tuple[int, int], first: tuple[int, int], count: int
) -> Integers:
    """One rank's actions where two streams of micro-batches meet in the last of ``depth`` ranks.

    Args:
        depth: ranks that a stream passes until it meets the other.
        place: this rank's place among them, 0 at the end where its near stream enters.
        each: micro-batches of each stream.
        stages: this rank's stage for the near and for the far stream.
        first: the number of the first micro-batch of each stream.
        count: micro-batches of the schedule.
    """
    line = _Line(stages, first, count)
    for _ in range(2 * (depth - place - 1)):
        line.forward(0)
    for _ in range(place + 1):
        line.forward(0)
        line.forward(1)
    for _ in range(depth - place - 1):
        line.input_gradient(1)
        line.oldest_weights()
        line.forward(1)
    for step in range(each - 2 * depth + place + 1):
        if step == 0 and place == depth - 1:
            line.forward(0)  # apart, which shortens the bubble
            line.backward(1)
        else:
            line.pair(0, 1)
        line.pair(1, 0)
    for _ in range(depth - place - 1):
        line.backward(1)
        line.pair(1, 0)
    for step in range(place + 1):
        line.backward_or_split(1, split=2 * step + 1 > place + 1)
        line.backward_or_split(0, split=2 * step + 2 > place + 1)
    for _ in range(depth - place - 1):
        line.oldest_weights()
        line.input_gradient(0)
    for _ in range(place + 1):
        line.oldest_weights()
    return np.asarray(line.codes, dtype=np.int64)


class _Line:
    """Actions of a rank in order, each taking the next micro-batch of its stream."""

    def __init__(self, stages: tuple[int, int], first: tuple[int, int], count: int) -> None:
        self.codes: list[int] = []
        self._stages, self._count = stages, count
        self._next = {(phase, back): first[phase] for phase in (0, 1) for back in (False, True)}
        self._weights: deque[int] = deque()

    def _take(self, phase: int, kind: int) -> int:
        key = (phase, kind != FORWARD)
        micro_batch = self._next[key]
        self._next[key] += 1
        return int(encode(kind, self._stages[phase], micro_batch, self._count))

    def forward(self, phase: int) -> None:
        self.codes.append(self._take(phase, FORWARD))

    def backward(self, phase: int) -> None:
        self.codes.append(self._take(phase, BACKWARD))

    def input_gradient(self, phase: int) -> None:
        self.codes.append(self._take(phase, INPUT_GRADIENT))
        self._weights.append(self.codes[-1] - INPUT_GRADIENT + WEIGHT_GRADIENT)

    def backward_or_split(self, phase: int, *, split: bool) -> None:
        if split:
            self.input_gradient(phase)
        else:
            self.backward(phase)

    def oldest_weights(self) -> None:
        if self._weights:
            self.codes.append(self._weights.popleft())

    def pair(self, forward: int, backward: int) -> None:
        """A forward of one stream beside a full backward of the other, as one."""
        self.codes.append(int(joined(self._take(forward, FORWARD))))
        self.codes.append(self._take(backward, BACKWARD))
