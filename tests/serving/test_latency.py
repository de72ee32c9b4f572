"""Latency by cost, and the limits that follow from it or contradict it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch.errors import InvalidProfile, InvalidSettings
from microbatch.serving.decisions.latency import Latency, latency_of, measured_latency, row_of
from microbatch.serving.decisions.limits import UNMEASURED, Wishes, settle
from microbatch.serving.decisions.policies import POLICIES
from tests.serving.views import CLIFF, COMPUTE_BOUND, MEMORY_BOUND, profile_of


def test_rows_are_kept_and_between_them_the_line_is_straight() -> None:
    assert [CLIFF.seconds(size) for size in (1, 16, 32, 33)] == [1.0, 1.2, 1.4, 3.0]
    assert CLIFF.seconds(24) == pytest.approx(1.3)
    assert CLIFF.seconds(80) == pytest.approx(3.3)
    assert Latency({4: 1.0}).seconds(8) == 2.0
    assert Latency({4: 1.0}).seconds(2) == 1.0


def test_a_batch_stops_below_a_cliff_where_that_is_faster_for_all() -> None:
    assert CLIFF.best_size(33) == 32, "1.4 + 1.0 before 3.0"
    assert CLIFF.best_size(20) == 20
    assert CLIFF.best_size(64) == 32, "1.4 + 1.4 before 3.2"
    assert all(MEMORY_BOUND.best_size(size) == size for size in range(1, 65))


@given(st.dictionaries(st.integers(1, 64), st.floats(1e-4, 1.0), min_size=1), st.integers(1, 100))
def test_launching_in_two_is_never_slower_than_in_one(table: dict[int, float], waiting: int) -> None:
    latency = Latency(table)
    first = latency.best_size(waiting)
    assert 1 <= first <= waiting
    if first < waiting:
        assert latency.seconds(first) + latency.seconds(waiting - first) <= 0.97 * latency.seconds(waiting) + 1e-12


def test_launches_correct_the_table() -> None:
    latency = Latency({1: 1.0, 8: 2.0, 16: 3.0})
    for _ in range(200):
        latency.observe(8, 4.0)
        latency.observe(1, 2.0)
    assert latency.seconds(8) == pytest.approx(4.0, rel=0.05)
    assert latency.seconds(1) == pytest.approx(2.0, rel=0.05)
    assert latency.seconds(16) > 4.0, "a machine that is twice as slow is so at sizes that were not seen too"


def test_one_interrupted_launch_changes_little() -> None:
    latency = Latency({1: 1.0, 8: 2.0})
    latency.observe(8, 1000.0)
    assert latency.seconds(8) < 3.0
    assert latency.seconds(1) < 1.2


def test_a_cliff_that_the_profile_did_not_measure_is_learnt() -> None:
    latency = Latency({1: 1.0, 32: 1.4, 64: 1.8})
    for _ in range(60):
        latency.observe(33, 3.0)
        latency.observe(32, 1.4)
    assert latency.best_size(33) <= 32


def test_the_largest_cost_within_some_seconds() -> None:
    line = Latency({1: 1.1, 11: 2.1})
    assert line.cost_within(1.6) == 6
    assert 100 <= line.cost_within(11.05) <= 101, "beyond the rows too"
    assert line.cost_within(0.5) == 1
    assert CLIFF.cost_within(2.0) == 32
    assert Latency({32: 0.32}).cost_within(0.05) == 5


def test_nothing_known_is_learnt_from_the_first_launch() -> None:
    latency = Latency()
    assert not latency.known
    latency.observe(4, 0.5)
    assert latency.seconds(4) == 0.5


@given(st.integers(1, 10**6))
def test_a_row_is_at_most_an_eighth_of_an_octave_above(cost: int) -> None:
    assert cost <= row_of(cost) <= max(cost, cost * 1.13)


def test_filling_up_pays_where_a_larger_size_is_faster() -> None:
    latency = Latency({1: 1.0, 2: 3.0, 3: 2.5, 4: 2.0, 8: 2.4})
    assert [latency.padded_size(size, 8) for size in (1, 2, 3, 4, 5)] == [1, 4, 4, 4, 5]
    assert latency.padded_size(2, 3) == 3


def test_a_profile_gives_the_median_of_each_size() -> None:
    assert latency_of(profile_of({1: 1.0, 4: 2.0})).curve() == ((1, 1.0), (4, 2.0))


def test_a_profile_of_sequences_counts_tokens() -> None:
    profile = profile_of({1: 1.0, 4: 2.0}, unit="sequences", sequence=128)
    assert latency_of(profile, tokens=True).curve() == ((128, 1.0), (512, 2.0))
    with pytest.raises(InvalidProfile, match="rows of unknown length"):
        latency_of(profile_of({1: 1.0}), tokens=True)
    with pytest.raises(InvalidProfile, match="training"):
        latency_of(profile_of({1: 1.0}, mode="training"))


def test_measured_is_the_least_after_a_first_call() -> None:
    calls: dict[int, list[float]] = {1: [9.0, 1.2, 1.0, 1.1], 2: [9.0, 2.0, 2.2, 2.1]}
    assert measured_latency(lambda size: calls[size].pop(0), (1, 2)).curve() == ((1, 1.0), (2, 2.0))


# Limits.


def test_sizes_follow_from_the_latency() -> None:
    assert settle(Wishes(), MEMORY_BOUND).max_batch_size == 64
    assert settle(Wishes(latency_target=0.008), MEMORY_BOUND).max_batch_size == 8, "one batch ahead, and its own"
    assert settle(Wishes(), Latency()).max_batch_size == UNMEASURED
    assert settle(Wishes(max_batch_size=5), MEMORY_BOUND).max_batch_size == 5
    assert settle(Wishes(), CLIFF).max_batch_size == 32


def test_it_says_when_batching_cannot_help() -> None:
    limits = settle(Wishes(), COMPUTE_BOUND)
    assert limits.max_batch_size == 1
    assert "cannot help" in limits.notes[0]
    assert settle(Wishes(), MEMORY_BOUND).notes == ()
    slightly = Latency({1: 1.0, 2: 1.9, 4: 3.75})
    assert settle(Wishes(), slightly).max_batch_size == 1, "7 % more throughput for nearly four times the latency"


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        (Wishes(max_batch_size=0), "max_batch_size=0"),
        (Wishes(max_queue=True), "max_queue=True"),
        (Wishes(max_queue_delay=-1.0), "max_queue_delay=-1.0"),
        (Wishes(latency_target=float("nan")), "latency_target=nan"),
        (Wishes(policy="fixed_window"), "needs max_queue_delay"),
        (Wishes(policy="token_budget"), "needs token_budget"),
        (Wishes(policy="launch_when_free", max_queue_delay=0.01), "says nothing"),
        (Wishes(policy="fastest"), "no policy 'fastest'"),
        (Wishes(max_queue_delay=0.02, latency_target=0.01), "leaves nothing"),
        (Wishes(latency_target=0.002), "one request takes 3.1 ms alone"),
        (Wishes(latency_target=0.005, max_batch_size=64), "9.4 ms, above the target of 5 ms; 16 would keep it"),
        (Wishes(latency_target=0.005, max_queue_delay=0.0045), "alone after a queue delay"),
    ],
)
def test_contradictions_are_one_error(wishes: Wishes, said: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        settle(wishes, MEMORY_BOUND)
    assert said in str(caught.value)
    assert caught.value.remedy


def test_all_contradictions_are_told_at_once() -> None:
    with pytest.raises(InvalidSettings, match=r"max_batch_size=0.*max_queue=0"):
        settle(Wishes(max_batch_size=0, max_queue=0), Latency())


def test_a_plain_function_is_a_policy() -> None:
    decide = POLICIES["launch_when_free"].decide
    assert settle(Wishes(policy=decide, max_queue_delay=0.01), Latency()).policy == "launch_when_free"
