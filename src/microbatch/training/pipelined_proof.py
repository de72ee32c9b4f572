"""Proof that a pipeline's step is the step of one process: what `TrainStep.check` answers for a `Pipeline`.

The first rank puts the whole model together, in float64 on the CPU, and makes one forward and backward over the whole
batch there. The pipeline's own gradients, in its schedule and its dtype, are compared with that stage by stage. Chance
is put aside on both sides.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from microbatch.batch.exactness import TOLERANCE, ExactnessReport, compare_gradients
from microbatch.batch.quiet import Quiet, seeded
from microbatch.batch.running import call, device_of
from microbatch.batch.subject import Subject, not_compiled
from microbatch.pipeline.execution.pipeline import Pipeline
from microbatch.sizes import BatchSizes
from microbatch.training.exact_copy import Gradients, named_gradients
from microbatch.training.memory.snapshot import Snapshot
from microbatch.training.normalise import Total, pairs_of
from microbatch.training.proof import NAMES, agreed, gradients_kept, working_dtype
from microbatch.training.ranks.pipelined import Pipelined

if TYPE_CHECKING:
    from microbatch.training.step import TrainStep


def prove_pipelined(step: TrainStep, batch: Any) -> ExactnessReport:
    """See the module, and `TrainStep.check`."""
    own = copy.copy(step)
    pipe, ranks = own.model, own._ranks
    assert isinstance(pipe, Pipeline) and isinstance(ranks, Pipelined)
    with gradients_kept(own), ranks.together():
        pieces, totals, sizes = _of_the_step(own, batch)
        whole = ranks.of_all(batch)
        every: list[Any] = [None] * pipe.ranks
        dist.all_gather_object(every, pieces, group=pipe.group)
        model = pipe.whole()
        exact = {} if model is None else _of_one_process(own, model, whole, totals)
        exact = {name: ranks.over_replicas(gradient) for name, gradient in exact.items()}
        if model is None:
            report = ExactnessReport(exact=True, largest_difference=None)
        else:
            report = _compared(own, pipe, exact, {name: g for one in every for name, g in one.items()}, sizes)
        return agreed(own, report)


def _of_the_step(own: TrainStep, batch: Any) -> tuple[Gradients, dict[str, Total], BatchSizes]:
    """The step's gradients, sums and weights; buffers and random state are put back."""
    start = Snapshot.take(own.model, device_of(own.model))
    items = own._size_of(batch)
    sizes = BatchSizes(items, max(items, 1), 1 if items else 0)
    try:
        with own._whole.around(own.model), seeded(), not_compiled(), Quiet(wide=False):
            done = own._gradients(own._cutting(batch, items, start).batch, sizes, start)
            own._multiplied(done)
        return named_gradients(own), done.totals, done.sizes
    finally:
        own._undo(start)


def _of_one_process(own: TrainStep, model: torch.nn.Module, batch: Any, totals: dict[str, Total]) -> dict[str, Tensor]:
    """One forward and backward over the batch of this pipeline, with the weights of all."""
    subject = Subject(model, None, "as it is", torch.float64)
    placed = subject.placed(batch)
    with subject.quietly(), torch.enable_grad():
        if own.forward is not None:
            output = own.forward(subject.model, placed)
        else:
            output = call(subject.model, placed, list_of_samples=own._list_of_samples)
        pairs = pairs_of(own.loss(output, placed))
        terms = [pair.sum / totals[name].weight for name, pair in pairs.items() if pair.weight]
        if terms:
            torch.stack(terms).sum().backward()
    trained = {name: p for name, p in subject.model.named_parameters() if p.requires_grad}
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}


def _compared(
    own: TrainStep, pipe: Pipeline, exact: dict[str, Tensor], found: Gradients, sizes: BatchSizes
) -> ExactnessReport:
    dtype = NAMES[working_dtype(own)]
    report = compare_gradients(
        exact, {name: found.get(name) for name in exact}, tolerance=TOLERANCE[dtype],
        batch_size=sizes.global_batch_size, pieces=sizes.pieces,
    )  # fmt: skip
    scale = max((float(gradient.abs().max()) for gradient in exact.values() if gradient.numel()), default=0.0) or 1.0
    notes = [_of_stage(pipe, stage, exact, found, scale) for stage in range(len(pipe.stage_names))]
    return replace(report, dtype=dtype, notes=tuple(notes))


def _of_stage(pipe: Pipeline, stage: int, exact: dict[str, Tensor], found: Gradients, scale: float) -> str:
    """How far a stage's gradients are off."""
    names = [name for name in pipe.parameters_of(stage) if name in exact]
    off = max((_gap(exact[name], found.get(name)) / scale for name in names), default=0.0)
    units = pipe.stage_names[stage]
    span = units[0] if len(units) == 1 else f"{units[0]} to {units[-1]}"
    return f"Stage {stage} on rank {pipe.placement[stage]} ({span}) is {off:.2g} off one process."


def _gap(exact: Tensor, found: Tensor | None) -> float:
    return float((exact if found is None else exact - found).abs().max()) if exact.numel() else 0.0
