"""Which sizes a prediction computes: every step of the time model on both sides, nothing twice, nothing too large."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch.profiling.predict_sizes import (
    LARGEST_BATCH,
    LEAST_EXCESS,
    choose_sizes,
    reach,
    rising_pairs,
)


def staircase(period: int, fixed: float = 1.0, each: float = 0.01) -> object:
    return lambda size: fixed + each * period * ceil(size / period)


@given(st.sampled_from([3, 4, 7, 16, 32, 48, 64, 100, 128, 192]), st.integers(300, 3000))
def test_every_step_is_there_with_its_own_edge(period: int, top: int) -> None:
    def seconds(size: int) -> float:
        return 1.0 + 0.05 * period * ceil(size / period)

    sizes = choose_sizes(seconds, top)
    assert sizes[0] == 1
    assert sizes[-1] == top
    found = rising_pairs(sizes, seconds)
    assert all(high - low == 1 for low, high in found)
    edges = [
        edge for edge in range(period, top, period) if seconds(edge + 1) / seconds(edge) * edge / (edge + 1) >= 1.1
    ]
    assert {edge for edge in edges if edge % 8 == 0 or edge < 16} <= {low for low, _ in found}


def test_a_lone_jump_between_the_multiples_is_found_by_halving() -> None:
    def seconds(size: int) -> float:
        return 1.0 + 0.001 * size + (0.6 if size > 147 else 0.0)

    assert rising_pairs(choose_sizes(seconds, 1000), seconds) == [(147, 148)]


def test_a_smooth_curve_has_no_steps_and_a_close_grid() -> None:
    def seconds(size: int) -> float:
        return float((1 + (0.01 * size) ** 1.5) ** (1 / 1.5))

    sizes = choose_sizes(seconds, 4096)
    assert rising_pairs(sizes, seconds) == []
    assert all(high <= 1.13 * low or high - low == 1 for low, high in pairwise(sizes))
    assert len(sizes) < 100


def test_sizes_that_were_asked_for_are_computed() -> None:
    assert {37, 41, 999} <= set(choose_sizes(lambda size: 1.0 + size, 1024, [37, 41, 999]))


@pytest.mark.parametrize("limit", [1, 2, 3, 17, 100])
def test_a_small_limit_is_the_largest_size(limit: int) -> None:
    top, ended = reach(lambda size: 1.0, limit)
    assert (top, ended) == (limit, "limit")
    assert choose_sizes(lambda size: 1.0, limit) == tuple(range(1, limit + 1))[:limit] or limit > 16


def test_the_search_ends_where_throughput_does() -> None:
    top, ended = reach(lambda size: max(1.0, size / 200), LARGEST_BATCH)
    assert ended == "saturated"
    assert 400 <= top <= 2048


def test_the_threshold_is_that_of_a_cliff() -> None:
    assert LEAST_EXCESS == 1.05
