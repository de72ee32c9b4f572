"""Schedules whose stages go down the ranks and up again, so that the last stage lies on the first rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from microbatch.pipeline.greedy import in_order_of_readiness
from microbatch.pipeline.placement import zigzag
from microbatch.pipeline.schedule import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Integers, Schedule, encode, prove
from microbatch.pipeline.steady import first_of, renumber

Pattern = Callable[[int, int], tuple[int, int, int, int]]
"""(ranks, rank) → when a rank does F of its first stage, F of its second, I of its second and I of its first."""

_PERIOD = 6
"""Slots of a micro-batch on a rank: F, I and W of two stages."""


def zb_v(ranks: int, count: int) -> Schedule:
    """Zero bubble with the memory of 1F1B (Qi et al. 2023, section 6)."""
    made = max(count, 2 * ranks - 1)
    orders = [_zb_v_rank(ranks, rank, made) for rank in range(ranks)]
    return prove("zb_v", count, (zigzag(ranks),), renumber(orders, first_of(made, count), count))


def _zb_v_rank(ranks: int, rank: int, made: int) -> Integers:
    """Down the V until the first micro-batch comes back, in turn while there are forwards, then what is left."""
    line = _TwoStages(rank, 2 * ranks - 1 - rank, made)
    for _ in range(2 * (ranks - rank) - 1):
        line.do(0, FORWARD)
    for _ in range(rank):
        line.do(1, FORWARD)
        line.do(0, FORWARD)
    for _ in range(ranks - rank):
        line.do(1, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
    while line.done(1, FORWARD) < made:
        if line.done(0, FORWARD) < made:
            line.do(0, FORWARD)
        line.do(0, INPUT_GRADIENT, WEIGHT_GRADIENT)
        line.do(1, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
    for _ in range(rank):
        line.do(0, INPUT_GRADIENT)
        line.do(1, INPUT_GRADIENT)
    for _ in range(ranks - rank):
        line.do(0, INPUT_GRADIENT, WEIGHT_GRADIENT)
    for chunk in (1, 0):
        while line.done(chunk, WEIGHT_GRADIENT) < made:
            line.do(chunk, WEIGHT_GRADIENT)
    return np.asarray(line.codes, dtype=np.int64)


class _TwoStages:
    """Actions of a rank with two stages, each kind in the order of micro-batches."""

    def __init__(self, near: int, far: int, count: int) -> None:
        self.codes: list[int] = []
        self._stages, self._count = (near, far), count
        self._done: dict[tuple[int, int], int] = {}

    def do(self, chunk: int, *kinds: int) -> None:
        for kind in kinds:
            micro_batch = self.done(chunk, kind)
            self.codes.append(((self._stages[chunk] * self._count + micro_batch) << 3) | kind)
            self._done[chunk, kind] = micro_batch + 1

    def done(self, chunk: int, kind: int) -> int:
        return self._done.get((chunk, kind), 0)


def v_half(ranks: int, count: int) -> Schedule:
    """About half of the activations of 1F1B (Qi et al. 2024, arXiv 2405.15362)."""
    return _from_pattern("v_half", ranks, count, _half_pattern)


def v_min(ranks: int, count: int) -> Schedule:
    """About a third of the activations of 1F1B; waits more where F, I and W differ (arXiv 2405.15362)."""
    return _from_pattern("v_min", ranks, count, _min_pattern)


def _half_pattern(ranks: int, rank: int) -> tuple[int, int, int, int]:
    shift = 3 if ranks % 2 == 0 else 0
    back = 3 * ranks + shift
    return 2 * rank, 3 * ranks - rank - 2, back + 2 * rank - 1, back + 3 * ranks - rank - 2


def _min_pattern(ranks: int, rank: int) -> tuple[int, int, int, int]:
    shift = 2 if ranks % 3 == 0 else 0
    return rank, 2 * ranks - rank - 1, 2 * ranks + shift + rank, 4 * ranks + shift - rank - 1


def _from_pattern(name: str, ranks: int, count: int, pattern: Pattern) -> Schedule:
    orders = [_repeated(pattern(ranks, rank), (rank, 2 * ranks - 1 - rank), count) for rank in range(ranks)]
    return prove(name, count, (zigzag(ranks),), orders)


def _repeated(slots: tuple[int, int, int, int], stages: tuple[int, int], count: int) -> Integers:
    """One pattern every six slots; the oldest weight gradient wherever a slot is left."""
    near, far = stages
    rows = ((FORWARD, near), (FORWARD, far), (INPUT_GRADIENT, far), (INPUT_GRADIENT, near))
    planned = {
        slot + _PERIOD * micro_batch: int(encode(kind, stage, micro_batch, count))
        for slot, (kind, stage) in zip(slots, rows)
        for micro_batch in range(count)
    }
    codes: list[int] = []
    weights: deque[int] = deque()
    for slot in range(max(planned) + 1):
        if slot in planned:
            codes.append(planned[slot])
            if codes[-1] & 3 == INPUT_GRADIENT:
                weights.append(codes[-1] - INPUT_GRADIENT + WEIGHT_GRADIENT)
        elif weights:
            codes.append(weights.popleft())
    return np.asarray([*codes, *weights], dtype=np.int64)


def hanayo(ranks: int, count: int, chunks: int) -> Schedule:
    """Waves over the ranks with full backwards, twice as many in flight as there are ranks (Liu et al. 2023)."""
    directions = np.zeros(count, dtype=np.int64)
    orders = in_order_of_readiness((zigzag(ranks, chunks),), directions, count, in_flight=2 * ranks)
    return prove("hanayo", count, (zigzag(ranks, chunks),), orders)
