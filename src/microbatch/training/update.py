"""From gradients to new weights, once per step: unscale, scale and clip, optimizer, scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from microbatch.training import gradients
from microbatch.training.ranks.one_process import Ranks

logger = logging.getLogger(__name__)

NOT_FINITE = "a gradient is not finite"


def update(
    optimizer: Optimizer,
    parameters: Sequence[nn.Parameter],
    *,
    factor: float,
    max_norm: float | None,
    scaler: GradScaler | None,
    scheduler: Any,
    make: Callable[[Callable[[], object]], None],
    ranks: Ranks,
) -> tuple[float | None, str | None]:
    """One optimizer step.

    Args:
        optimizer: what steps.
        parameters: its parameters that are trained.
        factor: what their gradients are still to be multiplied by.
        max_norm: the global norm that they are clipped to.
        scaler: unscales them, and skips the step when one is not finite; the scheduler then stays where it is.
        scheduler: steps after the optimizer.
        make: calls the optimizer's step, see `microbatch.training.memory.recovery.Recovery.make`.
        ranks: that share the step.

    Returns:
        The norm before clipping (None without `max_norm`), and why the step was skipped (None when it was not).
    """
    scaler = scaler if scaler is not None and scaler.is_enabled() else None
    if scaler is not None:
        if scaler._scale is None:  # made by the first loss that it scales; a rank without weight has scaled none
            scaler.scale(torch.zeros((), device=optimizer.param_groups[0]["params"][0].device))
        scaler.unscale_(optimizer)
        ranks.share_found_inf(scaler, optimizer)
    norm = gradients.scale_and_clip(parameters, factor, max_norm, ranks.norm)
    gradients.narrow(parameters)
    skipped = _step(optimizer, scaler, make)
    if skipped is None and scheduler is not None:
        scheduler.step()
    return None if norm is None else float(norm), skipped


def _step(optimizer: Optimizer, scaler: GradScaler | None, make: Callable[[Callable[[], object]], None]) -> str | None:
    if scaler is None:
        make(optimizer.step)
        return None
    before = scaler.get_scale()
    make(lambda: scaler.step(optimizer))
    scaler.update()
    after = scaler.get_scale()
    if after >= before:
        return None
    logger.warning("Step skipped: %s; loss scale %g -> %g.", NOT_FINITE, before, after)
    return NOT_FINITE
