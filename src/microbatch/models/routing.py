"""Which expert gets which token: gates of a mixture of experts, measured and planted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

PLANTED_ROWS_PER_EXPERT = 256
"""A planted gate repeats itself after this many tokens per expert."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Assignments of tokens to experts, sorted by expert.

    Attributes:
        tokens: row of each assignment's token: (assignments,).
        weights: share of the expert's output in the token's: (assignments,).
        counts: assignments of each expert.
        num_tokens: tokens that were routed.
        dropped: assignments lost because their expert was full.
    """

    tokens: Tensor
    weights: Tensor
    counts: tuple[int, ...]
    num_tokens: int
    dropped: int = 0


def draw_experts(popularity: Tensor, top_k: int, tokens: int, *, generator: torch.Generator) -> Tensor:
    """`top_k` different experts for each token, drawn one after the other with chances in proportion to `popularity`.

    The largest log-popularities with Gumbel noise are such a draw (Kool et al., arXiv 1903.06059); the noise is minus
    the logarithm of an exponential variate.

    Returns:
        (tokens, top_k) expert numbers.
    """
    noise = torch.empty(tokens, len(popularity)).exponential_(generator=generator)
    return (popularity.log() - noise.log()).topk(top_k, dim=-1).indices


def _even(experts: int, top_k: int, rows: int, _: torch.Generator) -> Tensor:
    return torch.arange(rows * top_k).reshape(rows, top_k) % experts


def _uniform(experts: int, top_k: int, rows: int, generator: torch.Generator) -> Tensor:
    return draw_experts(torch.ones(experts), top_k, rows, generator=generator)


def _zipf(experts: int, top_k: int, rows: int, generator: torch.Generator) -> Tensor:
    return draw_experts(1 / torch.arange(1, experts + 1), top_k, rows, generator=generator)


PLANTED: dict[str, Callable[[int, int, int, torch.Generator], Tensor]] = {
    "even": _even,
    "uniform": _uniform,
    "zipf": _zipf,
}
"""Gates whose choice is known beforehand: in turn, at random, and at random with popularity 1/rank."""


class TokenChoice(nn.Module):
    """Each token takes its `top_k` experts (Shazeer et al., arXiv 1701.06538).

    With a capacity, an expert takes at most ``ceil(capacity·tokens·top_k/experts)`` assignments: first choices before
    second ones, earlier tokens before later ones; the rest is dropped (Lepikhin et al., arXiv 2006.16668).

    Args:
        planted: (rows, top_k) experts that tokens take instead of the gate's choice, row by row and then again;
            the gate is still computed and still gives the weights.
    """

    planted: Tensor | None

    def __init__(
        self, width: int, experts: int, top_k: int, *, capacity: float | None = None, planted: Tensor | None = None
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts, self.top_k, self.capacity = experts, top_k, capacity
        self.register_buffer("planted", planted, persistent=False)

    def forward(self, x: Tensor) -> Routing:
        """x: (tokens, width)."""
        scores = self.gate(x).softmax(dim=-1)
        chosen = self._planted(len(x)) if self.planted is not None else scores.topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        return by_expert(chosen, weights / weights.sum(-1, keepdim=True), self.experts, limit=self._limit(len(x)))

    def _planted(self, tokens: int) -> Tensor:
        assert self.planted is not None
        return self.planted.repeat(-(-tokens // len(self.planted)), 1)[:tokens]

    def _limit(self, tokens: int) -> int | None:
        return None if self.capacity is None else math.ceil(self.capacity * tokens * self.top_k / self.experts)


class ExpertChoice(nn.Module):
    """Each expert takes the ``ceil(capacity·tokens·top_k/experts)`` tokens that suit it best.

    Every expert is equally busy; a token may get many experts or none (Zhou et al., arXiv 2202.09368).
    """

    def __init__(self, width: int, experts: int, top_k: int, *, capacity: float | None = None) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts, self.top_k, self.capacity = experts, top_k, capacity or 1.0

    def forward(self, x: Tensor) -> Routing:
        """x: (tokens, width)."""
        tokens = len(x)
        each = min(tokens, math.ceil(self.capacity * tokens * self.top_k / self.experts))
        taken = self.gate(x).softmax(dim=-1).topk(each, dim=0)
        return Routing(
            tokens=taken.indices.t().reshape(-1),
            weights=taken.values.t().reshape(-1),
            counts=(each,) * self.experts,
            num_tokens=tokens,
        )


def by_expert(chosen: Tensor, weights: Tensor, experts: int, *, limit: int | None = None) -> Routing:
    """Sorts assignments by expert and drops those beyond `limit` per expert.

    Args:
        chosen: (tokens, top_k) expert numbers.
        weights: (tokens, top_k).
    """
    tokens = chosen.shape[0]
    # First choices of all tokens come before second choices, so that a full expert drops the latter.
    expert, order = chosen.t().reshape(-1).sort(stable=True)
    counts = torch.bincount(expert, minlength=experts)
    if limit is not None:
        place = torch.arange(len(expert), device=expert.device) - (counts.cumsum(0) - counts)[expert]
        order = order[place < limit]
        counts = counts.clamp(max=limit)
    return Routing(
        tokens=order % tokens,
        weights=weights.t().reshape(-1)[order],
        counts=tuple(counts.tolist()),
        num_tokens=tokens,
        dropped=chosen.numel() - len(order),
    )
