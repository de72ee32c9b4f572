"""How large pieces may become before memory ends, and what fills it when one item does not fit.

On a CPU Linux kills a process that takes too much: it does not raise. So once the process has grown notably, the peak
of larger pieces is predicted on fake tensors; where a model does not run on them, that growth stands for it.
"""

from __future__ import annotations

import copy
import logging
import resource
import sys
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode

from microbatch.batch.example import map_tensors, tensors_in
from microbatch.batch.split import take
from microbatch.measure.budget import memory_budget
from microbatch.measure.memory import MARGIN, Prediction, Predictor, Running
from microbatch.measure.storages import bytes_of
from microbatch.serving.offline.placing import Runner
from microbatch.units import format_bytes

logger = logging.getLogger(__name__)

FAR_AWAY = 3
"""The next piece may need twice what the process has grown by; below this part of the budget nothing is predicted."""


class MemoryCap:
    """What memory allows.

    Attributes:
        largest: tokens (or items) of a piece; None while that is not known.
        is_strict: the user has set a limit, which also the first piece has to keep.
        is_known: whether it was predicted, or that was tried.
    """

    def __init__(self, limit: int | None, device: torch.device) -> None:
        self.largest: int | None = None
        self.is_strict = limit is not None
        self.is_known = limit is None and device.type != "cpu"  # an accelerator raises, and nothing is lost
        self._limit, self._device = limit, device
        self._resident = psutil.Process().memory_info().rss

    def predict(self, runner: Runner, batch: Any, items: int, cost: int) -> None:
        """Find the largest size from one and from a few items of a batch that may run.

        Args:
            items: in the batch.
            cost: tokens (or items) of the batch, padding included.
        """
        if self.is_known:
            return
        budget, rise = memory_budget(self._limit, self._device)[0], max(0, _highest() - self._resident)
        if not self.is_strict and rise * FAR_AWAY < budget:
            return  # a size of twice as much is safe, and a prediction takes longer than a small piece
        self.is_known = True
        try:
            fixed, slope = _line(runner, batch, items)
            if self._limit is None:
                budget += _held(runner.model)  # what is available does not count what is held already
        except Exception as error:
            logger.info("Memory cannot be predicted (%s: %s).", type(error).__name__, error)
            fixed, slope = 0.0, rise / items
        if slope > 0:
            self.largest = max(1, int((budget * (1 - MARGIN) - fixed) / slope * cost / items))

    def contents(self, runner: Runner, batch: Any) -> str:
        """What fills the memory of one item, in words."""
        try:
            parts = _peak(Predictor(), runner, batch, 1).parts
        except Exception:  # it cannot run on fake tensors, or has just run out of memory: say what is known
            parts = {"weights and buffers": _held(runner.model)}
        names = {"activations": "activations of one item", "example": "the item itself"}
        listed = ", ".join(f"{names.get(name, name)} {format_bytes(count)}" for name, count in parts.items() if count)
        return f"It needs {listed}." if listed else ""


def _line(runner: Runner, batch: Any, items: int) -> tuple[float, float]:
    """Fixed bytes and bytes per item."""
    predictor = Predictor()
    large = _peak(predictor, runner, batch, items).peak_bytes
    few = max(1, items // 2)
    if few == items:
        return float(_held(runner.model)), float(large - _held(runner.model))
    small = _peak(predictor, runner, take(batch, range(few)), few).peak_bytes
    slope = (large - small) / (items - few)
    return large - slope * items, slope


def _peak(predictor: Predictor, runner: Runner, batch: Any, size: int) -> Prediction:
    def build() -> Running:
        model = _twin(predictor, runner.model)
        fake = map_tensors((batch,), {}, lambda _, tensor: _fake(tensor, runner.device))[0][0]
        own = Runner(model=model, forward=runner.forward, device=runner.device, autocast=runner.autocast)
        return Running(step=lambda: own.run(fake), model=model, example=tuple(tensors_in(fake)))

    return predictor.peak(build, size)


def _twin(predictor: Predictor, model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TypeError(f"a {type(model).__name__} is no module")
    with FakeCopyMode(predictor.mode):
        twin: nn.Module = copy.deepcopy(getattr(model, "_orig_mod", model))
    return twin


def _fake(tensor: Tensor, device: torch.device) -> Tensor:
    """Of the same shape, with a storage of its own: that of a piece is the whole data's."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _held(model: Any) -> int:
    return bytes_of([*model.parameters(), *model.buffers()]) if isinstance(model, nn.Module) else 0


def _highest() -> int:
    """Most bytes that the process has had resident."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
