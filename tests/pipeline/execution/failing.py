"""Pipelines whose ranks fail at a chosen place: what each rank of a test does, and the error that it ends with."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import microbatch
from microbatch.pipeline.execution.pipeline import Pipeline

MICRO_BATCHES, BROKEN = 4, 2
"""Of a step, and the one that breaks."""

PLACES = {
    "forward of stage 1": (1, "forward of stage 1, micro-batch 2"),
    "backward of stage 0": (0, "backward of stage 0, micro-batch 2"),
    "loss": (1, "forward of stage 1, micro-batch 2"),
    "optimizer": (0, "update"),
}
"""Where something is raised: the rank, and what the others are told."""

_armed = ""
_calls = 0


class Broken(Exception):
    """What the user's code raises."""


def _breaks(place: str) -> None:
    """Raise, or die, at the third micro-batch of the place that is armed."""
    global _calls
    if not _armed.startswith(place):
        return
    _calls += 1
    if _calls == BROKEN + 1:
        if _armed.endswith("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        raise Broken(f"no luck in the {place}")


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, place: str) -> Tensor:
        ctx.place = place
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        _breaks(ctx.place)
        return gradients[0], None


class Layer(nn.Module):
    """One of two layers; it becomes the stage of its number."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage, self.linear = stage, nn.Linear(8, 8)

    def forward(self, values: Tensor) -> Tensor:
        _breaks(f"forward of stage {self.stage}")
        breaking: Any = _InBackward.apply
        result: Tensor = breaking(self.linear(values), f"backward of stage {self.stage}")
        return result


class Optimizer(torch.optim.SGD):
    """One that may raise."""

    def step(self, closure: Any = None) -> Any:
        if _armed == "optimizer" and dist.get_rank() == PLACES["optimizer"][0]:
            raise Broken("no luck in the optimizer")
        return super().step(closure)


def loss(output: Tensor, _batch: Any) -> tuple[Tensor, int]:
    """The squares."""
    _breaks("loss")
    return output.square().sum(), len(output)


def ends_with(place: str, schedule: str = "one_f_one_b") -> dict[str, Any]:
    """Steps until one fails: the error of this rank, and when it came."""
    global _armed, _calls
    torch.manual_seed(0)
    batch = torch.randn(2 * MICRO_BATCHES, 8)
    pipe = Pipeline(nn.Sequential(Layer(0), Layer(1)), batch, schedule=schedule, num_micro_batches=MICRO_BATCHES)
    step = microbatch.TrainStep(pipe, Optimizer(pipe.parameters(), lr=0.1), loss)
    step(batch)
    dist.barrier()
    _armed, _calls = place, 0
    try:
        for _ in range(3):
            step(batch)
    except Exception as error:
        return {"type": type(error).__name__, "text": str(error), "notes": getattr(error, "__notes__", []),
                "at": time.monotonic()}  # fmt: skip
    finally:
        _armed = ""
    return {"type": "", "text": "", "notes": [], "at": time.monotonic()}


def fails_everywhere(folder: str) -> dict[str, dict[str, Any]]:
    """Every place, one after the other, each in a process group of its own; at last an error that nobody catches."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {}
    for number, place in enumerate(PLACES):
        dist.destroy_process_group()
        meeting = f"file://{Path(folder) / f'meeting {number}'}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=40))
        found[place] = ends_with(place)
    return found


def is_killed(folder: str) -> None:
    """Rank 1 dies in the middle of a backward; rank 0 leaves word of what it then sees."""
    found = ends_with("backward of stage 1, killed")
    (Path(folder) / f"rank {dist.get_rank()}").write_text(f"{found['type']}: {found['text']}")


def raises() -> None:
    """An error of rank 1 alone that nobody catches."""
    if dist.get_rank() == 1:
        raise Broken("no luck at all")
    time.sleep(60)
