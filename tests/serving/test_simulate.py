"""Simulated servers against what can be said in closed form, and the dry run that is made of them."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import microbatch
from microbatch.errors import InvalidSettings
from microbatch.serving.decisions.dry_run import dry_run, spread_of
from microbatch.serving.decisions.latency import Latency
from microbatch.serving.decisions.limits import Wishes, settle
from microbatch.serving.decisions.policies import POLICIES
from microbatch.serving.decisions.simulate import simulate, simulate_clients
from microbatch.serving.decisions.traffic import TRAFFIC, bursts, from_trace, poisson, uniform
from microbatch.serving.decisions.view import QueueView, Waiting, wait
from tests.serving.views import COMPUTE_BOUND, MEMORY_BOUND, limits_of, profile_of

T1, T8, T32 = (MEMORY_BOUND.seconds(size) for size in (1, 8, 32))
TURN = 3e-4
"""Seconds from an answer to the next request of a client."""


def test_slow_requests_take_one_batch_of_one() -> None:
    found = simulate(uniform(10, 100), MEMORY_BOUND, limits_of("launch_when_free"))
    assert [found.p50, found.p99] == pytest.approx([T1, T1])
    assert found.mean_batch == 1.0


def test_one_worker_without_batches_is_a_queue_with_a_known_wait() -> None:
    """Poisson arrivals and a constant service: the mean wait is load * t / (2 (1 - load)) (Pollaczek-Khinchine)."""
    load, limits = 0.8, limits_of("launch_when_free", max_batch_size=1)
    times = poisson(load / T1, 50_000, 1)
    found = simulate(times, MEMORY_BOUND, limits)
    waits, free = [], 0.0
    for arrived in times.tolist():  # Lindley's recursion
        start = max(free, arrived)
        waits.append(start - arrived)
        free = start + T1
    assert found.p50 == pytest.approx(float(np.median(waits)) + T1, rel=1e-6)
    assert found.p99 == pytest.approx(float(np.percentile(waits, 99)) + T1, rel=1e-6)
    assert float(np.mean(waits)) == pytest.approx(load * T1 / (2 * (1 - load)), rel=0.2)


def test_workers_share_the_work() -> None:
    limits = limits_of("launch_when_free", max_batch_size=8)
    one, two = (simulate(np.zeros(8000), MEMORY_BOUND, limits, workers=workers).throughput for workers in (1, 2))
    assert one == pytest.approx(8 / T8)
    assert two == pytest.approx(16 / T8)


@pytest.mark.parametrize(("clients", "batch"), [(1, 1), (2, 2), (8, 8), (32, 32)])
def test_clients_in_a_loop_are_gathered_into_one_batch(clients: int, batch: int) -> None:
    """All clients in each batch: ``clients / (t(clients) + turn)``; two cohorts of half batches reach far less."""
    found = simulate_clients(clients, 2000, MEMORY_BOUND, limits_of("marginal_gain"), think=TURN, stagger=1e-3)
    assert found.throughput == pytest.approx(batch / (MEMORY_BOUND.seconds(batch) + TURN), rel=0.05)


def test_clients_that_launching_at_once_splits() -> None:
    free = simulate_clients(8, 2000, MEMORY_BOUND, limits_of("launch_when_free"), think=TURN, stagger=1e-3)
    ours = simulate_clients(8, 2000, MEMORY_BOUND, limits_of("marginal_gain"), think=TURN, stagger=1e-3)
    window = simulate_clients(1, 2000, MEMORY_BOUND, limits_of("fixed_window"), think=TURN, stagger=1e-3)
    alone = simulate_clients(1, 2000, MEMORY_BOUND, limits_of("marginal_gain"), think=TURN, stagger=1e-3)
    assert ours.throughput > 1.5 * free.throughput
    assert alone.throughput > 3 * window.throughput


@pytest.mark.parametrize("rate", [50, 150, 250, 500, 1000, 2000])
def test_independent_requests_wait_no_longer_than_without_a_policy(rate: int) -> None:
    times = poisson(rate, 4000, 2)
    ours, free = (simulate(times, MEMORY_BOUND, limits_of(name)) for name in ("marginal_gain", "launch_when_free"))
    assert ours.p50 <= 1.05 * free.p50
    assert ours.p99 <= 1.05 * free.p99


def test_bursts_are_gathered() -> None:
    times = bursts(100, 3000, 4, size=8, gap=5e-5)
    ours, free = (simulate(times, MEMORY_BOUND, limits_of(name)) for name in ("marginal_gain", "launch_when_free"))
    assert ours.p50 < 0.8 * free.p50


def test_a_burst_that_stops_at_the_cliff() -> None:
    latency = Latency({1: 1e-3, 32: 1.4e-3, 33: 3e-3, 64: 3.2e-3})
    found = simulate(np.zeros(64), latency, limits_of("launch_when_free", max_batch_size=64))
    assert found.mean_batch == 32
    assert found.throughput == pytest.approx(64 / 2.8e-3)


def test_the_bound_of_the_queue_is_exact() -> None:
    found = simulate([0.0, *[1e-3] * 10], MEMORY_BOUND, limits_of("launch_when_free", max_queue=4))
    assert (found.answered, found.refused) == (5, 6)


def test_deadlines_expire_in_the_queue_and_while_running() -> None:
    requests = [Waiting(0.0), Waiting(1e-3, deadline=2e-3), Waiting(1e-3, deadline=5e-3), Waiting(1e-3, deadline=1.0)]
    found = simulate(requests, MEMORY_BOUND, limits_of("launch_when_free"))
    assert (found.answered, found.expired, found.late) == (2, 2, 1)


def test_a_policy_that_waits_for_the_past_is_refused() -> None:
    def stuck(view: QueueView) -> object:
        return wait(view.now, "now")

    limits = replace(limits_of("launch_when_free"), decide=stuck)  # type: ignore[arg-type]
    with pytest.raises(InvalidSettings, match="has passed"):
        simulate([0.0], MEMORY_BOUND, limits)


def test_the_time_of_a_batch_varies_as_it_was_measured() -> None:
    profile = profile_of({1: 1e-3, 8: 2e-3})
    ratios = spread_of(profile)
    assert sorted(set(np.round(ratios, 3))) == [0.9, 1.0, 1.2]
    found = simulate(uniform(10, 3000), Latency({1: 1e-3}), limits_of("launch_when_free"), ratios=ratios)
    assert [found.p50, found.p99] == pytest.approx([1e-3, 1.2e-3])


@pytest.mark.parametrize("name", sorted(TRAFFIC))
def test_traffic_comes_at_its_rate(name: str) -> None:
    times = TRAFFIC[name](200.0, 20_000, 5)
    assert len(times) == 20_000
    assert (np.diff(times) >= 0).all()
    assert 20_000 / times[-1] == pytest.approx(200, rel=0.05)
    with pytest.raises(InvalidSettings, match="no traffic"):
        TRAFFIC[name](0.0, 10, 0)


def test_a_trace_is_read(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("seconds,path\n# a comment\n10.5,/a\n10.0,/b\n")
    assert from_trace(trace).tolist() == [0.0, 0.5]
    for text, said in (("a\nb\n", "not a number"), ("", "no times"), ("inf\n", "no times")):
        trace.write_text(text)
        with pytest.raises(InvalidSettings, match=said):
            from_trace(trace)
    with pytest.raises(InvalidSettings, match="cannot be read"):
        from_trace(tmp_path / "none.csv")


# The dry run.


def test_the_maximum_rate_is_that_of_full_batches(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    microbatch.save(profile_of(dict(MEMORY_BOUND.curve())), path)
    found = dry_run(path, Wishes(max_batch_size=32), rates=[100.0, 1e6])
    mean = np.mean([0.9, 1.0, 1.2])
    assert found.max_rate == pytest.approx(32 / (T32 * mean), rel=0.02)
    assert found.at[0].p50 == pytest.approx(T1, rel=0.25)
    assert (found.at[1].p50, found.at[1].p99) == (None, None)
    document = found.to_json()
    assert set(document) >= {
        "schema_version",
        "max_rate",
        "at",
        "policy",
        "max_batch_size",
        "curve",
        "what_if",
        "notes",
    }
    assert set(document["at"][0]) == {"rate", "p50", "p99", "mean_batch"}


def test_other_limits_are_tried() -> None:
    found = dry_run(MEMORY_BOUND, Wishes(max_batch_size=32), requests=2000)
    assert [other.max_batch_size for other in found.what_if] == [1, 16, 64]
    assert found.what_if[0].max_rate == pytest.approx(1 / T1, rel=1e-6)
    assert [row.rate for row in found.at] == [pytest.approx(share * found.max_rate) for share in (0.25, 0.5, 0.75, 0.9)]
    rising = [row.p99 for row in found.at]
    assert all(p99 is not None for p99 in rising)


def test_a_dry_run_says_that_batching_cannot_help() -> None:
    found = dry_run(COMPUTE_BOUND, requests=100)
    assert found.max_batch_size == 1
    assert "cannot help" in found.notes[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [({"traffic": "floods"}, "no traffic"), ({"rates": [-1.0]}, "-1.0"), ({"rates": [math.nan]}, "nan")],
)
def test_a_dry_run_refuses_nonsense(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidSettings, match=said):
        dry_run(MEMORY_BOUND, **arguments)  # type: ignore[arg-type]
    with pytest.raises(InvalidSettings, match="Nothing is known"):
        dry_run(Latency())


def test_a_hundred_thousand_requests_take_a_moment() -> None:
    """A bound against a mistake of order, not a measurement."""
    start = time.process_time()
    simulate(poisson(2000, 100_000, 0), MEMORY_BOUND, settle(Wishes(), MEMORY_BOUND))
    assert time.process_time() - start < 10


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_the_same_seed_gives_the_same_answer(name: str) -> None:
    first, again = (simulate(poisson(700, 2000, 9), MEMORY_BOUND, limits_of(name)) for _ in range(2))
    assert first == again
