"""``micro_batch_size="auto"`` where ranks go through every layer together: measured on all of them, agreed by all.

Out of memory on one rank costs every rank its pass, so sizes are planned. Each rank measures its own peak at two small
sizes; the line through both, what an optimizer without state will still need, and a margin tell the largest size that
fits on every rank. The search for the fastest then goes no further, with the slowest rank's time for each size.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from microbatch.batch.oom import drop_frames, release
from microbatch.batch.running import device_of, uncompiled
from microbatch.errors import RankOutOfMemory
from microbatch.measure.memory import MARGIN, measure_peak_bytes
from microbatch.measure.storages import bytes_of
from microbatch.measure.timer import synchronize
from microbatch.training.memory.micro_batch_size import Choice, budget_of, reason_of
from microbatch.training.memory.size_search import Probe, best_size, first_predictions, is_telling, next_size
from microbatch.training.passes import Passes
from microbatch.training.ranks.sharded import Sharded

logger = logging.getLogger(__name__)

Said = list[dict[str, Any]]


def choose_together(
    passes: Passes, optimizer: Optimizer, batch: Any, items: int, memory_limit: int | None
) -> Choice | None:
    """The size with the fastest step among those that fit on every rank; None where no rank has data.

    Every rank calls it. Gradients are left behind; the caller empties them and puts buffers and random state back.

    Args:
        items: in this rank's batch.
    """
    with uncompiled(passes.model) as model:
        return _Search(replace(passes, model=model), optimizer, batch, items, memory_limit).choice()


class _Search:
    def __init__(self, passes: Passes, optimizer: Optimizer, batch: Any, items: int, memory_limit: int | None) -> None:
        assert isinstance(passes.ranks, Sharded)
        self._passes, self._ranks, self._optimizer = passes, passes.ranks, optimizer
        self._batch, self._items = batch, items
        self._device = device_of(passes.model)
        self._memory_limit = memory_limit

    def choice(self) -> Choice | None:
        most = max(one["items"] for one in self._ranks.share({"items": self._items}))
        if not most:
            return None
        self._piece(1)
        self._passes.idle(before=True)  # shows the order of the collectives, and leaves gradients
        budget, source = budget_of(bytes_of(self._held()), self._device, self._memory_limit)
        largest, peaks = self._largest(most, budget * (1 - MARGIN))
        probes = self._timed(most, largest)
        choice = Choice(
            micro_batch_size=best_size(most, probes),
            reason=reason_of(most, probes, None, largest, budget, source),
            probes=tuple(probes),
            predicted=tuple(peaks.items()),
            largest=largest,
            budget_bytes=budget,
            budget_source=source,
        )
        logger.info("Micro-batch size %d of %d on all ranks: %s.", choice.micro_batch_size, most, choice.reason)
        return choice

    def _piece(self, size: int) -> Any:
        return self._ranks.probe_piece(self._batch, self._items, size, self._passes.list_of_samples)

    def _largest(self, most: int, budget: float) -> tuple[int, dict[int, int]]:
        """What memory allows on every rank, and this rank's measured peaks; 1 where the smallest size failed."""
        peaks: dict[int, int] = {}
        for size in first_predictions(most):
            piece = self._piece(size)
            if self._together(lambda piece=piece, size=size: peaks.update({size: self._peak(piece)})) is None:  # type: ignore[misc]
                return min(peaks, default=1), peaks
        needed = {min(size, self._items or size): peak + state_bytes(self._optimizer) for size, peak in peaks.items()}
        said = self._ranks.share({"largest": _on_the_line(needed, most, budget)})
        return max(1, min(one["largest"] for one in said)), peaks

    def _timed(self, most: int, largest: int) -> list[Probe]:
        probes: list[Probe] = []
        while (size := next_size(most, probes, largest, passes_before=3)) is not None:
            piece = self._piece(size)
            said = self._together(lambda piece=piece: {"seconds": self._seconds(piece)})  # type: ignore[misc]
            seconds = None if said is None else max(one["seconds"] for one in said)
            probes.append(Probe(size, seconds, counts=is_telling(probes, size, seconds)))
        return probes

    def _together(self, run: Callable[[], dict[str, Any] | None]) -> Said | None:
        """What every rank says after a run; None where it ran out of memory on one."""
        try:
            return self._ranks.share(run() or {})
        except RankOutOfMemory as error:  # said on every rank alike
            drop_frames(error)
        release(self._device)
        return None

    def _peak(self, piece: Any) -> int:
        return measure_peak_bytes(lambda: self._passes.probe(piece), self._device, held=self._held())

    def _seconds(self, piece: Any) -> float:
        synchronize(self._device)
        start = time.perf_counter()
        self._passes.probe(piece)
        synchronize(self._device)
        return time.perf_counter() - start

    def _held(self) -> list[Tensor]:
        """Every tensor of this rank that is alive between pieces."""
        parameters = list(self._passes.model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        state = (value for one in self._optimizer.state.values() for value in one.values())
        return local([*parameters, *self._passes.model.buffers(), *gradients, *state])


def local(values: Iterable[object]) -> list[Tensor]:
    """This rank's shards of what is sharded."""
    return [v.to_local() if isinstance(v, DTensor) else v for v in values if isinstance(v, Tensor)]


def _on_the_line(peaks: dict[int, int], most: int, budget: float) -> int:
    """The largest size whose peak lies within the budget, on the line through the peaks; `most` where all do."""
    small, large = min(peaks), max(peaks)
    slope = (peaks[large] - peaks[small]) / (large - small) if large > small else 0.0
    if peaks[large] > budget and slope <= 0:
        return 1
    return most if slope <= 0 else min(most, max(1, large + int((budget - peaks[large]) // slope)))


def state_bytes(optimizer: Optimizer) -> int:
    """What the optimizer's state will take once there is one, from a step on fake tensors of this rank's shards."""
    if optimizer.state:
        return 0
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    with FakeTensorMode(allow_non_fake_inputs=True):
        twin.param_groups = [group | {"params": _twins(group["params"])} for group in optimizer.param_groups]
        twin.step()
        return bytes_of(local(value for state in twin.state.values() for value in state.values()))


def _twins(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    twins = [nn.Parameter(torch.empty_like(shard)) for shard in local(p.detach() for p in parameters)]
    for twin in twins:
        twin.grad = torch.zeros_like(twin)
    return twins
