"""Gates: capacity, drops, expert's choice, and planted gates that reproduce the expected numbers of experts."""

from __future__ import annotations

import math
from statistics import mean, stdev

import pytest
import torch

from microbatch.models.routing import PLANTED, ExpertChoice, TokenChoice, by_expert, draw_experts
from microbatch.roofline.routing import (
    even_probabilities,
    expected_busiest,
    expected_distinct_experts,
    zipf_probabilities,
)

DRAWS = 600


def _planted_counts(name: str, experts: int, top_k: int, tokens: int) -> list[tuple[int, int]]:
    """(distinct experts, tokens of the most popular expert) of many batches routed by a planted gate."""
    generator = torch.Generator().manual_seed(0)
    batches = PLANTED[name](experts, top_k, DRAWS * tokens, generator).split(tokens)
    counts = [by_expert(batch, torch.ones(batch.shape), experts).counts for batch in batches]
    return [(sum(count > 0 for count in batch), batch[0]) for batch in counts]


@pytest.mark.parametrize(
    ("name", "experts", "top_k", "tokens", "published"),
    [("uniform", 8, 2, 3, 4.62), ("uniform", 256, 8, 64, 222.4), ("zipf", 256, 8, 64, 152.2)],
)
def test_planted_gates_reproduce_the_expected_distinct_experts(
    name: str, experts: int, top_k: int, tokens: int, published: float
) -> None:
    probabilities = (even_probabilities if name == "uniform" else zipf_probabilities)(experts, top_k)
    distinct = [count for count, _ in _planted_counts(name, experts, top_k, tokens)]
    error = stdev(distinct) / math.sqrt(DRAWS)
    assert abs(mean(distinct) - expected_distinct_experts(probabilities, tokens)) < 4 * error
    assert abs(mean(distinct) - published) < 0.6


def test_planted_zipf_gate_reproduces_the_busiest_expert() -> None:
    busiest = [first for _, first in _planted_counts("zipf", 256, 8, 64)]
    expected = expected_busiest(zipf_probabilities(256, 8), 64)
    assert abs(mean(busiest) - expected) < 4 * stdev(busiest) / math.sqrt(DRAWS)


def test_even_gate_is_even_and_takes_different_experts() -> None:
    chosen = PLANTED["even"](6, 4, 3, torch.Generator())
    assert torch.bincount(chosen.reshape(-1)).tolist() == [2] * 6
    assert all(len(set(row)) == 4 for row in chosen.tolist())


def test_draws_never_repeat_an_expert_and_follow_the_seed() -> None:
    popularity = torch.tensor([100.0, 1.0, 1.0, 1.0])
    first = draw_experts(popularity, 3, 50, generator=torch.Generator().manual_seed(4))
    again = draw_experts(popularity, 3, 50, generator=torch.Generator().manual_seed(4))
    assert torch.equal(first, again)
    assert all(len(set(row)) == 3 for row in first.tolist())


def test_capacity_drops_second_choices_first_and_later_tokens_first() -> None:
    # Expert 0 is wanted by tokens 0 and 2 first, and by token 1 second.
    chosen = torch.tensor([[0, 1], [1, 0], [0, 2]])
    weights = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]])
    routing = by_expert(chosen, weights, experts=3, limit=2)
    assert routing.counts == (2, 2, 1)
    assert routing.dropped == 1
    assert routing.tokens.tolist() == [0, 2, 1, 0, 2]
    torch.testing.assert_close(routing.weights, torch.tensor([0.9, 0.7, 0.8, 0.1, 0.3]))
    assert by_expert(chosen, weights, experts=3, limit=1).tokens.tolist() == [0, 1, 2]
    assert by_expert(chosen, weights, experts=3).dropped == 0


@pytest.mark.parametrize(("capacity", "limit"), [(1.0, 4), (1.25, 5), (0.5, 2), (1.1, 5)])
def test_the_capacity_factor_is_over_the_even_share(capacity: float, limit: int) -> None:
    planted = torch.zeros(1, 1, dtype=torch.long)
    router = TokenChoice(4, experts=2, top_k=1, capacity=capacity, planted=planted)
    routing = router(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    assert routing.counts == (limit, 0)
    assert routing.dropped == 8 - limit


def test_token_choice_follows_the_gate() -> None:
    router = TokenChoice(2, experts=2, top_k=1)
    with torch.no_grad():
        router.gate.weight.copy_(torch.eye(2))
    routing = router(torch.tensor([[0.0, 9.0], [9.0, 0.0], [0.0, 9.0]]))
    assert routing.counts == (1, 2)
    assert routing.tokens.tolist() == [1, 0, 2]
    torch.testing.assert_close(routing.weights, torch.ones(3))


def test_a_planted_gate_repeats_its_rows() -> None:
    router = TokenChoice(2, experts=3, top_k=1, planted=torch.tensor([[0], [2]]))
    assert router(torch.zeros(5, 2)).counts == (3, 0, 2)


def test_expert_choice_is_even_and_may_leave_a_token_out() -> None:
    router = ExpertChoice(2, experts=2, top_k=1)
    with torch.no_grad():
        router.gate.weight.copy_(torch.eye(2))
    x = torch.tensor([[5.0, 0.0], [0.0, 5.0], [4.0, 0.0], [0.0, 4.0]])
    routing = router(x)
    assert routing.counts == (2, 2)
    assert sorted(routing.tokens[:2].tolist()) == [0, 2]
    assert sorted(routing.tokens[2:].tolist()) == [1, 3]
    both = router(torch.tensor([[5.0, 5.0], [1.0, 0.0]]))
    assert both.counts == (1, 1)
    assert both.tokens.numel() == 2
