"""Linear layers on a CPU with weights packed beforehand: torch's own repacks its weight in each call of a small batch.

A layer is replaced only where the packed form was measured to be faster here and gives the same answer up to rounding.
"""

from __future__ import annotations

import copy
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from microbatch.batch.exactness import TOLERANCE, relative_difference
from microbatch.models.packed_linear import SMALLEST, is_available, pack, packed_linear

logger = logging.getLogger(__name__)

SIZES = (1, 8, 32)
"""Rows at which the two forms are compared; the packed form is laid out for each of them."""
ROUNDS = 7
FASTER = 0.95
"""Its time, over torch's, summed over the sizes as shares, must be at most this."""
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class PackedLinear(nn.Module):
    """A linear layer with a packed copy of a weight. The weight must not change any more."""

    def __init__(self, layer: nn.Linear, rows: int) -> None:
        """
        Args:
            layer: on the CPU.
            rows: that the packed form is laid out for; others run too.
        """
        super().__init__()
        self.bias = layer.bias
        self.packed = pack(layer.weight, rows)

    def forward(self, x: Tensor) -> Tensor:
        return packed_linear(x, self.packed, self.bias)


def with_fast_linear(model: nn.Module) -> nn.Module:
    """The model with its linear layers in their faster form, as far as there is one; itself where there is none.

    A copy that shares all parameters; the model given is not changed and can be trained. Training does not reach the
    packed weights: make the copy again after it.
    """
    layers = {name: layer for name, layer in model.named_modules() if _may_be_packed(layer)}
    usable = {dtype: is_available(dtype) for dtype in {layer.weight.dtype for layer in layers.values()}}
    layers = {name: layer for name, layer in layers.items() if usable[layer.weight.dtype]}
    rows_of: dict[Any, int | None] = {}
    chosen = {}
    for name, layer in layers.items():
        form = (layer.in_features, layer.out_features, layer.weight.dtype, layer.bias is None)
        if form not in rows_of:
            rows_of[form] = _best_rows(layer)
        if (rows := rows_of[form]) is not None:
            chosen[name] = PackedLinear(layer, rows)
    if not chosen:
        return model
    logger.info("%d of %d linear layers run with packed weights.", len(chosen), len(layers))
    return _replaced(model, chosen)


def _may_be_packed(layer: nn.Module) -> bool:
    """A plain linear layer on the CPU: no subclass, hook or parametrization, which the packed form would pass by."""
    if type(layer) is not nn.Linear or layer.weight.device.type != "cpu" or layer.weight.dtype not in DTYPES:
        return False
    plain = type(layer.weight) is nn.Parameter and not layer._forward_hooks and not layer._forward_pre_hooks
    return plain and "forward" not in vars(layer) and layer.weight.numel() >= SMALLEST


@torch.no_grad()
def _best_rows(layer: nn.Linear) -> int | None:
    """The rows to lay the packed form out for; None where torch's own is as fast, or the answers differ."""
    inputs = {rows: torch.randn(rows, layer.in_features).to(layer.weight.dtype) for rows in SIZES}
    forms: dict[int, Callable[[Tensor], Tensor]] = {rows: PackedLinear(layer, rows) for rows in SIZES}
    tolerance = TOLERANCE[DTYPES[layer.weight.dtype]]
    for form in forms.values():
        for x in inputs.values():
            if relative_difference(linear(x, layer.weight, layer.bias), form(x)) > tolerance:
                return None
    forms[0] = lambda x: linear(x, layer.weight, layer.bias)
    shares: dict[int, list[float]] = {rows: [] for rows in forms}
    for x in inputs.values():
        times: dict[int, list[float]] = {rows: [] for rows in forms}
        for _ in range(ROUNDS):
            for rows, form in forms.items():
                times[rows].append(_seconds(form, x))
        own = statistics.median(times[0])
        for rows in forms:
            shares[rows].append(statistics.median(times[rows]) / own)
    best = min(SIZES, key=lambda rows: sum(shares[rows]))
    return best if sum(shares[best]) <= FASTER * len(SIZES) else None


def _seconds(form: Callable[[Tensor], Tensor], x: Tensor) -> float:
    start = time.perf_counter()
    form(x)
    return time.perf_counter() - start


def _replaced(model: nn.Module, chosen: dict[str, PackedLinear]) -> nn.Module:
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    memo: dict[int, Any] = dict(shared)
    for name, packed in chosen.items():
        memo[id(model.get_submodule(name))] = packed  # wherever the layer is held, the packed one takes its place
    return copy.deepcopy(model, memo)
