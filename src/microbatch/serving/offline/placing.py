"""A model made ready for inference and left as it was found; outputs moved to where they are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from microbatch.batch.members import is_leaf, rebuilt
from microbatch.batch.running import Forward, call, uncompiled
from microbatch.batch.split import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """One call of a model for its outputs.

    Attributes:
        model: a module, or any function of a batch.
        forward: None for `microbatch.batch.running.call`.
        device: where it runs.
        autocast: dtype, or None.
    """

    model: Callable[..., Any]
    forward: Forward | None
    device: torch.device
    autocast: torch.dtype | None

    def run(self, batch: Any, *, eager: bool = False) -> Any:
        """The model's outputs, on its device.

        Args:
            eager: not through ``torch.compile``, where the model is compiled.
        """
        placed = to_device(batch, self.device)
        plain = uncompiled(self.model) if eager and isinstance(self.model, nn.Module) else nullcontext(self.model)
        cast = torch.autocast(self.device.type, dtype=self.autocast) if self.autocast else nullcontext()
        with torch.inference_mode(), cast, plain as model:
            return call(model, placed) if self.forward is None else self.forward(model, placed)  # type: ignore[arg-type]


@contextmanager
def inferring(model: object, device: torch.device | None) -> Iterator[None]:
    """The module in evaluation mode and on a device; then every flag, and its place, as before."""
    if not isinstance(model, nn.Module):
        yield
        return
    flags = [(module, module.training) for module in model.modules()]
    tensors = [*model.parameters(), *model.buffers()]
    before = tensors[0].device if tensors else None
    moves = device is not None and any(tensor.device != device for tensor in tensors)
    try:
        model.eval()
        if moves:
            model.to(device)
        yield
    finally:
        if moves:
            model.to(before)
        for module, training in flags:
            module.training = training


@dataclass(frozen=True, slots=True)
class Moving:
    """Outputs on their way to where they are kept."""

    output: Any
    event: Any = None

    def wait(self) -> Any:
        """The outputs, there."""
        if self.event is not None:
            self.event.synchronize()
        return self.output


def moving(output: Any, device: torch.device | None, source: torch.device) -> Moving:
    """Start to move outputs to a device; from CUDA to the host beside what runs next.

    Args:
        device: None leaves them where the model put them.
    """
    if device is None:
        return Moving(output)
    if source.type == "cuda" and device.type == "cpu":
        moved = _each(output, _to_pinned)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(source))
        return Moving(moved, event)
    return Moving(_each(output, lambda tensor: tensor.to(device)))


def _to_pinned(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if is_leaf(value) or isinstance(value, PackedSequence):
        return value
    return rebuilt(value, "", lambda _, item: _each(item, change))
