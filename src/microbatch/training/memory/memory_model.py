"""What a step of some size will need, from fake tensors: nothing is run, nothing of the user's is touched."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode
from torch.optim import Optimizer

from microbatch.batch.example import map_tensors, tensors_in
from microbatch.batch.running import call, device_of
from microbatch.batch.split import batch_size_of, split
from microbatch.measure.memory import Prediction, Predictor, Running
from microbatch.measure.storages import bytes_of
from microbatch.training import gradients
from microbatch.training.passes import Passes
from microbatch.units import format_bytes


class MemoryModel:
    """Peaks of a training step by micro-batch size: one piece beside the gradients of those before it.

    Twins of model and optimizer on fake tensors take the steps. The optimizer's state is that after a first step.
    """

    def __init__(self, passes: Passes, optimizer: Optimizer) -> None:
        self._passes, self._optimizer = passes, optimizer
        self._device = device_of(passes.model)
        self._predictor = Predictor()
        self._twin: tuple[nn.Module, Optimizer] | None = None

    def peak(self, piece: Any, size: int) -> Prediction:
        """The peak with a piece of that size.

        Raises:
            Exception: whatever model and loss raise on fake tensors, as for control flow that depends on values.
        """
        return self._predictor.peak(lambda: self._running(piece), size)

    def _running(self, piece: Any) -> Running:
        if self._twin is None:
            with FakeCopyMode(self._predictor.mode):
                self._twin = copy.deepcopy((self._passes.model, self._optimizer))
            _as_new(self._twin[1], self._device)
        model, optimizer = self._twin
        fake = map_tensors((piece,), {}, lambda _, tensor: _fake(tensor, self._device))[0][0]
        example = tuple(tensors_in(fake))
        step = partial(self._step, model, optimizer, fake)
        return Running(step=step, model=model, optimizer=optimizer, example=example)

    def _step(self, model: nn.Module, optimizer: Optimizer, piece: Any) -> None:
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        gradients.widen(trained)
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)
        autocast = self._passes.autocast
        with torch.autocast(self._device.type, dtype=autocast) if autocast else nullcontext():
            output = self._output(model, piece)
            sums = _sums(self._passes.loss(output, piece))
        torch.autograd.backward(sums)
        del output, sums
        gradients.narrow(trained)
        optimizer.step()
        gradients.clear(trained)

    def _output(self, model: nn.Module, piece: Any) -> Any:
        if self._passes.forward is not None:
            return self._passes.forward(model, piece)
        return call(model, piece, list_of_samples=self._passes.list_of_samples)


def largest_piece(batch: Any, size: int, list_of_samples: bool | None) -> Any:
    """The piece of that size that needs most: the longest samples of a ragged list, else those around the longest."""
    number = batch_size_of(batch, list_of_samples=list_of_samples)
    size = min(size, number)
    if isinstance(batch, list) and list_of_samples:
        return sorted(batch, key=_elements, reverse=True)[:size]
    elements = [_elements(item) for item in split(batch, [1] * number, list_of_samples=list_of_samples)]
    start = min(elements.index(max(elements)), number - size)
    sizes = [start, size, number - size - start]
    pieces = split(batch, [part for part in sizes if part], list_of_samples=list_of_samples)
    return next(piece for index, piece in enumerate(pieces) if index == (1 if start else 0))


def contents(passes: Passes, optimizer: Optimizer, batch: Any) -> str:
    """What fills the memory of a step in pieces of one item, in words; called when that does not fit."""
    piece = largest_piece(batch, 1, passes.list_of_samples)
    try:
        parts = MemoryModel(passes, optimizer).peak(piece, 1).parts
    except Exception:  # a model that cannot run on fake tensors, or has just run out of memory: say what is known
        parts = _parts_now(passes.model, optimizer)
    names = {"activations": "activations of one item", "example": "the item itself"}
    listed = ", ".join(f"{names.get(name, name)} {format_bytes(count)}" for name, count in parts.items() if count)
    return f"A step of one item needs {format_bytes(sum(parts.values()))}: {listed}."


def _parts_now(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """All but activations; the optimizer's state as far as it exists."""
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return {
        "weights": bytes_of(model.parameters()),
        "gradients": sum(parameter.nbytes for parameter in trained),
        "optimizer": bytes_of(states),
        "buffers": bytes_of(model.buffers()),
    }


def _elements(sample: Any) -> int:
    if isinstance(sample, (str, bytes)):
        return len(sample)
    return sum(tensor.numel() for tensor in tensors_in((sample,)))


def _fake(tensor: Tensor, device: torch.device) -> Tensor:
    """Of the same shape, with a storage of its own: that of a piece is the whole batch's."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad)


def _sums(result: Any) -> list[Tensor]:
    pairs = result.values() if isinstance(result, Mapping) else [result]
    return [total for total, _ in pairs if isinstance(total, Tensor) and total.requires_grad]


def _as_new(optimizer: Optimizer, device: torch.device) -> None:
    """Without state, whose step counters have values that fake tensors do not know; as it works on the device."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        if device.type != "cpu" and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
