"""Expected experts per batch, against enumeration and published figures."""

from __future__ import annotations

from itertools import permutations
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch.errors import InvalidSettings
from microbatch.roofline.routing import (
    even_probabilities,
    expected_busiest,
    expected_distinct_experts,
    inclusion_probabilities,
    zipf_probabilities,
)


def _enumerated(popularity: list[float], top_k: int) -> list[float]:
    """Every order in which `top_k` experts can be drawn, with its chance."""
    chances = [0.0] * len(popularity)
    for order in permutations(range(len(popularity)), top_k):
        left = [sum(popularity) - sum(popularity[e] for e in order[:place]) for place in range(top_k)]
        chance = prod(popularity[e] / rest for e, rest in zip(order, left))
        for expert in order:
            chances[expert] += chance
    return chances


@given(
    st.lists(st.floats(0.01, 100), min_size=1, max_size=6).flatmap(
        lambda rates: st.tuples(st.just(rates), st.integers(1, len(rates)))
    )
)
def test_inclusion_probabilities_equal_enumeration(case: tuple[list[float], int]) -> None:
    popularity, top_k = case
    assert inclusion_probabilities(popularity, top_k) == pytest.approx(_enumerated(popularity, top_k), abs=1e-9)


def test_published_figures() -> None:
    assert expected_distinct_experts(even_probabilities(8, 2), 3) == 4.625
    assert expected_distinct_experts(even_probabilities(256, 8), 64) == pytest.approx(222.4, abs=0.05)
    zipf = zipf_probabilities(256, 8)
    assert expected_distinct_experts(zipf, 64) == pytest.approx(152.2, abs=0.5)
    assert expected_busiest(zipf, 64) == pytest.approx(50, abs=0.5)
    assert expected_busiest(even_probabilities(256, 8), 64) == 2


def test_probabilities_add_up_to_the_choices_of_a_token() -> None:
    assert sum(zipf_probabilities(64, 6)) == pytest.approx(6, abs=1e-9)
    assert zipf_probabilities(5, 5) == pytest.approx([1] * 5)
    assert zipf_probabilities(7, 1) == pytest.approx([1 / rank / (363 / 140) for rank in range(1, 8)])


def test_exponent_zero_is_even() -> None:
    assert zipf_probabilities(16, 3, exponent=0) == pytest.approx(even_probabilities(16, 3))


def test_an_expert_without_popularity_is_never_picked() -> None:
    assert inclusion_probabilities([1, 0, 1], 2) == pytest.approx([1, 0, 1])


@pytest.mark.parametrize(("experts", "top_k"), [(4, 5), (4, 0), (0, 1)])
def test_impossible_choices_are_refused(experts: int, top_k: int) -> None:
    for make in (even_probabilities, zipf_probabilities):
        with pytest.raises(InvalidSettings, match=f"{top_k} of {experts}"):
            make(experts, top_k)
    with pytest.raises(InvalidSettings, match="2 of 1"):
        inclusion_probabilities([1, 0], 2)
