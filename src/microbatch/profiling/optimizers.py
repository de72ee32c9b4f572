"""The optimizer of a profiled training step: real work that moves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from microbatch.errors import InvalidModel

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

_LEARNING_RATE = 1e-12
"""Small enough that hundreds of steps on one batch leave the values, and so the time, as they are."""


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that training changes.

    Raises:
        InvalidModel: there are none.
    """
    found = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not found:
        raise InvalidModel("The model has no parameter to train.", "Profile it with mode='inference'.")
    return found


def still(optimizer: Optimizer) -> Optimizer:
    """The same optimizer with a learning rate that moves nothing: the work of a step, without its effect."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(_LEARNING_RATE)
        else:
            group["lr"] = _LEARNING_RATE
    return optimizer


def as_on_device(optimizer: Optimizer) -> None:
    """On CUDA, optimizers treat all parameters at once by default, with temporaries as large; not on fake tensors."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


def with_gradients(parameters: Sequence[nn.Parameter], step: Callable[[], object]) -> Callable[[], object]:
    """The step as it runs when earlier pieces of its batch have left their gradients behind."""

    def later() -> object:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        return step()

    return later


def add_weights_to_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """What one more piece adds to its own backward: something of the size of each gradient is read and added to it."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.layout == torch.strided:
                parameter.grad.add_(parameter)
