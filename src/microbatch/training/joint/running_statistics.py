"""Running statistics of batch norms, updated once per step with the statistics of the whole batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from microbatch.training.joint.batch_norm import Moments
from microbatch.training.joint.cuts import Call
from microbatch.training.memory.snapshot import Snapshot


class RunningStatistics:
    """The buffers of a model in one step. Buffers are told to other ranks by their places in the model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._buffers = list(model.buffers())
        self._places = {id(buffer): place for place, buffer in enumerate(self._buffers)}
        self._versions = {id(buffer): buffer._version for buffer in self._buffers}

    def told(self, call: Call) -> dict[str, Any]:
        """What a rank without data needs to follow."""
        places = [self._places.get(id(buffer)) for buffer in (call.running_mean, call.running_var)]
        return {"buffers": places, "momentum": call.momentum}

    def update(self, call: Call, whole: Moments) -> None:
        """As a batch norm does it that is given the whole batch."""
        _update(call.running_mean, call.running_var, call.momentum, whole)

    def follow(self, told: dict[str, Any], whole: Moments) -> None:
        """The same on a rank without data, where no layer has run."""
        mean, variance = (None if place is None else self._buffers[place] for place in told["buffers"])
        for module in self._model.modules():
            counter = getattr(module, "num_batches_tracked", None)
            if mean is not None and getattr(module, "running_mean", None) is mean and isinstance(counter, Tensor):
                counter.add_(1)
        _update(mean, variance, told["momentum"], whole)

    def changed(self, random: dict[str, Any]) -> Snapshot:
        """The buffers that changed since the beginning, as they are now, with a random state to go on from."""
        now = [
            (module, name, buffer, buffer.detach().clone())
            for module in self._model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and self._versions.get(id(buffer)) != buffer._version
        ]
        return Snapshot(random, tuple(now))


def _update(mean: Tensor | None, variance: Tensor | None, momentum: float, whole: Moments) -> None:
    """r ← (1 − m)·r + m·s, with the variance that divides by N − 1."""
    unbiased = whole.variance * (whole.count / (whole.count - 1))
    with torch.no_grad():
        for running, new in ((mean, whole.mean), (variance, unbiased)):
            if running is not None:
                running.copy_(new.to(running) * momentum + running * (1 - momentum))
