"""Mixtures of experts: the products of a routed layer, recorded whole.

Which expert gets which token is in the data, so no run without data can follow the loop over experts. Three kinds of
layers are known by their form:

* a module with weights of (experts, ·, ·), called with tokens and with each token's experts (tokens, top_k), as the
  experts of transformers are;
* a module with such weights and a ``router`` that has ``gate``, ``experts`` and ``top_k``, as the built-in one is;
* a module with a list of equal experts, one linear layer that scores them, and a number called as in `TOP_K`: where
  its own forward stops at the data, one expert runs with the rows of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from microbatch.capture.moved import Moved, distinct_bytes
from microbatch.capture.opaque import whole
from microbatch.capture.record import Record, Run, arithmetic_of
from microbatch.capture.repeats import forward_of, settings_of
from microbatch.capture.tally import DependsOnData, Tally

Rule = Callable[..., Tensor]


@contextmanager
def routed_layers(layers: Iterable[tuple[nn.Module, Rule]], tally: Tally) -> Iterator[None]:
    """Inside, layers of experts are recorded and not run."""
    with ExitStack() as stack:
        for module, rule in layers:
            stack.enter_context(forward_of(module, partial(rule, tally, module)))
        yield


def experts_of(model: nn.Module) -> list[tuple[nn.Module, Rule]]:
    """Layers of experts, and what stands for their forward: ``rule(tally, module, *args, **kwargs)``."""
    return [(module, rule) for module in model.modules() if (rule := _rule(module)) is not None]


def _rule(module: nn.Module) -> Rule | None:
    parts = _listed(module)
    if parts is not None:
        return partial(_one_for_all, parts)
    experts = {len(weight) for _, weight in _matrices(module)}
    if len(experts) != 1:
        return None
    router = getattr(module, "router", None)
    if isinstance(router, nn.Module) and all(hasattr(router, name) for name in ("gate", "experts", "top_k")):
        return _routed_here
    return _told if getattr(module, "num_experts", None) in experts else None


TOP_K = (
    "top_k",
    "topk",
    "k",
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "n_activated_experts",
)
"""What a layer calls the number of experts that a token takes."""


@dataclass(frozen=True, slots=True)
class _Listed:
    """The parts of a layer with a list of experts."""

    experts: nn.ModuleList
    gate: nn.Linear
    top_k: int


def _listed(module: nn.Module) -> _Listed | None:
    lists = [part for part in module.children() if isinstance(part, nn.ModuleList) and len(part) > 1]
    if len(lists) != 1 or len({settings_of(expert) for expert in lists[0]}) != 1:
        return None
    others = [part for part in module.children() if part is not lists[0]]
    gates = [part for other in others for part in other.modules() if isinstance(part, nn.Linear)]
    named = [getattr(part, name, None) for part in (module, *others) for name in TOP_K]
    top_k = next((value for value in named if isinstance(value, int) and 0 < value <= len(lists[0])), None)
    if len(gates) != 1 or gates[0].out_features != len(lists[0]) or top_k is None:
        return None
    return _Listed(lists[0], gates[0], top_k)


def _one_for_all(parts: _Listed, tally: Tally, module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """For a layer with a list of experts: as it is, or where that stops at the data, by one expert for all rows."""
    before = len(tally.records)
    try:
        own: Tensor = type(module).forward(module, *args, **kwargs)
        return own
    except DependsOnData:
        x: Tensor = next(part for part in (*args, *kwargs.values()) if isinstance(part, Tensor))
        if x.shape[-1] != parts.gate.in_features:
            raise
        del tally.records[before:]
        tokens = x.reshape(-1, x.shape[-1])
        return _by_one_expert(tally, parts, tokens).reshape(x.shape)


def _by_one_expert(tally: Tally, parts: _Listed, tokens: Tensor) -> Tensor:
    shares, _ = parts.gate(tokens).softmax(-1).topk(parts.top_k, dim=-1)
    outer, routed = tally.run, (len(parts.experts), parts.top_k, len(tokens))
    tally.run = Run(tally.running[-1], outer, routed=routed)
    try:
        results: Tensor = parts.experts[0](tokens.repeat(parts.top_k, 1))
    finally:
        tally.run = outer
    weighted: Tensor = results.unflatten(0, (parts.top_k, -1)) * shares.t().unsqueeze(-1)
    return weighted.sum(0)


def as_routed(record: Record) -> Record:
    """A record of the expert that ran for all, as the work of all: each has its own weights and a share of the rows."""
    routed = record.run.shared if record.run else None
    if routed is None or not (record.product or record.moved.weights):
        return record
    experts, rows = routed[0], routed[1] * routed[2]
    gradient = record.backward and record.product is not None and record.product[0] != rows
    moved = record.moved
    moved = Moved(experts * moved.weights, moved.read, moved.written * (experts if gradient else 1))
    if record.kind != "matmul" or record.product is None:
        return replace(record, moved=moved)
    m, n, k, count = record.product
    shared = (m, n, Fraction(k) / experts, experts) if gradient else (Fraction(m) / experts, n, k, experts)
    return replace(record, kind="experts", moved=moved, product=shared if count == 1 else None, routed=routed)


def _matrices(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, weight) for name, weight in module.named_parameters(recurse=False) if weight.dim() == 3]


def _told(tally: Tally, module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """For a layer that is told each token's experts; a layer called in another way runs as it is."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    chosen = [tensor for tensor in tensors if not tensor.dtype.is_floating_point and tensor.dim() == 2]
    if not chosen or tensors[0].dim() != 2 or len(chosen[0]) != len(tensors[0]):
        original: Tensor = type(module).forward(module, *args, **kwargs)
        return original
    return _experts(tally, module, tensors[0], chosen[0].shape[1], tensors)


