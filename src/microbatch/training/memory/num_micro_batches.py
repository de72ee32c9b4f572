"""``num_micro_batches="auto"``: the number with the shortest step, by costs that are measured at the first batch.

The pipeline runs a few micro-batches of each of some sizes, the smallest first: what its actions and messages take and
what its forwards keep is measured, and a whole step of so many pieces simulated with that. A size is run only where
what the smaller one kept says that it fits. All ranks decide alike, from what all have said; of replicas the slowest
counts. Gradients are cleared, buffers and random state put back.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from microbatch.batch.pieces import Pieces
from microbatch.batch.running import device_of
from microbatch.batch.split import split
from microbatch.measure.memory import MARGIN
from microbatch.measure.storages import bytes_of
from microbatch.pipeline.costs import Costs
from microbatch.pipeline.execution.measuring import timeline_of
from microbatch.pipeline.execution.pipeline import Pipeline
from microbatch.pipeline.execution.saved import counting_saved
from microbatch.pipeline.measured import measured_costs
from microbatch.pipeline.num_micro_batches import (
    IN_A_TRIAL,
    MOST_PER_RANK,
    Tried,
    best,
    is_over,
    larger,
    numbers,
    reason,
)
from microbatch.pipeline.num_micro_batches import held as held_at_most
from microbatch.pipeline.placement import stages_of
from microbatch.pipeline.simulate import simulate
from microbatch.pipeline.timeline import Timeline
from microbatch.sizes import BatchSizes
from microbatch.training.memory.micro_batch_size import Choice, budget_of
from microbatch.training.memory.size_search import Probe
from microbatch.training.memory.snapshot import Snapshot
from microbatch.training.ranks.pipelined import Pipelined
from microbatch.training.ranks.sharded_size import local, state_bytes

if TYPE_CHECKING:
    from microbatch.training.step import TrainStep

logger = logging.getLogger(__name__)

LEAST = 2
"""Items in a piece that is run before anything is known: a batch norm needs two."""
REPEATS = 2
"""Trials of a size that are timed, after one that is not."""


def choose_number(step: TrainStep, batch: Any) -> Choice | None:
    """The number of micro-batches of a pipeline's step; it is used from then on. Every rank calls it.

    Returns:
        None where it is given, by the user or by pieces, and where no rank has data yet.

    Raises:
        DoesNotFit: the smallest pieces hold more than there is.
    """
    ranks = step._ranks
    assert isinstance(ranks, Pipelined)
    if not ranks.is_open:
        return None
    choice = _Search(step, batch).choice()
    if choice is not None and choice.num_micro_batches is not None:
        ranks.wanted, ranks.largest = choice.num_micro_batches, choice.largest
        logger.info("%s micro-batches: %s.", choice.num_micro_batches, choice.reason)
    return choice


class _Search:
    def __init__(self, step: TrainStep, batch: Any) -> None:
        assert isinstance(step.model, Pipeline) and isinstance(step._ranks, Pipelined)
        self._step, self._pipe, self._ranks, self._batch = step, step.model, step._ranks, batch
        self._replica = self._pipe.layout.replica
        self._items = 0

    def choice(self) -> Choice | None:
        items = self._agreed_items()
        if not items:
            return None
        limit, source = self._room()
        tried: list[Tried] = []
        costs: Costs | None = None
        for number in numbers(items, self._pipe.ranks, self._most(items)):
            size = -(-items // number)
            if is_over(tried):
                break
            if costs is not None:
                guess = self._judged(number, size, larger(costs, size / tried[-1].micro_batch_size))
                if not guess.fits:
                    tried.append(guess)
                    break
            costs = self._measured(size, number)
            tried.append(self._judged(number, size, costs))
        chosen = best(tried, limit, source)
        return Choice(
            micro_batch_size=chosen.micro_batch_size,
            num_micro_batches=chosen.num_micro_batches,
            reason=reason(tried, chosen, limit, source),
            probes=tuple(Probe(one.micro_batch_size, one.seconds, one.peak_bytes) for one in tried),
            largest=max(one.micro_batch_size for one in tried if one.fits),
            budget_bytes=limit,
            budget_source=source,
        )

    def _most(self, items: int) -> int:
        """Micro-batches to begin with: more than pay anything where only so small pieces fit."""
        most = min(items, MOST_PER_RANK * self._pipe.ranks)
        if most == items:
            return most
        least = self._measured(LEAST, -(-items // LEAST))
        while most < items:
            size = -(-items // most)
            if size <= LEAST or self._judged(most, size, larger(least, size / LEAST)).fits:
                break
            most = min(items, 2 * most)
        return most

    def _agreed_items(self) -> int:
        """Of the smallest replica that has any; 0 where none has, or where somebody cut a batch already."""
        with self._ranks.together():
            given = isinstance(self._batch, Pieces)
            own = 0 if given else self._step._size_of(self._batch)
            said = self._ranks.share({"replica": self._replica, "items": own, "given": given})
        if any(one["given"] for one in said):
            return 0
        found: dict[int, int] = {}
        for one in said:
            found[one["replica"]] = max(found.get(one["replica"], 0), one["items"])
        self._items = found[self._replica]
        return min((items for items in found.values() if items), default=0)

    def _room(self) -> tuple[int, str]:
        """What each rank of this pipeline may hold, and what it always holds; the least room and who says so."""
        device, optimizer = device_of(self._pipe), self._step.optimizer
        weights = list(self._pipe.parameters())
        state = (value for one in optimizer.state.values() for value in one.values())
        held = [*weights, *self._pipe.buffers(), *state]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        always = bytes_of(local(held))
        always += bytes_of(local(weight for weight in weights if weight.requires_grad)) + state_bytes(optimizer)
        now = bytes_of(local([*held, *gradients]))  # what is to come is not held yet
        budget, source = budget_of(now, device, self._step.memory_limit or self._pipe.memory_limit)
        with self._ranks.together():
            said = self._ranks.share({"place": [self._replica, self._pipe.rank], "always": always,
                                      "budget": budget, "source": source})  # fmt: skip
        mine = {one["place"][1]: one for one in said if one["place"][0] == self._replica}
        self._limits = [int(mine[rank]["budget"] * (1 - MARGIN)) for rank in range(self._pipe.ranks)]
        firsts = [stages_of(self._pipe.placement, rank)[0] for rank in range(self._pipe.ranks)]
        self._always = [0] * len(self._pipe.placement)
        for rank, stage in enumerate(firsts):
            self._always[stage] = mine[rank]["always"]
        least = min(said, key=lambda one: int(one["budget"]))
        return least["budget"], least["source"]

    def _measured(self, size: int, number: int) -> Costs:
        """What the stages of this pipeline take and keep with pieces of a size; costs of nothing without data."""
        count = min(number, IN_A_TRIAL * self._pipe.ranks)
        with counting_saved(self._pipe) as kept:
            self._trial(size, count)
        timelines = [self._trial(size, count) for _ in range(REPEATS)]
        with self._ranks.together():
            said = self._ranks.share({"replica": self._replica, "kept": list(kept.items())})
        if not self._items:
            return Costs(forward=0.0, input_gradient=0.0, weight_gradient=0.0, activation_bytes=0.0)
        every = {stage: size for one in said if one["replica"] == self._replica for stage, size in one["kept"]}
        stages = range(len(self._pipe.placement))
        return replace(
            measured_costs(*(timeline for timeline in timelines if timeline is not None)),
            activation_bytes=[every[stage] for stage in stages], weight_bytes=self._always,
        )  # fmt: skip

    def _judged(self, number: int, size: int, costs: Costs) -> Tried:
        """A step of so many pieces, as slow as on the slowest replica, and in memory where there is least room."""
        schedule = self._pipe.schedule_of(number)
        peak, fits = held_at_most(schedule, costs, self._limits)
        seconds = simulate(schedule, costs).makespan_with_optimizer
        with self._ranks.together():
            said = self._ranks.share({"seconds": seconds, "peak": peak, "fits": fits})
        return Tried(
            num_micro_batches=number, micro_batch_size=size, seconds=max(one["seconds"] for one in said),
            peak_bytes=max(one["peak"] for one in said), fits=all(one["fits"] for one in said),
        )  # fmt: skip

    def _trial(self, size: int, count: int) -> Timeline | None:
        """Forward and backward of so many pieces; None without data."""
        step = self._step
        start = Snapshot.take(self._pipe, device_of(self._pipe))
        with self._ranks.together(), step._whole.around(self._pipe), self._cut_into(count):
            part = self._part(min(self._items, size * count))
            items = step._size_of(part)
            try:
                step._gradients(part, BatchSizes(items, max(items, 1), 1 if items else 0), start)
            finally:
                step._undo(start)
        return timeline_of(self._pipe) if self._items else None

    def _cut_into(self, count: int) -> AbstractContextManager[object]:
        return self._ranks.cut_into(count) if self._items else nullcontext()

    def _part(self, items: int) -> Any:
        """The first items of the batch, where this rank has it."""
        own = self._step._size_of(self._batch)
        if not own or own == items:
            return self._batch
        return next(iter(split(self._batch, [items, own - items], list_of_samples=self._step._list_of_samples)))
