"""What a step is made of, checked before anything runs."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from microbatch.errors import InvalidSettings
from microbatch.sizes import BatchSizes


def check_settings(
    model: nn.Module, optimizer: Optimizer, *, micro_batch_size: object, max_norm: float | None, scheduler: Any
) -> None:
    """
    Raises:
        InvalidBatchSizes: a micro-batch size that is neither ``"auto"`` nor a whole number of 1 or more.
        InvalidSettings: an optimizer of another model, one that needs a closure, a scheduler that does not step once
            per step, or a norm that is not positive.
    """
    if micro_batch_size != "auto":
        size: Any = 0 if micro_batch_size is None else micro_batch_size
        BatchSizes.of(global_batch_size=1, micro_batch_size=size)
    if max_norm is not None and not max_norm > 0:
        raise InvalidSettings(f"max_norm is {max_norm}.", "Give a positive number, or None for no clipping.")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise InvalidSettings(
            "ReduceLROnPlateau steps once per epoch, with a metric.", "Leave scheduler= out and call its step yourself."
        )
    _check_optimizer(model, optimizer)


def _check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise InvalidSettings(
            "The optimizer holds none of the model's parameters.",
            "Make the optimizer from model.parameters(), after the model was moved, wrapped or replaced.",
        )
    if isinstance(optimizer, LBFGS):
        raise InvalidSettings(
            "LBFGS evaluates the loss several times per step.", "Use an optimizer that steps with one gradient."
        )
