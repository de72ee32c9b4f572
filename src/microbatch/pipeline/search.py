"""Orders made for given times: list schedules under many rules, then a tabu search over the critical path.

Swapping neighbours on the critical path is the only kind of change that can shorten it (van Laarhoven et al. 1992; the
tabu search follows Nowicki and Smutnicki 1996). A lower bound ends the search where it is reached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

import numpy as np

from microbatch.pipeline.costs import Costs
from microbatch.pipeline.greedy import NO_LIMIT, Rules, Times, greedy
from microbatch.pipeline.placement import Placement
from microbatch.pipeline.schedule import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Integers, Schedule, prove
from microbatch.pipeline.simulate import time_actions, waits_of
from microbatch.pipeline.timeline import Timeline

_SAME = 1e-9
"""Times that differ by less, relative to the makespan, are the same."""
_STARTS = 4
_TENURE = (6, 14)
_MOST_WORK = 2_000_000
"""Actions that the search from one start times at most, so that long schedules are improved for a few seconds only."""


def greedy_schedules(
    placement: Placement, costs: Costs, count: int, limit: float | None, seed: int
) -> Iterator[Schedule]:
    """Orders under every combination of rules; those that hold more than the limit come as well."""
    ranks, stages = 1 + max(placement), len(placement)
    frame = _frame(placement, count)
    times = Times(
        tuple(costs.times(kind, frame).tolist() for kind in (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, BACKWARD)),
        [*(costs.links(stages) if stages > 1 else ()), 0.0],
    )
    directions = np.zeros(count, dtype=np.int64)
    most = NO_LIMIT if limit is None else max(1, int(limit * (stages // ranks) + _SAME))
    for slope, forward_first, patience, noise in product((1, 1.5, 2, 3, None), (False, True), (0.0, 0.5, 1.0), (0, 2)):
        wanted = [NO_LIMIT if slope is None else 1 + int(slope * (ranks - 1 - rank)) for rank in range(ranks)]
        if stages == ranks:
            rules = Rules(held=tuple(min(one, most) for one in wanted), forward_first=forward_first, patience=patience,
                          noise=noise)  # fmt: skip
        else:  # a limit on what a rank holds could make its stages wait for each other
            admitted = most if slope is None else min(most, 1 + int(slope * (ranks - 1)))
            rules = Rules(admitted=admitted, forward_first=forward_first, patience=patience, noise=noise)
        yield prove("searched", count, (placement,), greedy((placement,), directions, times, rules, Random(seed)))


def _frame(placement: Placement, count: int) -> Schedule:
    """Some schedule of these sizes, to read costs by."""
    times = Times(([[1.0] * count] * len(placement),) * 4, [0.0] * len(placement))
    return prove("frame", count, (placement,), greedy((placement,), np.zeros(count, dtype=np.int64), times, Rules()))


def lower_bound(schedule: Schedule, costs: Costs) -> float:
    """No order of one stage per rank is shorter: a rank's way in, its work, and the way back of its last gradient."""
    if schedule.stages != schedule.ranks or len(schedule.placements) > 1 or not schedule.has_backward:
        return 0.0
    forward, inputs, weights, full = (
        costs.times(kind, schedule) for kind in (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, BACKWARD)
    )
    inputs = np.minimum(inputs, full)
    weights = np.minimum(weights, full - inputs)
    links = costs.links(schedule.stages) if schedule.stages > 1 else np.zeros(0)
    bound = 0.0
    for stage in range(schedule.stages):
        way_in = forward[:stage].min(axis=1).sum() + links[:stage].sum()
        way_out = inputs[:stage].min(axis=1).sum() + links[:stage].sum() + weights[0].min()
        both = forward[stage].sum() + inputs[stage].sum()
        bound = max(bound, way_in + both + weights[stage].sum(), way_in + both + way_out)
    return float(bound)


