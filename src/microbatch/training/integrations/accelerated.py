"""Accelerate: an exact step around what ``accelerator.prepare`` returned.

``accumulate``, ``backward``, ``clip_grad_norm_``, ``optimizer.step`` and ``scheduler.step`` are one call::

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = train_step(accelerator, model, optimizer, loss, micro_batch_size="auto", max_norm=1.0)
    for batch in loader:            # the global batch of this process; it is cut into pieces
        result = step(batch)

The accelerator's devices, mixed precision (its loss scaler too), DistributedDataParallel and FSDP2 are kept.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from microbatch.batch.running import Forward
from microbatch.batch.token_budget import TokenBudget
from microbatch.errors import InvalidSettings
from microbatch.training.normalise import Loss
from microbatch.training.step import TrainStep, Weight

_OWN_BACKWARD = ("DEEPSPEED", "MEGATRON_LM", "XLA", "TPU")
"""Kinds of processes whose engine runs backward and the update by itself."""

_MORE_AXES = ("tp_size", "cp_size", "sp_size")
"""Splits inside a layer: every piece there has collectives that a process cannot redo alone."""


def train_step(
    accelerator: Any,
    model: nn.Module,
    optimizer: Optimizer,
    loss: Loss,
    *,
    forward: Forward | None = None,
    weight: Weight | None = None,
    micro_batch_size: int | str | TokenBudget = "auto",
    max_norm: float | None = None,
    scheduler: Any = None,
    profile: Any = None,
    memory_limit: int | None = None,
) -> TrainStep:
    """A `TrainStep` with the accelerator's precision and processes.

    Args:
        accelerator: an ``accelerate.Accelerator``.
        model: as it was prepared.
        optimizer: as it was prepared.
        scheduler: as it was prepared; stepped once per update.
        loss: and the others: see `microbatch.TrainStep`.

    Raises:
        InvalidSettings: see `check_accelerator`; and what `TrainStep` raises.
    """
    check_accelerator(accelerator)
    return TrainStep(
        model,
        plain_optimizer(optimizer),
        loss,
        forward=forward,
        weight=weight,
        micro_batch_size=micro_batch_size,
        max_norm=max_norm,
        scheduler=scheduler,
        scaler=accelerator.scaler,
        profile=profile,
        memory_limit=memory_limit,
    )


def plain_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer that Accelerate wraps; its wrapper may skip steps and steps the loss scaler by itself."""
    from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped, unused-ignore]

    plain: Optimizer = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    return plain


def check_accelerator(accelerator: Any) -> None:
    """
    Raises:
        InvalidSettings: an engine with a backward of its own, parallelism inside of layers, or accumulation besides.
    """
    kind = accelerator.distributed_type.name
    if kind in _OWN_BACKWARD:
        raise InvalidSettings(
            f"{kind} runs backward and the update by itself.", "Use DistributedDataParallel or FSDP2 (fsdp_version 2)."
        )
    parallel = getattr(accelerator, "parallelism_config", None)
    split = {axis: getattr(parallel, axis, 1) or 1 for axis in _MORE_AXES}
    if any(size > 1 for size in split.values()):
        listed = ", ".join(f"{axis} {size}" for axis, size in split.items() if size > 1)
        raise InvalidSettings(f"Layers are split over processes ({listed}).", "Use data parallelism only.")
    steps = accelerator.gradient_accumulation_steps
    if steps > 1:
        raise InvalidSettings(
            f"The accelerator accumulates {steps} batches per step.",
            f"Leave gradient_accumulation_steps out and make the loader's batch {steps} times as large: it is cut.",
        )
