"""A mixture of experts, and what its routing costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from microbatch.curves.profile import ExpertLoad
from microbatch.errors import InvalidSettings
from microbatch.models.loaded import Loaded
from microbatch.models.routing import PLANTED, PLANTED_ROWS_PER_EXPERT, ExpertChoice, Routing, TokenChoice, by_expert

EXAMPLE_TOKENS = 512
"""The example holds many different tokens: repeating two of them would send a large batch to the same few experts."""


class MixtureOfExperts(nn.Module):
    """A feed-forward layer whose weights are split into experts; a router sends each token to a few of them.

    Only experts that got a token are run, so only their weights are read.

    Args:
        router: a module from (tokens, width) to `Routing`.
        hidden: inner width of one expert.
    """

    def __init__(self, router: TokenChoice | ExpertChoice, width: int, hidden: int) -> None:
        super().__init__()
        self.router = router
        self.up = nn.Parameter(torch.randn(router.experts, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(router.experts, hidden, width) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to the same."""
        tokens = x.reshape(-1, x.shape[-1])
        return self.run(tokens, self.router(tokens)).reshape(x.shape)

    def run(self, x: Tensor, routing: Routing) -> Tensor:
        """The weighted sum of the experts' outputs under a given routing; x: (tokens, width)."""
        out = torch.zeros_like(x)
        rows, shares = routing.tokens.split(routing.counts), routing.weights.split(routing.counts)
        for tokens, weights, up, down in zip(rows, shares, self.up.unbind(), self.down.unbind(), strict=True):
            if len(tokens):
                hidden = torch.relu(x[tokens] @ up)
                out.index_add_(0, tokens, (hidden @ down) * weights[:, None])
        return out