def improve(
    starts: Sequence[Schedule], costs: Costs, *, limit: float | None, rounds: int, seed: int
) -> Schedule | None:
    """The best order that the search finds from the best of the starts, all of one placement; None without a start."""
    fitting = [schedule for schedule in starts if limit is None or _peak(schedule, costs) <= limit + _SAME]
    timed = sorted((float(time_actions(schedule, costs)[1].max()), index) for index, schedule in enumerate(fitting))
    best: tuple[float, Schedule] | None = None
    for _, index in timed[:_STARTS]:
        found = _Tabu(fitting[index], costs, limit, Random(seed)).run(rounds)
        if best is None or found[0] < best[0]:
            best = found
        if best[0] <= lower_bound(best[1], costs) * (1 + _SAME):
            break
    return best[1] if best else None


def _peak(schedule: Schedule, costs: Costs) -> float:
    start, end = time_actions(schedule, costs)
    return max(Timeline(schedule=schedule, costs=costs, start=start, end=end).peak_activations)


@dataclass(frozen=True, slots=True)
class _Move:
    """Take the action at one place of a rank's order to another."""

    rank: int
    source: int
    target: int


class _Tabu:
    """A search that goes to the best neighbour even uphill, and never straight back."""

    def __init__(self, schedule: Schedule, costs: Costs, limit: float | None, rng: Random) -> None:
        waits = waits_of(schedule, costs)
        self.schedule, self.rng = schedule, rng
        self.needs, self.travel = schedule.needs.tolist(), waits.travel.tolist()
        self.before, self.send = (waits.receive + waits.work).tolist(), waits.send.tolist()
        self.work = waits.work.tolist()
        self.kind, self.stage = schedule.kind.tolist(), schedule.stage.tolist()
        self.micro_batch = schedule.micro_batch.tolist()
        self.orders = [list(schedule.of_rank(rank)) for rank in range(schedule.ranks)]
        self.limit = float("inf") if limit is None else limit * schedule.stages / schedule.ranks + _SAME
        self.bound = lower_bound(schedule, costs)
        self.tabu: dict[tuple[int, int], int] = {}
        self.spent = 0

    def run(self, rounds: int) -> tuple[float, Schedule]:
        now = self._ends(self.orders)
        assert now is not None
        best, best_orders = max(now), [list(order) for order in self.orders]
        for round_ in range(rounds):
            if best <= self.bound * (1 + _SAME) or self.spent > _MOST_WORK:
                break
            chosen = self._best_move(now, best, round_)
            if chosen is None:
                break
            now = chosen
            if max(now) < best * (1 - _SAME):
                best, best_orders = max(now), [list(order) for order in self.orders]
        return best, self._schedule(best_orders)

    def _schedule(self, orders: list[list[int]]) -> Schedule:
        codes = np.concatenate(self.schedule.orders)
        rearranged: list[Integers] = [codes[np.asarray(order)] for order in orders]
        return prove("searched", self.schedule.num_micro_batches, self.schedule.placements, rearranged)

    def _best_move(self, now: list[float], best: float, round_: int) -> list[float] | None:
        """Make the best move that is allowed; the ends after it, or None where there is none."""
        found: tuple[float, float, _Move, list[float]] | None = None
        for move in self._moves(now):
            ends = self._after(move)
            if ends is None:
                continue
            makespan = max(ends)
            if self._is_tabu(move, round_) and makespan >= best * (1 - _SAME):
                continue
            # Among equals the one whose ranks end sooner, then chance.
            rating = makespan, sum(ends) + self.rng.random() * _SAME
            if found is None or rating < found[:2]:
                found = (*rating, move, ends)
        if found is None:
            return None
        self._forbid(found[2], round_)
        self._apply(found[2])
        return found[3]

    def _pairs(self, move: _Move) -> list[tuple[int, int]]:
        """(one, other) for each action that the moved one passes."""
        order = self.orders[move.rank]
        low, high = sorted((move.source, move.target))
        return [(order[move.source], order[place]) for place in range(low, high + 1) if place != move.source]

    def _is_tabu(self, move: _Move, round_: int) -> bool:
        return any(self.tabu.get(pair, 0) > round_ for pair in self._pairs(move))

    def _forbid(self, move: _Move, round_: int) -> None:
        for one, other in self._pairs(move):
            until = round_ + self.rng.randint(*_TENURE)
            self.tabu[one, other] = self.tabu[other, one] = until

    def _apply(self, move: _Move) -> None:
        order = self.orders[move.rank]
        order.insert(move.target, order.pop(move.source))

    def _after(self, move: _Move) -> list[float] | None:
        """The ends after a move; None where it deadlocks or holds too much."""
        self._apply(move)
        ends = self._ends(self.orders) if self._holds(move.rank) else None
        self._apply(_Move(move.rank, move.target, move.source))
        return ends

    def _holds(self, rank: int) -> bool:
        held = 0
        for index in self.orders[rank]:
            kind = self.kind[index]
            held += 1 if kind == FORWARD else 0 if kind == INPUT_GRADIENT else -1
            if held > self.limit:
                return False
        return True

    def _moves(self, ends: list[float]) -> Iterator[_Move]:
        """Swaps of neighbours in each block of the critical path, and moves to the ends of the block."""
        for rank, first, last in self._blocks(ends):
            for place in range(first, last):
                yield from self._legal(_Move(rank, place, place + 1))
            for place in range(first + 1, last):
                if place > first + 1:
                    yield from self._legal(_Move(rank, place, first))
                if place < last - 1:
                    yield from self._legal(_Move(rank, place, last))

    def _legal(self, move: _Move) -> Iterator[_Move]:
        """Nothing passes what it needs on its own rank, nor its like: equal actions keep their order."""
        one = self.orders[move.rank][move.source]
        for _, other in self._pairs(move):
            same_stage = self.stage[one] == self.stage[other]
            if same_stage and (self.kind[one] == self.kind[other] or self.micro_batch[one] == self.micro_batch[other]):
                return
        yield move

    def _blocks(self, ends: list[float]) -> Iterator[tuple[int, int, int]]:
        """(rank, first, last): stretches of the critical path on one rank, from the end to the start."""
        place = {index: (rank, at) for rank, order in enumerate(self.orders) for at, index in enumerate(order)}
        index = max(range(len(ends)), key=ends.__getitem__)
        slack = _SAME * ends[index]
        rank, last = place[index]
        while True:
            rank, at = place[index]
            start = ends[index] - self.before[index]
            before = self.orders[rank][at - 1] if at else -1
            needed = self.needs[index]
            if before >= 0 and ends[before] + self.send[before] >= start - slack:
                index = before
                continue
            if last > at:
                yield rank, at, last
            if needed < 0 or start <= slack:
                return
            index = needed
            last = place[index][1]

    def _ends(self, orders: list[list[int]]) -> list[float] | None:
        """When each action ends; None for a deadlock."""
        needs, travel, before, send = self.needs, self.travel, self.before, self.send
        ends = [-1.0] * len(needs)
        waiter = [-1] * len(needs)
        at, free = [0] * len(orders), [0.0] * len(orders)
        awake = list(range(len(orders)))
        left = len(needs)
        self.spent += left
        while awake:
            rank = awake.pop()
            order, place, time = orders[rank], at[rank], free[rank]
            while place < len(order):
                index = order[place]
                needed = needs[index]
                if needed >= 0:
                    if ends[needed] < 0:
                        waiter[needed] = rank
                        break
                    time = max(time, ends[needed] + travel[index])
                time += before[index]
                ends[index] = time
                time += send[index]
                left -= 1
                place += 1
                if waiter[index] >= 0:
                    awake.append(waiter[index])
            at[rank], free[rank] = place, time
        return None if left else ends
