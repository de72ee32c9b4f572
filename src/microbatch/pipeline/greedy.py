"""A list scheduler: time goes on, and each rank that is free takes the best action that is ready."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from microbatch.pipeline.placement import Placement
from microbatch.pipeline.schedule import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Integers, encode

NO_LIMIT = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What a free rank prefers.

    Attributes:
        held: most forwards of each rank whose activations are not released yet.
        admitted: most micro-batches of one direction between their first forward and their last backward.
        forward_first: a forward before an input gradient, when both are ready.
        patience: a weight gradient of length w waits for work that arrives within ``patience`` × w.
        split: input and weight gradients apart, or full backwards.
        noise: how much chance mixes the order of micro-batches; 0 for none.
    """

    held: tuple[int, ...] = ()
    admitted: int = NO_LIMIT
    forward_first: bool = False
    patience: float = 0.0
    split: bool = True
    noise: float = 0.0


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each action by kind, stage and micro-batch, and of the message behind each stage."""

    by_kind: tuple[list[list[float]], ...]
    message: list[float]


def unit_times(stages: int, count: int) -> Times:
    """F = I = W = 1, and messages take no time."""
    one = [[1.0] * count] * stages
    return Times((one, one, one, [[2.0] * count] * stages), [0.0] * stages)


def in_order_of_readiness(
    placements: Sequence[Placement], directions: Integers, count: int, *, in_flight: int
) -> list[Integers]:
    """Forwards before full backwards, with ``in_flight`` micro-batches of each direction at most."""
    times = unit_times(len(placements[0]), count)
    return greedy(placements, directions, times, Rules(admitted=in_flight, split=False, forward_first=True))


def greedy(
    placements: Sequence[Placement],
    directions: Integers,
    times: Times,
    rules: Rules,
    rng: Random | None = None,
) -> list[Integers]:
    """The order of each rank; never a deadlock where each rank holds one stage or ``held`` sets no limit."""
    desk = _Desk(placements, directions, times, rules, rng)
    desk.work()
    return [np.asarray(codes, dtype=np.int64) for codes in desk.orders]


class _Desk:
    """State of the list scheduler: what is ready where, and when each rank is free."""

    def __init__(
        self,
        placements: Sequence[Placement],
        directions: NDArray[np.int64],
        times: Times,
        rules: Rules,
        rng: Random | None,
    ) -> None:
        self.rules, self.times, self.rng = rules, times, rng
        self.places = [placements[way] for way in directions.tolist()]
        self.ways = directions.tolist()
        self.count, self.last = len(self.places), len(placements[0]) - 1
        ranks = 1 + max(placements[0])
        self.orders: list[list[int]] = [[] for _ in range(ranks)]
        self.ready: list[list[tuple[float, int, int, int]]] = [[] for _ in range(ranks)]
        self.free = [0.0] * ranks
        self.held = [0] * ranks
        self.limits = rules.held or (NO_LIMIT,) * ranks
        self.admitted = [0] * len(placements)
        self.events: list[tuple[float, int]] = []

    def work(self) -> None:
        for micro_batch in range(self.count):
            self._offer(0.0, FORWARD, 0, micro_batch)
        while self.events:
            time, rank = heapq.heappop(self.events)
            if self.free[rank] <= time:
                chosen = self._choose(time, rank)
                if chosen is not None:
                    self._do(time, rank, chosen)

    def _offer(self, time: float, kind: int, stage: int, micro_batch: int) -> None:
        rank = self.places[micro_batch][stage]
        self.ready[rank].append((time, kind, stage, micro_batch))
        heapq.heappush(self.events, (time, rank))

    def _choose(self, time: float, rank: int) -> tuple[float, int, int, int] | None:
        here = [action for action in self.ready[rank] if action[0] <= time and self._allowed(rank, action)]
        if not here:
            return None
        best = min(here, key=self._rank_of)
        if best[1] == WEIGHT_GRADIENT and self._worth_waiting(time, rank, best):
            return None
        return best

    def _allowed(self, rank: int, action: tuple[float, int, int, int]) -> bool:
        _, kind, stage, micro_batch = action
        if kind != FORWARD:
            return True
        if stage == 0 and self.admitted[self.ways[micro_batch]] >= self.rules.admitted:
            return False
        return self.held[rank] < self.limits[rank]

    def _rank_of(self, action: tuple[float, int, int, int]) -> tuple[int, float, int]:
        """Weights last; else by the preferred kind, the older micro-batch, the stage nearer to its end."""
        _, kind, stage, micro_batch = action
        if kind == WEIGHT_GRADIENT:
            return 2, micro_batch, stage
        later = (kind == FORWARD) != self.rules.forward_first
        chance = self.rng.random() * self.rules.noise if self.rng else 0.0
        return int(later), micro_batch + chance, -stage if kind == FORWARD else stage

    def _worth_waiting(self, time: float, rank: int, best: tuple[float, int, int, int]) -> bool:
        _, kind, stage, micro_batch = best
        until = time + self.rules.patience * self.times.by_kind[kind][stage][micro_batch]
        return any(
            time < action[0] < until and action[1] != WEIGHT_GRADIENT and self._allowed(rank, action)
            for action in self.ready[rank]
        )

    def _do(self, time: float, rank: int, action: tuple[float, int, int, int]) -> None:
        self.ready[rank].remove(action)
        _, kind, stage, micro_batch = action
        end = time + self.times.by_kind[kind][stage][micro_batch]
        self.orders[rank].append(int(encode(kind, stage, micro_batch, self.count)))
        self.free[rank] = end
        heapq.heappush(self.events, (end, rank))
        self._count(rank, kind, stage, micro_batch)
        self._pass_on(end, rank, kind, stage, micro_batch)

    def _count(self, rank: int, kind: int, stage: int, micro_batch: int) -> None:
        self.held[rank] += {FORWARD: 1, INPUT_GRADIENT: 0}.get(kind, -1)
        if stage == 0 and kind != WEIGHT_GRADIENT:
            self.admitted[self.ways[micro_batch]] += 1 if kind == FORWARD else -1

    def _pass_on(self, end: float, rank: int, kind: int, stage: int, micro_batch: int) -> None:
        """Offer what can follow: the rules of `schedule`, seen from the action that is done."""
        if kind == WEIGHT_GRADIENT:
            return
        back = INPUT_GRADIENT if self.rules.split else BACKWARD
        if kind == INPUT_GRADIENT:
            self._offer(end, WEIGHT_GRADIENT, stage, micro_batch)
        if kind == FORWARD and stage == self.last:
            self._offer(end, back, stage, micro_batch)
        elif kind == FORWARD:
            self._offer(end + self._travel(rank, stage, stage + 1, micro_batch), FORWARD, stage + 1, micro_batch)
        elif stage > 0:
            self._offer(end + self._travel(rank, stage, stage - 1, micro_batch), back, stage - 1, micro_batch)

    def _travel(self, rank: int, here: int, there: int, micro_batch: int) -> float:
        return 0.0 if self.places[micro_batch][there] == rank else self.times.message[min(here, there)]