def _routed_here(tally: Tally, module: Any, x: Tensor) -> Tensor:
    """For a layer that asks its own router."""
    tokens = x.reshape(-1, x.shape[-1])
    scores = module.router.gate(tokens).softmax(-1)
    shares, chosen = scores.topk(module.router.top_k, dim=-1)
    return _experts(tally, module, tokens, module.router.top_k, [tokens, chosen, shares]).reshape(x.shape)


def _experts(tally: Tally, module: nn.Module, tokens: Tensor, top_k: int, inputs: Sequence[Tensor]) -> Tensor:
    matrices = _matrices(module)
    products = [_product(name, weight, tokens, top_k, last=weight is matrices[-1][1]) for name, weight in matrices]
    wide = sum(int(record.product[1]) for record in products[:-1] if record.product)
    around = [_activation(tokens, top_k, wide, matrices), _combination(tokens, top_k)]
    weights = [weight for _, weight in matrices]
    (out,) = whole(
        tally,
        [*products[:-1], around[0], products[-1], around[1]],
        lambda: (torch.empty_like(tokens),),
        [*inputs, *weights],
        2.0,
    )
    return out


def _product(name: str, weight: Tensor, tokens: Tensor, top_k: int, *, last: bool) -> Record:
    """Each of tokens·top_k assignments meets one expert's matrix; the last matrix leads back to the tokens' width."""
    experts, (rows, width) = len(weight), tokens.shape
    other = weight[0].numel() // width
    k, n = (other, width) if last else (width, other)
    size, assigned = tokens.element_size(), rows * top_k
    return Record(
        name=f"experts::{name}",
        kind="experts",
        layer="",
        dtype=arithmetic_of([tokens]),
        flops=2.0 * assigned * k * n,
        moved=Moved(distinct_bytes(weight), assigned * k * size, assigned * n * size),
        product=(Fraction(assigned, experts), n, k, experts),
        routed=(experts, top_k, rows),
    )


def _activation(tokens: Tensor, top_k: int, wide: int, matrices: Sequence[tuple[str, Tensor]]) -> Record:
    """The gated activation between the products: two operations for each element that reaches the last matrix."""
    inner = matrices[-1][1][0].numel() // tokens.shape[1]
    return _elementwise("activation", tokens, top_k, read=wide, written=inner, flops=2 * inner)


def _combination(tokens: Tensor, top_k: int) -> Record:
    """Each token's results weighted and added up."""
    width = tokens.shape[1]
    return _elementwise("combine", tokens, top_k, read=width, written=Fraction(width, top_k), flops=2 * width)


def _elementwise(name: str, tokens: Tensor, top_k: int, *, read: int, written: int | Fraction, flops: int) -> Record:
    assigned, size = len(tokens) * top_k, tokens.element_size()
    return Record(
        name=f"experts::{name}",
        kind="elementwise",
        layer="",
        dtype=arithmetic_of([tokens]),
        flops=float(assigned * flops),
        moved=Moved(0, assigned * read * size, int(assigned * written * size)),
    )