class Shortcut(nn.Module):
    """x + layer(norm(x))."""

    def __init__(self, width: int, layer: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.layer(self.norm(x))
        return added


def moe(
    *,
    depth: int = 2,
    width: int = 256,
    hidden: int = 512,
    experts: int = 16,
    top_k: int = 2,
    gate: Literal["tokens", "experts"] = "tokens",
    capacity: float | None = None,
    routing: Literal["measured", "even", "uniform", "zipf"] = "measured",
    decoding: bool = False,
    seed: int = 0,
) -> Loaded:
    """A stack of mixture-of-experts layers; items are tokens of `width` numbers.

    Args:
        gate: who chooses: each token its experts, or each expert its tokens.
        capacity: what an expert takes at most, over its even share; without it, a chosen expert takes all.
        routing: the gate's own choice, or a planted one that is known beforehand.
        decoding: the tokens are next tokens of an autoregressive model.
    """
    if top_k > experts:
        raise InvalidSettings(f"A token cannot go to {top_k} of {experts} experts.", "Use top_k of at most experts.")
    if gate == "experts":
        _check_expert_choice(routing, decoding=decoding)
    generator = torch.Generator().manual_seed(seed)

    def router() -> TokenChoice | ExpertChoice:
        if gate == "experts":
            return ExpertChoice(width, experts, top_k, capacity=capacity)
        rows = experts * PLANTED_ROWS_PER_EXPERT
        planted = PLANTED[routing](experts, top_k, rows, generator) if routing in PLANTED else None
        return TokenChoice(width, experts, top_k, capacity=capacity, planted=planted)

    layers = (Shortcut(width, MixtureOfExperts(router(), width, hidden)) for _ in range(depth))
    example = torch.randn(EXAMPLE_TOKENS, width, generator=generator)
    return Loaded(name="moe", model=nn.Sequential(*layers), args=(example,), unit="tokens")


def _check_expert_choice(routing: str, *, decoding: bool) -> None:
    if decoding:
        raise InvalidSettings(
            "Expert's choice cannot decode: an expert ranks all tokens of a batch against each other, so a token's "
            "output would depend on the other requests and on tokens that are not written yet.",
            "Use gate=tokens for autoregressive decoding.",
        )
    if routing != "measured":
        raise InvalidSettings(
            f"routing={routing} plants the experts of each token, but with gate=experts the experts choose.",
            "Use gate=tokens, or leave routing out: expert's choice is even by construction.",
        )


@contextmanager
def record_routing(model: nn.Module, *, batch_size: int | None = None) -> Iterator[list[ExpertLoad]]:
    """Collects one `ExpertLoad` for each call of each mixture-of-experts layer inside the ``with``.

    Args:
        batch_size: items in the batch; by default the tokens that a layer routes.
    """
    loads: list[ExpertLoad] = []
    handles = [
        layer.router.register_forward_hook(partial(_append_load, loads, name, batch_size))
        for name, layer in _moe_layers(model)
    ]
    try:
        yield loads
    finally:
        for handle in handles:
            handle.remove()


def _append_load(
    loads: list[ExpertLoad], name: str, batch_size: int | None, _: nn.Module, __: object, routing: Routing
) -> None:
    loads.append(_load(name, routing, batch_size or routing.num_tokens))


def measure_imbalance(
    model: nn.Module,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    *,
    batch_size: int | None = None,
    rounds: int = 15,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[ExpertLoad, ...]:
    """How each mixture-of-experts layer spreads this batch, and its time against the same tokens spread evenly.

    Both routings run on the tokens that the layer really gets, gate included, in alternating order; the least time of
    `rounds` counts. A model without such layers gives ().

    Args:
        batch_size: items in the batch; by default the leading dimension of the first tensor in the input.
    """
    inputs: dict[str, Tensor] = {}
    layers = _moe_layers(model)
    handles = [layer.register_forward_pre_hook(partial(_keep_input, inputs, name)) for name, layer in layers]
    try:
        with torch.no_grad():
            if layers:
                model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    items = batch_size or _leading_dimension(args, kwargs)
    return tuple(
        _timed_load(name, layer, inputs[name], items, rounds, clock) for name, layer in layers if name in inputs
    )


def _keep_input(inputs: dict[str, Tensor], name: str, _: nn.Module, given: tuple[Tensor, ...]) -> None:
    inputs[name] = given[0]


def _timed_load(
    name: str, layer: MixtureOfExperts, x: Tensor, batch_size: int, rounds: int, clock: Callable[[], float]
) -> ExpertLoad:
    tokens = x.detach().reshape(-1, x.shape[-1])
    with torch.no_grad():
        routing = layer.router(tokens)
        even = even_routing(routing, layer.router.experts)
        seconds = {id(routing): float("inf"), id(even): float("inf")}
        for turn in range(rounds):
            for candidate in (routing, even) if turn % 2 else (even, routing):
                taken = _time(layer, tokens, candidate, clock)
                seconds[id(candidate)] = min(seconds[id(candidate)], taken)
    return _load(name, routing, batch_size, seconds[id(routing)], seconds[id(even)])


def _time(layer: MixtureOfExperts, x: Tensor, routing: Routing, clock: Callable[[], float]) -> float:
    _wait(x.device)
    start = clock()
    layer.router(x)
    layer.run(x, routing)
    _wait(x.device)
    return clock() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def even_routing(routing: Routing, experts: int) -> Routing:
    """As many assignments as `routing` keeps, given to the experts in turn; counts differ by at most one."""
    kept = len(routing.tokens)
    device = routing.tokens.device
    expert = torch.arange(kept, device=device) % experts
    spread = by_expert(expert[:, None], torch.ones(kept, 1, device=device, dtype=routing.weights.dtype), experts)
    # Assignment i belongs to the token of the i-th assignment before, so each token keeps its number of experts.
    original = routing.tokens.sort(stable=True)
    return Routing(
        tokens=original.values[spread.tokens],
        weights=routing.weights[original.indices][spread.tokens],
        counts=spread.counts,
        num_tokens=routing.num_tokens,
    )


def _moe_layers(model: nn.Module) -> list[tuple[str, MixtureOfExperts]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, MixtureOfExperts)]


def _leading_dimension(args: tuple[object, ...], kwargs: Mapping[str, object]) -> int:
    tensors = (leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor) and leaf.dim())
    return next((len(tensor) for tensor in tensors), 1)


def _load(
    name: str, routing: Routing, batch_size: int, seconds: float | None = None, even_seconds: float | None = None
) -> ExpertLoad:
    return ExpertLoad(
        layer=name,
        batch_size=batch_size,
        tokens=routing.num_tokens,
        tokens_per_expert=routing.counts,
        dropped=routing.dropped,
        seconds=seconds,
        even_seconds=even_seconds,
    )
