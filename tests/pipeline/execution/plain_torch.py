"""The same steps with torch.distributed.pipelining alone, called as its documentation shows.

Only what ends by itself: a batch that does not divide, or another length at the next step, ends in a lost connection
and would take the process group with it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional

from tests.pipeline.execution.jobs import chain, points, sentences
from tests.pipeline.execution.situations import over_ranks

SCHEDULES_OF_TORCH: dict[str, int] = {
    "ScheduleGPipe": 1, "Schedule1F1B": 1, "ScheduleInterleaved1F1B": 2, "ScheduleLoopedBFS": 2,
    "ScheduleInterleavedZeroBubble": 2, "ScheduleZBVZeroBubble": 2, "ScheduleDualPipeV": 2,
}  # fmt: skip
"""Classes with their stages per rank."""

PER_RANK = 2
"""Micro-batches for each rank: as many as DualPipeV has stages, which it needs."""
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


class Plain:
    """A model of layers in a row, on torch's own stages."""

    def __init__(self, name: str, layers: nn.Sequential, loss: Any, **options: Any) -> None:
        ranks, rank, chunks = dist.get_world_size(), dist.get_rank(), SCHEDULES_OF_TORCH[name]
        stages = ranks * chunks
        edges = [len(layers) * stage // stages for stage in range(stages + 1)]
        mine = [rank] if chunks == 1 else [rank, stages - 1 - rank] if name in V_SHAPED else [rank, rank + ranks]
        self.first, self.last = 0 in mine, stages - 1 in mine
        spans = list(pairwise(edges))
        self.modules = {stage: _slice(layers, *spans[stage]) for stage in mine}
        made = [PipelineStage(module, stage, stages, torch.device("cpu")) for stage, module in self.modules.items()]
        kind = getattr(schedules, name)
        self.schedule = kind(made[0] if chunks == 1 else made, PER_RANK * ranks, loss_fn=loss, **options)

    def step(self, x: Any, y: Tensor, **keywords: Any) -> None:
        arguments = (x,) if self.first else ()
        self.schedule.step(*arguments, target=y if self.last else None, **keywords)

    def gradients(self) -> dict[str, Tensor]:
        found = {}
        for module in self.modules.values():
            found.update({name: p.grad for name, p in module.named_parameters() if p.grad is not None})
        return found


def _slice(layers: nn.Sequential, first: int, last: int) -> nn.Sequential:
    part = nn.Sequential()
    for name, layer in list(layers.named_children())[first:last]:
        part.add_module(name, layer)
    return part


def off(exact: nn.Module, found: dict[str, Tensor]) -> float:
    wanted = {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}
    scale = max(float(gradient.abs().max()) for gradient in wanted.values())
    return over_ranks(max((float((wanted[name] - g).abs().max()) / scale for name, g in found.items()), default=0.0))


def mean(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target)


def total(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, reduction="sum")


def _compared(schedule: str, dtype: torch.dtype, loss: Any, steps: int = 1) -> float:
    model, exact = _plain_chain(dtype), _plain_chain(dtype)
    batch = points(16, dtype=dtype)
    pipe = Plain(schedule, model, loss)
    for _ in range(steps):
        pipe.step(batch["x"], batch["y"])
        loss(exact(batch["x"]), batch["y"]).backward()
    return off(exact, pipe.gradients())


def _plain_chain(dtype: torch.dtype) -> nn.Sequential:
    model = chain(dtype)
    return nn.Sequential(*(nn.Tanh() if isinstance(layer, nn.ReLU) else layer for layer in model))


def mean_loss(schedule: str, dtype: torch.dtype) -> float:
    return _compared(schedule, dtype, mean)


def sum_loss(schedule: str, dtype: torch.dtype) -> float:
    return _compared(schedule, dtype, total)


def two_steps(schedule: str, dtype: torch.dtype) -> float:
    """Gradients of two steps without zero_grad in between."""
    return _compared(schedule, dtype, mean, steps=2)


def unequal_weights(schedule: str, dtype: torch.dtype) -> float:
    """A mean over targets that are not -100, of which the micro-batches have different numbers."""
    model, exact = _plain_chain(dtype), _plain_chain(dtype)
    batch = points(16, dtype=dtype)
    batch["y"][:5] = -100
    batch["y"][:4:2] = 1
    pipe = Plain(schedule, model, mean)
    pipe.step(batch["x"], batch["y"])
    mean(exact(batch["x"]), batch["y"]).backward()
    return off(exact, pipe.gradients())


def tied_weights(schedule: str, dtype: torch.dtype) -> float:
    """The first and the last of the inner layers share their weight."""
    model, exact = _plain_chain(dtype), _plain_chain(dtype)
    for one in (model, exact):
        one[6].weight = one[2].weight
    batch = points(16, dtype=dtype)
    pipe = Plain(schedule, model, mean)
    pipe.step(batch["x"], batch["y"])
    mean(exact(batch["x"]), batch["y"]).backward()
    found = pipe.gradients()
    if "6.weight" in found:
        found["2.weight"] = found.pop("6.weight")
    return off(exact, found)


class Masked(nn.Module):
    """A layer that needs to know which entries count."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        kept: Tensor = torch.tanh(self.layer(hidden))
        return kept if mask is None else kept * mask


class _Row(nn.Sequential):
    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self:
            hidden = layer(hidden, mask)
        return hidden


def mask_on_the_first_rank(schedule: str, dtype: torch.dtype) -> float:
    """The mask goes to ``step`` beside the input, where the input goes."""
    torch.manual_seed(0)
    model = _Row(*(Masked(6) for _ in range(8))).to(dtype)
    exact = copy.deepcopy(model)
    batch = points(16, dtype=dtype)
    mask = (sentences(16)["attention_mask"][:, :6]).to(dtype)
    pipe = Plain(schedule, model, mean)
    for module in pipe.modules.values():
        module.__class__ = _Row
    keywords = {"mask": mask} if pipe.first else {}
    pipe.step(batch["x"], batch["y"], **keywords)
    mean(exact(batch["x"], mask), batch["y"]).backward()
    return off(exact, pipe.gradients())


def clipped_by_stage(schedule: str, dtype: torch.dtype) -> float:
    """``clip_grad_norm_`` of what each rank holds."""
    model, exact = _plain_chain(dtype), _plain_chain(dtype)
    batch = points(16, dtype=dtype)
    pipe = Plain(schedule, model, mean)
    pipe.step(batch["x"], batch["y"])
    mean(exact(batch["x"]), batch["y"]).backward()
    own = [p for module in pipe.modules.values() for p in module.parameters()]
    for parameters in (own, list(exact.parameters())):
        nn.utils.clip_grad_norm_(parameters, 0.1)
    return off(exact, pipe.gradients())


PLAIN: dict[str, Callable[[str, torch.dtype], float]] = {
    run.__name__: run
    for run in (mean_loss, sum_loss, two_steps, unequal_weights, tied_weights, mask_on_the_first_rank, clipped_by_stage)
}
