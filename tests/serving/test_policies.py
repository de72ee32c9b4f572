"""Policies as functions of a view, and over simulated requests: every row of the table keeps the common rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from microbatch.serving.decisions import policies
from microbatch.serving.decisions.choose import MOST_PADDED, fitting, work_of
from microbatch.serving.decisions.policies import POLICIES
from microbatch.serving.decisions.queue import HEAD_START, Entry, Reply, RequestQueue
from microbatch.serving.decisions.simulate import simulate
from microbatch.serving.decisions.traffic import bursts, poisson
from microbatch.serving.decisions.view import NEVER, Pace, Waiting
from tests.serving.views import CLIFF, MEMORY_BOUND, limits_of, view_of

NAMES = sorted(POLICIES)

waiting_items = st.lists(
    st.builds(
        Waiting,
        arrived=st.floats(0, 1),
        cost=st.integers(1, 600),
        length=st.integers(1, 600),
        deadline=st.one_of(st.just(NEVER), st.floats(1, 3)),
        priority=st.integers(-2, 2),
        key=st.sampled_from((None, "a", "b")),
    ),
    min_size=1,
    max_size=40,
)


def in_order(items: Sequence[Waiting]) -> list[Waiting]:
    queue = RequestQueue(len(items))
    for number, item in enumerate(items):
        queue.add(Entry(None, item, number, Reply(1)))
    return queue.first(len(items))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30)
@given(items=waiting_items, most=st.integers(1, 40), now=st.floats(1, 2))
def test_a_launch_is_within_its_limits(name: str, items: list[Waiting], most: int, now: float) -> None:
    ordered, limits = in_order(items), limits_of(name)
    view = view_of(
        ordered, now=now, max_batch_size=most, max_queue_delay=limits.max_queue_delay, token_budget=limits.token_budget
    )
    decision = limits.decide(view)
    assert decision.reason
    if not decision.launch:
        assert decision.until > now
        return
    places = list(decision.launch)
    chosen = [ordered[place] for place in places]
    assert places == sorted(set(places))
    assert len(places) <= most
    assert len({each.key for each in chosen}) == 1
    lengths = [each.length for each in chosen]
    assert len(chosen) * max(lengths) <= MOST_PADDED * sum(lengths)
    if limits.token_budget is not None:
        assert len(chosen) == 1 or work_of(chosen) <= limits.token_budget


@pytest.mark.parametrize("name", [name for name in NAMES if name != "deadline_aware"])
@settings(max_examples=20)
@given(items=waiting_items, most=st.integers(1, 40))
def test_the_head_of_the_queue_is_in_every_launch(name: str, items: list[Waiting], most: int) -> None:
    limits = limits_of(name)
    view = view_of(in_order(items), now=99.0, max_batch_size=most, max_queue_delay=0.01, token_budget=4096)
    decision = limits.decide(view)
    assert not decision.launch or decision.launch[0] == 0


@example(lengths=[10, 9, 9, 9, 9, 30], most=8)
@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=12), most=st.integers(1, 8))
def test_no_run_of_lengths_around_the_head_is_larger(lengths: list[int], most: int) -> None:
    items = [Waiting(0.0, length, length) for length in lengths]
    chosen = fitting(view_of(items, token_budget=800, uniform=False), most)
    order = sorted(range(len(items)), key=lambda place: (lengths[place], place))
    head, best = order.index(0), 1
    for low in range(head + 1):
        for high in range(head, len(order)):
            run = [lengths[place] for place in order[low : high + 1]]
            padded = len(run) * max(run)
            if len(run) <= most and padded <= MOST_PADDED * sum(run) and padded <= 800:
                best = max(best, len(run))
    if len(set(lengths)) > 1:
        assert len(chosen) == best


def test_keys_share_no_batch() -> None:
    items = [Waiting(0.0, key=key) for key in ("a", "b", "a", None, "b", "a")]
    assert list(fitting(view_of(items), 8)) == [0, 2, 5]


def test_items_of_one_length_go_in_order_of_service() -> None:
    items = [Waiting(0.0, 8, 8) for _ in range(10)]
    assert list(fitting(view_of(items, uniform=False), 4)) == [0, 1, 2, 3]
    assert list(fitting(view_of(items, uniform=False, token_budget=17), 4)) == [0, 1]


# A fixed clock: each case is one view and what must be decided.


def alike(*arrivals: float) -> list[Waiting]:
    return [Waiting(arrived) for arrived in arrivals]


def test_a_window_opens_with_its_first_item() -> None:
    view = view_of(alike(1.0, 1.004), now=1.005, max_queue_delay=0.01)
    decision = policies.fixed_window(view)
    assert not decision.launch
    assert decision.until == pytest.approx(1.01)
    late = policies.fixed_window(view._replace(now=1.0101))
    assert (list(late.launch), late.reason) == ([0, 1], policies.WINDOW)
    full = policies.fixed_window(view._replace(max_batch_size=2))
    assert (list(full.launch), full.reason) == ([0, 1], policies.FULL)


def test_a_lone_client_is_launched_at_once() -> None:
    """It comes back one batch after its answer: its gaps are all alike, and nobody else is owed."""
    pace = Pace(gap=4e-3, mean_gap=4e-3, last_arrival=5.0, answered_at=4.9995, owed=0, return_time=5e-4)
    decision = policies.marginal_gain(view_of(alike(5.0), now=5.0, free_since=4.9995, pace=pace))
    assert (list(decision.launch), decision.reason) == ([0], policies.ALL_BACK)


def test_independent_requests_never_wait() -> None:
    """Median over mean of exponential gaps is ln 2, at every rate."""
    for rate in (10, 100, 300, 1000, 5000):
        pace = Pace(gap=0.693 / rate, mean_gap=1 / rate, last_arrival=5.0, answered_at=1.0, return_time=1.0)
        for count in (1, 3, 10):
            view = view_of(alike(*[5.0] * count), now=5.0, free_since=5.0, pace=pace)
            assert len(policies.marginal_gain(view).launch) == count


def test_those_just_answered_are_waited_for_when_they_come_back_soon() -> None:
    pace = Pace(gap=1e-4, mean_gap=1e-3, last_arrival=5.0, answered_at=5.001, owed=4, return_time=4e-4)
    view = view_of(alike(*[5.0] * 4), now=5.001, free_since=5.001, pace=pace)
    decision = policies.marginal_gain(view)
    assert (list(decision.launch), decision.reason) == ([], policies.GATHER_RETURNING)
    assert decision.until == pytest.approx(5.001 + 2 * 4e-4)
    slow = pace._replace(return_time=3e-3)  # as long as a batch: then it does not pay
    assert len(policies.marginal_gain(view._replace(pace=slow)).launch) == 4
    back = pace._replace(owed=0)
    assert policies.marginal_gain(view._replace(pace=back, now=5.0012)).reason == policies.ALL_BACK


def test_a_burst_is_gathered_until_it_is_silent() -> None:
    pace = Pace(gap=1e-4, mean_gap=5e-2, last_arrival=5.0002, answered_at=4.0, return_time=1.0)
    view = view_of(alike(5.0, 5.0001, 5.0002), now=5.0002, free_since=4.5, pace=pace)
    decision = policies.marginal_gain(view)
    assert not decision.launch
    assert decision.until == pytest.approx(5.0005)
    assert len(policies.marginal_gain(view._replace(now=5.00051)).launch) == 3


def test_without_a_latency_nothing_waits() -> None:
    decision = policies.marginal_gain(view_of(alike(0.0), latency=None))
    assert (list(decision.launch), decision.reason) == ([0], policies.UNKNOWN)


@pytest.mark.parametrize("name", NAMES)
def test_no_policy_waits_beyond_the_delay_that_was_set(name: str) -> None:
    pace = Pace(gap=1e-4, mean_gap=1e-1, last_arrival=5.0, answered_at=4.9999, owed=30, return_time=1e-3)
    view = view_of(alike(4.9), now=5.0, free_since=4.9999, pace=pace, max_queue_delay=0.05)
    assert list(limits_of(name).decide(view).launch) == [0]


@pytest.mark.parametrize("deadline", [NEVER, 60.0])
def test_a_batch_stops_below_a_cliff_with_deadlines_and_without(deadline: float) -> None:
    items = [Waiting(0.0, deadline=deadline)] * 40
    decision = policies.marginal_gain(view_of(items, latency=CLIFF, max_batch_size=64))
    assert list(decision.launch) == list(range(32))
    longer = [each._replace(cost=2, length=2) for each in items]
    assert len(policies.marginal_gain(view_of(longer, latency=CLIFF, max_batch_size=64)).launch) == 40


def test_a_deadline_bounds_the_wait() -> None:
    pace = Pace(gap=1e-4, mean_gap=1e-1, last_arrival=5.0, answered_at=1.0, return_time=1.0)
    item = Waiting(5.0, deadline=5.0 + 3.1e-3 * 1.1 + 1e-4)
    decision = policies.marginal_gain(view_of([item], now=5.0, free_since=4.0, pace=pace))
    assert decision.until == pytest.approx(5.0001)
    assert policies.marginal_gain(view_of([item], now=5.0002, free_since=4.0, pace=pace)).reason == policies.LATEST


def test_a_batch_shrinks_to_meet_its_first_deadline() -> None:
    items = [Waiting(0.0, deadline=1.0 + 3.45e-3), *[Waiting(0.0)] * 20]
    decision = policies.deadline_aware(view_of(items, now=1.0))
    assert (len(decision.launch), decision.reason) == (4, policies.LATEST)


def test_what_cannot_be_met_is_left_to_expire() -> None:
    items = [Waiting(0.0, deadline=1.001), Waiting(0.0, deadline=2.0)]
    assert list(policies.deadline_aware(view_of(items, now=1.0)).launch) == [1]
    alone = policies.deadline_aware(view_of(items[:1], now=1.0))
    assert (list(alone.launch), alone.until) == ([], 1.001)


# Over simulated time.


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), rate=st.sampled_from((50, 500, 3000)), most=st.integers(1, 40))
def test_every_request_is_answered_once(name: str, seed: int, rate: int, most: int) -> None:
    found = simulate(poisson(rate, 100, seed), MEMORY_BOUND, limits_of(name, most))
    assert (found.answered, found.refused, found.expired) == (100, 0, 0)
    assert found.mean_batch <= most
    assert found.p50 >= MEMORY_BOUND.seconds(1) - 1e-9


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), slack=st.floats(4e-3, 5e-2))
def test_deadline_aware_launches_nothing_that_will_be_late(seed: int, slack: float) -> None:
    times = bursts(2500, 150, seed, size=40, gap=1e-4)
    requests = [Waiting(time, deadline=time + slack * (1 + number % 3)) for number, time in enumerate(times.tolist())]
    aware = simulate(requests, MEMORY_BOUND, limits_of("deadline_aware"))
    assert aware.late == 0
    assert aware.answered + aware.expired == 150


@pytest.mark.parametrize("name", NAMES)
def test_lengths_share_batches_within_the_bound_of_padding(name: str) -> None:
    times = poisson(1500, 800, 3).tolist()
    lengths = [16 if number % 5 else 500 for number in range(800)]
    requests = [Waiting(time, length, length) for time, length in zip(times, lengths)]
    limits = replace(limits_of(name), max_batch_size=16)
    slow = type(MEMORY_BOUND)({tokens: 2e-3 + 2e-6 * tokens for tokens in (16, 256, 1024, 4096, 8192)})
    found = simulate(requests, slow, limits)
    assert found.padded_over_real <= MOST_PADDED
    assert found.answered == 800


def test_order_of_service() -> None:
    items = [
        Waiting(0.0),
        Waiting(0.1),
        Waiting(0.2, deadline=1.0),
        Waiting(0.3, deadline=0.9),
        Waiting(0.4, priority=1),
        Waiting(0.5, priority=1, deadline=0.6),
        Waiting(HEAD_START + 0.7, priority=1),
    ]
    assert [items.index(each) for each in in_order(items)] == [5, 4, 3, 2, 0, 1, 6]
