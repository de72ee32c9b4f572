"""Quantiles of counted latencies, beside sorting all of them."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch.web.load.histogram import ERROR, LEAST, Histogram

SECONDS = st.floats(2e-6, 3600.0)
SHARES = st.sampled_from((0.0, 0.1, 0.5, 0.9, 0.99, 0.999, 1.0))


def counted(values: list[float]) -> Histogram:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    return histogram


@given(values=st.lists(SECONDS, min_size=1, max_size=300), share=SHARES)
def test_a_quantile_is_off_by_half_a_percent_at_most(values: list[float], share: float) -> None:
    true = sorted(values)[max(ceil(share * len(values) - 1e-9), 1) - 1]
    assert counted(values).quantile(share) == pytest.approx(true, rel=ERROR * 1.001)
    assert ERROR < 0.00501


@given(values=st.lists(SECONDS, min_size=1, max_size=50))
def test_the_largest_and_the_number_are_exact(values: list[float]) -> None:
    histogram = counted(values)
    assert histogram.quantile(1.0) == max(values)
    assert histogram.count == len(values) == sum(count for _, count in histogram.rows())


def test_the_p99_of_a_hundred_is_the_ninety_ninth() -> None:
    histogram = counted([0.001] * 99 + [1.0])
    assert histogram.quantile(0.99) == pytest.approx(0.001, rel=0.006)
    assert histogram.quantile(0.991) == 1.0


def test_rows_are_ascending_upper_edges() -> None:
    values = [0.003, 0.0031, 0.5, 0.0]
    rows = counted(values).rows()
    assert [edge for edge, _ in rows] == sorted(edge for edge, _ in rows)
    for value in values:
        assert sum(count for edge, count in rows if edge >= value) >= 1
    assert rows[0][0] == pytest.approx(LEAST * 1.01)


def test_nothing_has_no_quantile() -> None:
    assert Histogram().quantile(0.5) is None
    assert Histogram().rows() == ()
