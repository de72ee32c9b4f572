"""A backward in two: gradients of the inputs now, those of the weights later. torch's own way, where it is exact.

torch keeps what arrives at the operators that lead to weights and goes on from there. A weight that is reached past
the inputs (an input that needs no gradient, a result that does not depend on it) would silently get none: there the
whole backward is done at once, or later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import (
    _get_grad_fn_or_grad_acc,
    construct_reverse_graph,
    get_param_groups,
    stage_backward_input,
    stage_backward_weight,
)

Groups = list[dict[str, Any]]


def splits(roots: Sequence[Tensor], inputs: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> bool:
    """Whether every weight that the roots depend on is reached from an operator between inputs and roots."""
    starts, ends, weights = (_nodes(tensors) for tensors in (roots, inputs, parameters))
    if not ends:
        return False
    above = construct_reverse_graph(starts)
    reached = {weight for weight in weights if weight in above}
    groups = get_param_groups(ends, [weight for weight in weights if weight in reached], above)
    found = {weight for group in groups for weight in group["params"]}
    return reached <= found and not set(starts) & set(weights)


def _nodes(tensors: Sequence[Tensor]) -> list[Any]:
    nodes = [_get_grad_fn_or_grad_acc(tensor) for tensor in tensors if tensor.requires_grad]
    return [node for node in nodes if node is not None]


def input_gradients(
    roots: list[Tensor], gradients: list[Tensor] | None, inputs: list[Tensor], parameters: Sequence[nn.Parameter]
) -> tuple[list[Tensor | None], Groups]:
    """Gradients of the inputs, and what `weight_gradients` goes on from. The roots lose their graphs."""
    found, groups = stage_backward_input(roots, gradients, inputs, iter(parameters))
    for tensor in inputs:
        tensor.grad = None  # torch leaves them there as well
    return list(found), groups


def weight_gradients(parameters: Sequence[nn.Parameter], groups: Groups) -> None:
    """Add the gradients of the weights to what stands in ``.grad``."""
    with _summed_in_wide(parameters):
        stage_backward_weight(iter(parameters), groups)


@contextmanager
def _summed_in_wide(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Sums in a wider dtype start from zeros of it: torch would put a narrow gradient in their place."""
    new = []
    for parameter in parameters:
        dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
        if parameter.requires_grad and parameter.grad is None and dtype != parameter.dtype:
            parameter.grad = torch.zeros_like(parameter, dtype=dtype)
            new.append((parameter, parameter.grad, parameter.grad._version))
    yield
    for parameter, zeros, version in new:
        if parameter.grad is zeros and zeros._version == version:
            parameter.grad = None  # nothing was added
