"""Gradients of a step: emptied, summed in fp32, scaled, measured and clipped, handed over in the weights' dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

_NARROW = (torch.float16, torch.bfloat16)

Norm = Callable[[Sequence[nn.Parameter]], Tensor]


def clear(parameters: Iterable[nn.Parameter]) -> None:
    """No gradients, and those to come in the weights' own dtype."""
    for parameter in parameters:
        parameter.grad = None
        if parameter.dtype in _NARROW:
            parameter.grad_dtype = parameter.dtype


def widen(parameters: Iterable[nn.Parameter]) -> None:
    """Gradients of bf16 and fp16 weights are summed in fp32 from now on.

    A sum of 64 bf16 gradients loses what each adds below 1/256 of it. Each piece's own gradient is still computed
    in the weights' dtype, as the gradient of a whole batch is.
    """
    for parameter in parameters:
        if parameter.dtype in _NARROW and not isinstance(parameter, DTensor):  # FSDP2 has its own reduce_dtype
            parameter.grad_dtype = torch.float32


def narrow(parameters: Iterable[nn.Parameter]) -> None:
    """Gradients in the weights' own dtype, as optimizers want them."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.dtype != parameter.dtype:
            parameter.grad = None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = gradient.to(parameter.dtype)


def scale(parameters: Iterable[nn.Parameter], factor: float | Tensor) -> None:
    """Multiply every gradient."""
    gradients = _gradients(parameters)
    dense = [gradient for gradient in gradients if gradient.layout == torch.strided]
    with torch.no_grad():
        for same in _by_mesh(dense).values():
            torch._foreach_mul_(same, factor)
        for gradient in gradients:
            if gradient.layout != torch.strided:
                gradient.mul_(factor)


def scale_and_clip(
    parameters: Sequence[nn.Parameter], factor: float, max_norm: float | None, norm_of: Norm | None = None
) -> Tensor | None:
    """Multiply every gradient by `factor`, then clip them by their global 2-norm, in one pass.

    The norm is `global_norm`'s, or that of ``norm_of`` where others hold parts of the model.

    Returns:
        The norm after scaling and before clipping; None without `max_norm`.
    """
    if max_norm is None:
        if factor != 1.0:
            scale(parameters, factor)
        return None
    norm = (norm_of or global_norm)(parameters) * factor
    clipping = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # torch.nn.utils.clip_grad_norm_ does the same
    scale(parameters, clipping * factor)
    return norm


def global_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """2-norm of all gradients together, over all shards of those that are sharded."""
    gradients = [g.coalesce().values() if g.is_sparse else g for g in _gradients(parameters)]
    sharded = _by_mesh(gradients)
    if not sharded.keys() - {None}:
        return get_total_norm(gradients)
    norms = [get_total_norm(some) for some in sharded.values()]
    return get_total_norm([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms])


def _by_mesh(gradients: Iterable[Tensor]) -> dict[Any, list[Tensor]]:
    """Sharded ones by what they are sharded over, plain ones under None: no call takes both kinds."""
    found: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        found.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    return found


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
