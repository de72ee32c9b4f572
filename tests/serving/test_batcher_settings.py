"""The engine's settings and its start, and what follows from both while it serves."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from typing import Any

import pytest

import microbatch
from microbatch.errors import InvalidOutput, InvalidSettings, ModelFailed, RequestTooLarge
from microbatch.serving.decisions.policies import POLICIES
from microbatch.serving.decisions.view import Decision, QueueView, wait
from microbatch.serving.engine.batcher import DynamicBatcher
from tests.serving.engines import LONG, Held, serving, until
from tests.serving.functions import double, poisoned


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_serves(policy: str) -> None:
    needs = POLICIES[policy].needs
    settings: dict[str, Any] = {"policy": policy}
    settings |= {"max_queue_delay": 0.005} if "max_queue_delay" in needs else {}
    settings |= {"token_budget": 64, "length": int} if "token_budget" in needs else {}

    async def ask(engine: DynamicBatcher) -> Any:
        return await asyncio.gather(*(engine.submit(1 + number % 9, deadline=LONG) for number in range(200)))

    with serving(double, max_batch_size=16, **settings) as engine:
        assert asyncio.run(ask(engine)) == [2 * (1 + number % 9) for number in range(200)]


def test_a_policy_of_ones_own_and_one_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    def three(view: QueueView) -> Decision:
        if len(view.waiting) > 3:
            raise RuntimeError("more than three")
        return Decision(range(3), math.inf, "three") if len(view.waiting) == 3 else wait(view.now + LONG, "fewer")

    async def ask(engine: DynamicBatcher, count: int) -> Any:
        return await asyncio.gather(*(engine.submit(number) for number in range(count)))

    with serving(double, policy=three) as engine:
        assert asyncio.run(ask(engine, 3)) == [0, 2, 4]
        assert engine.metrics().reasons == {"three": 1}
        assert asyncio.run(ask(engine, 40)) == [2 * number for number in range(40)]
        assert "more than three" in caplog.text


@pytest.mark.parametrize(
    ("run", "settings", "said"),
    [
        (double, {"workers": 0}, "workers=0"),
        (double, {"check": "maybe"}, "check='maybe'"),
        (double, {"devices": ["cpu"]}, "devices= places a module"),
        (double, {"collate": list}, "collate= is for a module"),
        (double, {"policy": "fixed_window", "max_batch_size": 0}, r"max_batch_size=0.*needs max_queue_delay"),
        (7, {}, "int cannot be called"),
        (lambda items: items, {"processes": True}, "cannot be imported by name"),
    ],
)
def test_contradictions_are_one_error_before_anything_runs(run: Any, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSettings, match=said):
        DynamicBatcher(run, **settings)


def test_a_wrong_number_of_results_is_found_at_the_start() -> None:
    with pytest.raises(InvalidOutput, match="2 items went in and 1 results came out"):
        DynamicBatcher(lambda items: items[:1], examples=[1.0]).start()


def test_a_function_that_fails_on_its_example_does_not_start() -> None:
    with pytest.raises(ModelFailed, match="'x' is no number"):
        DynamicBatcher(poisoned, examples=["x"]).start()


def test_the_latency_is_measured_at_the_start_and_bounds_the_batch() -> None:
    def run(items: list[float]) -> list[float]:
        time.sleep(0.04 * len(items))
        return items

    with serving(run, examples=[1.0, 2.0], latency_target=1.0) as engine:
        engine.start()
        metrics = engine.metrics()
        assert metrics.curve[0][0] == 1
        assert metrics.max_batch_size == 1, "twice the items take twice the time"
        assert "cannot help" in metrics.notes[0]
        assert engine.report is not None and engine.report.exact


@pytest.mark.parametrize(("seconds", "size"), [
    ({1: 2.7, 2: 8.5, 4: 9.0, 8: 10.0, 16: 12.0, 32: 16.0}, 32),  # an fp32 layer: one row is another kernel
    ({1: 2.7, 2: 15.0, 4: 16.0, 8: 18.0, 16: 20.0, 32: 24.0}, 32),
    ({1: 1.0, 2: 4.0, 4: 3.0, 8: 7.0, 16: 14.0, 32: 10.0}, 32),  # after one that is faster the count starts anew
    ({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0, 16: 1.0}, 1),  # nobody looks for ever
])  # fmt: skip
def test_sizes_are_tried_beyond_one_that_is_slow(
    seconds: dict[int, float], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(_: object, items: list[Any]) -> float:
        return 1e-3 * seconds.get(len(items), len(items) / 1.2)

    monkeypatch.setattr("microbatch.serving.engine.prepare._seconds", told)
    with serving(double, examples=[1, 2]) as engine:
        engine.start()
        assert (engine.metrics().max_batch_size, bool(engine.metrics().notes)) == (size, size == 1)


def test_a_target_bounds_batches_whose_latency_is_learnt_from_the_requests() -> None:
    def run(items: list[int]) -> list[int]:
        time.sleep(0.01 * len(items))
        return double(items)

    with serving(run, latency_target=0.1) as engine:
        assert engine.map(range(100)) == [2 * number for number in range(100)]
        sizes = [launch.size for launch in engine.metrics().launches]
        assert sizes[-1] <= 5, "a batch of n takes n times 10 ms, and another one may be ahead"
        assert max(sizes[len(sizes) // 2 :]) <= 6


def test_a_stateful_function_is_not_run_at_the_start() -> None:
    calls: list[list[Any]] = []

    def run(items: list[Any]) -> list[Any]:
        calls.append(items)
        return poisoned(items)

    with serving(run, examples=[1], stateful=True) as engine:
        engine.start()
        assert calls == []
        found = asyncio.run(engine.submit_many([1, "x"]))
        assert len(calls) <= 2
        assert isinstance(found[1], ValueError)


def test_out_of_memory_is_split_and_remembered() -> None:
    def run(items: list[int]) -> list[int]:
        if len(items) > 4:
            raise MemoryError
        return double(items)

    with serving(run, max_batch_size=32) as engine:
        assert engine.map(range(200)) == [2 * number for number in range(200)]
        metrics = engine.metrics()
        assert metrics.size_limit <= 5
        assert 1 <= metrics.out_of_memory < 10
        assert metrics.failed == 0


def test_lengths_share_batches_within_the_bound_of_padding() -> None:
    held = Held()
    lengths = [5, 100, 6, 90, 5, 110, 7, 95]

    async def ask(engine: DynamicBatcher) -> list[Any]:
        first = asyncio.create_task(engine.submit([0] * 50))
        await held.busy()
        tasks = [asyncio.create_task(engine.submit([0] * length)) for length in lengths]
        await until(lambda: engine.metrics().waiting == 8)
        held.let_go()
        return [len(result) for result in await asyncio.gather(first, *tasks)]

    with serving(held, max_batch_size=8, length=len) as engine:
        assert asyncio.run(ask(engine)) == [100, *(2 * length for length in lengths)]
        assert sorted(sorted(map(len, batch)) for batch in held.batches[1:]) == [[5, 5, 6, 7], [90, 95, 100, 110]]
        metrics = engine.metrics()
        assert metrics.padded_work <= 1.5 * metrics.real_work


def test_an_item_above_the_budget_is_refused_alone() -> None:
    with serving(double, token_budget=microbatch.TokenBudget(10), length=len) as engine:
        with pytest.raises(RequestTooLarge, match="costs 11; a batch may have 10"):
            engine.call("x" * 11)
        assert engine.call("ab") == "abab"


def test_an_idle_engine_does_nothing() -> None:
    with serving(double, workers=2) as engine:
        assert engine.call(1, deadline=LONG) == 2
        start, clock = time.process_time(), time.monotonic()
        time.sleep(0.5)
        assert (time.process_time() - start) / (time.monotonic() - clock) < 0.05


def test_many_threads_and_loops_at_once() -> None:
    found: list[list[int]] = []

    def client(engine: DynamicBatcher, start: int) -> None:
        async def ask() -> Any:
            return await asyncio.gather(*(engine.submit(start + number) for number in range(50)))

        found.append(asyncio.run(ask()) if start % 2 else [engine.call(start + number) for number in range(50)])

    with serving(double, workers=2, max_batch_size=8) as engine:
        threads = [threading.Thread(target=client, args=(engine, start)) for start in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
        assert sorted(map(tuple, found)) == [tuple(2 * (s + n) for n in range(50)) for s in range(12)]
        assert engine.metrics().answered == 600


def test_metrics_are_plain() -> None:
    with serving(double, examples=[1.0, 2.0]) as engine:
        assert engine.map([1.0, 2.0, 3.0]) == [2.0, 4.0, 6.0]
        metrics = engine.metrics()
        document = metrics.to_json()
        assert metrics.latency["p50"] <= metrics.latency["max"]
        assert document["answered"] == 3
        assert document["launches"][0]["size"] in (1, 2, 3)
        assert all(isinstance(size, str) for size in document["batch_sizes"])
