"""The choice of a size, on curves whose answer is known."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch.curves import objective

SIZES = np.array([1, 2, 4, 8, 16, 32, 64, 128], dtype=float)


def test_smallest_near_best_takes_the_smallest_within_two_percent() -> None:
    throughput = np.array([10, 20, 40, 80, 97.9, 98.1, 100, 99], dtype=float)
    assert SIZES[objective.smallest_near_best(SIZES, SIZES / throughput)] == 32


def test_smallest_near_best_stays_out_of_zones_where_it_can() -> None:
    throughput = np.array([10, 20, 40, 80, 97.9, 98.1, 100, 99], dtype=float)
    seconds = SIZES / throughput
    assert SIZES[objective.smallest_near_best(SIZES, seconds, avoid={32})] == 64
    assert SIZES[objective.smallest_near_best(SIZES, seconds, avoid={32, 64, 128})] == 32


@given(st.floats(1.0, 5.0), st.floats(3.0, 40.0))
def test_balanced_lies_at_the_ridge_for_every_exponent(p: float, ridge: float) -> None:
    sizes = np.arange(1, 200, dtype=float)
    seconds = (ridge**p + sizes**p) ** (1 / p)
    assert abs(sizes[objective.most_balanced(sizes, seconds)] - ridge) <= 1.0


def test_first_at_share_is_the_first_to_reach_90_percent() -> None:
    throughput = np.array([10, 20, 40, 80, 89, 91, 100, 99], dtype=float)
    assert SIZES[objective.first_at_share(SIZES, SIZES / throughput)] == 32


def test_pad_target_follows_its_definition() -> None:
    sizes = np.array([128, 136, 144, 152, 160, 280], dtype=float)
    seconds = np.array([71, 126, 95.5, 87, 87.5, 60]) * 1e-6
    target = objective.pad_target(sizes, seconds, 1)
    assert target is not None
    assert sizes[target] == 152  # 280 is more than twice 136
    assert objective.pad_target(sizes, seconds, 0) is None


def test_zone_ends_where_the_throughput_before_it_is_reached_again() -> None:
    sizes = np.array([64, 72, 80, 96, 128, 160], dtype=float)
    throughput = np.array([100, 70, 80, 99, 101, 120], dtype=float)
    assert sizes[objective.zone_end(sizes, sizes / throughput, 1)] == 96
    assert sizes[objective.zone_end(sizes, sizes / throughput, 1, pad=3)] == 80


@pytest.mark.parametrize("period", [4, 32, 128])
def test_period_of_regular_rises(period: int) -> None:
    sizes = sorted({*range(1, 16), *range(8, 1025, 8), *(k * period + 1 for k in range(1, 1024 // period))})
    edges = [(low, high) for low, high in pairwise(sizes) if -(-low // period) * period < high][:9]
    assert objective.common_period(edges, [size for size in sizes if size <= edges[-1][1] + 8]) == period


def test_irregular_rises_have_no_period() -> None:
    sizes = list(range(8, 1025, 8))
    assert objective.common_period([(64, 72), (104, 112), (300, 304), (512, 520), (888, 896)], sizes) is None
