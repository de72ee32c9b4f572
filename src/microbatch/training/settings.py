"""What a step is made of, checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from microbatch.batch.token_budget import TokenBudget
from microbatch.errors import InvalidSettings
from microbatch.sizes import BatchSizes


def check_kinds(given: Mapping[str, object]) -> None:
    """What each argument of a step must be, by its name; None where it may be left out.

    Raises:
        InvalidSettings: one is something else.
    """
    for name, value in given.items():
        fits, what = _KINDS[name]
        if not fits(value) and not (value is None and name not in _NEEDED):
            raise InvalidSettings(f"{name} is {_short(value)}.", f"Give {what}.")


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (lambda value: isinstance(value, nn.Module), "a torch.nn.Module"),
    "optimizer": (lambda value: isinstance(value, Optimizer), "a torch.optim.Optimizer of the model's parameters"),
    "loss": (callable, "a function loss(output, batch) that returns a sum and its weight"),
    "forward": (callable, "a function forward(model, batch) that returns the output"),
    "weight": (callable, "a function weight(batch) that returns a number"),
    "scheduler": (lambda value: callable(getattr(value, "step", None)), "a learning-rate scheduler"),
    "scaler": (lambda value: hasattr(value, "unscale_"), "a torch.amp.GradScaler"),
    "autocast": (
        lambda value: isinstance(value, torch.dtype) and value.is_floating_point,
        "a dtype such as torch.bfloat16",
    ),
    "max_norm": (lambda value: _is_number(value) and value > 0, "a positive number, or None for no clipping"),
    "memory_limit": (lambda value: _is_number(value) and value > 0, "a number of bytes, such as 8 * 10**9"),
}
_NEEDED = ("model", "optimizer", "loss")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _short(value: object) -> str:
    return repr(value) if isinstance(value, (str, int, float, torch.dtype, type(None))) else f"a {type(value).__name__}"


def made_of(optimizer: Any, model: nn.Module) -> Any:
    """The optimizer; made of the model's parameters where a class, or a function of parameters, is given.

    A rank without parameters has an optimizer of nothing.
    """
    if isinstance(optimizer, Optimizer) or not callable(optimizer) or not isinstance(model, nn.Module):
        return optimizer
    return optimizer(list(model.parameters()) or [nn.Parameter(torch.zeros(0), requires_grad=False)])


def check_settings(model: nn.Module, optimizer: Optimizer, *, micro_batch_size: object, scheduler: Any) -> None:
    """
    Raises:
        InvalidBatchSizes: a micro-batch size that is no ``"auto"``, no budget, and no whole number of 1 or more.
        InvalidSettings: an optimizer of another model, one that needs a closure, or a scheduler that does not step once
            per step.
    """
    if micro_batch_size != "auto" and not isinstance(micro_batch_size, TokenBudget):
        size: Any = str(None) if micro_batch_size is None else micro_batch_size
        BatchSizes.of(global_batch_size=1, micro_batch_size=size)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise InvalidSettings(
            "ReduceLROnPlateau steps once per epoch, with a metric.", "Leave scheduler= out and call its step yourself."
        )
    _check_optimizer(model, optimizer)


def _check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    if own and not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise InvalidSettings(
            "The optimizer holds none of the model's parameters.",
            "Make the optimizer from model.parameters(), after the model was moved, wrapped or replaced.",
        )
    if isinstance(optimizer, LBFGS):
        raise InvalidSettings(
            "LBFGS evaluates the loss several times per step.", "Use an optimizer that steps with one gradient."
        )
