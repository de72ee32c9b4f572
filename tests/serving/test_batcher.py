"""The engine with real threads: logical assertions are exact, bounds in time are generous."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from typing import Any

import pytest

import microbatch
from microbatch.errors import (
    DeadlineExceeded,
    Draining,
    InvalidSettings,
    Overloaded,
    RequestTooLarge,
)
from microbatch.serving.engine.batcher import DynamicBatcher
from tests.serving.engines import LONG, Held, serving, until
from tests.serving.functions import double, poisoned
from tests.serving.views import profile_of


def test_three_ways_to_one_answer() -> None:
    with serving(double) as engine:
        assert asyncio.run(engine.submit(3)) == 6
        assert engine.call(4) == 8
        assert engine.map(range(5)) == [0, 2, 4, 6, 8]
        assert asyncio.run(engine.submit_many([1, 2])) == [2, 4]
        assert engine.metrics().answered == 9


def test_a_decorated_function() -> None:
    @microbatch.batched(max_batch_size=8)
    def embed(items: list[int]) -> list[int]:
        """Doubles."""
        return double(items)

    async def ask() -> list[int]:
        return await asyncio.gather(*(embed(item) for item in range(20)))

    assert embed.call(21) == 42
    assert asyncio.run(ask()) == [2 * item for item in range(20)]
    assert embed.map(iter(range(100))) == [2 * item for item in range(100)]
    assert embed.function([1]) == [2]
    assert (embed.__name__, embed.__doc__) == ("embed", "Doubles.")
    assert max(embed.engine.metrics().batch_sizes) <= 8
    embed.engine.close()


def test_requests_that_wait_share_a_batch_in_order() -> None:
    held = Held()

    async def ask(engine: DynamicBatcher) -> list[Any]:
        first = asyncio.create_task(engine.submit(0))
        await held.busy()
        others = [asyncio.create_task(engine.submit(number)) for number in range(1, 13)]
        await until(lambda: engine.metrics().waiting == 12)
        held.let_go()
        return await asyncio.gather(first, *others)

    with serving(held, max_batch_size=8) as engine:
        assert asyncio.run(ask(engine)) == [2 * number for number in range(13)]
        assert held.batches == [[0], list(range(1, 9)), list(range(9, 13))]
        reasons = [launch.reason for launch in engine.metrics().launches]
        assert reasons[1] == "the batch is full"
        assert all(reasons)


@pytest.mark.parametrize("count", [2, 8, 13])
def test_a_bad_item_fails_alone(count: int) -> None:
    held_back = threading.Event()
    calls = 0

    def run(items: list[Any]) -> list[Any]:
        nonlocal calls
        if items == ["first"]:
            held_back.wait(LONG)
            return items
        calls += 1
        return poisoned(items)

    async def ask(engine: DynamicBatcher) -> list[Any]:
        first = asyncio.create_task(engine.submit("first"))
        await until(lambda: engine.metrics().running == 1)
        items: list[Any] = list(range(count))
        items[count // 2] = "poison"
        tasks = [asyncio.create_task(engine.submit(item)) for item in items]
        await until(lambda: engine.metrics().waiting == count)
        held_back.set()
        await first
        return await asyncio.gather(*tasks, return_exceptions=True)

    with serving(run, max_batch_size=count) as engine:
        results = asyncio.run(ask(engine))
        metrics = engine.metrics()
    assert isinstance(results[count // 2], ValueError)
    assert str(results[count // 2]) == "'poison' is no number"
    assert [r for n, r in enumerate(results) if n != count // 2] == [2 * n for n in range(count) if n != count // 2]
    assert calls - 1 == metrics.retries <= 2 * math.ceil(math.log2(count))
    assert (metrics.failed, metrics.answered) == (1, count)


def test_an_exception_in_the_list_is_the_failure_of_its_item() -> None:
    with serving(lambda items: [KeyError(item) if item < 0 else item for item in items]) as engine:
        found = asyncio.run(engine.submit_many([1, -2, 3]))
        assert [found[0], found[2]] == [1, 3]
        assert isinstance(found[1], KeyError)
        with pytest.raises(KeyError):
            engine.call(-1)
        with pytest.raises(KeyError):
            engine.map([1, -1])
        assert isinstance(engine.map([1, -1], return_errors=True)[1], KeyError)


def test_callbacks_fail_for_their_own_request_only() -> None:
    with serving(double, cost=lambda item: 1 // item, key=str) as engine:
        found = asyncio.run(engine.submit_many([1, 0, 1]))
        assert [found[0], found[2]] == [2, 2]
        assert isinstance(found[1], ZeroDivisionError)
        with pytest.raises(InvalidSettings, match="cost"):
            engine.call(5)
        assert engine.call(1) == 2


def test_the_bound_of_the_queue_is_exact() -> None:
    held = Held()

    async def ask(engine: DynamicBatcher) -> list[Any]:
        first = asyncio.create_task(engine.submit(0))
        await held.busy()
        tasks = [asyncio.create_task(engine.submit(number)) for number in range(1, 11)]
        await until(lambda: engine.metrics().refused == 6)
        assert engine.metrics().waiting == 4
        assert sum(task.done() for task in tasks) == 6, "refused at once, while the worker is busy"
        held.let_go()
        return await asyncio.gather(first, *tasks, return_exceptions=True)

    with serving(held, max_queue=4) as engine:
        results = asyncio.run(ask(engine))
    assert results[:5] == [0, 2, 4, 6, 8]
    assert all(isinstance(result, Overloaded) and result.retry_after >= 0 for result in results[5:])


def test_a_request_with_several_items_is_taken_whole_or_not() -> None:
    held = Held()

    async def ask(engine: DynamicBatcher) -> None:
        first = asyncio.create_task(engine.submit(0))
        await held.busy()
        three = asyncio.create_task(engine.submit_many([1, 2, 3]))
        await until(lambda: engine.metrics().waiting == 3)
        with pytest.raises(Overloaded):
            await engine.submit_many([4, 5])
        with pytest.raises(RequestTooLarge, match="5 items; at most 4"):
            await engine.submit_many(list(range(5)))
        one = asyncio.create_task(engine.submit(6))
        await until(lambda: engine.metrics().waiting == 4)
        held.let_go()
        assert await three == [2, 4, 6]
        assert await one == 12
        await first

    with serving(held, max_queue=4, max_batch_size=2) as engine:
        asyncio.run(ask(engine))
        assert held.batches == [[0], [1, 2], [3, 6]], "items of a request are spread over batches"


def test_map_is_never_refused() -> None:
    with serving(double, max_queue=3, max_batch_size=2) as engine:
        assert engine.map(range(50)) == [2 * number for number in range(50)]
        assert engine.metrics().refused == 0


def test_retry_after_is_what_the_queue_takes() -> None:
    held = Held()
    latency = {1: 1.0, 2: 1.5}

    async def ask(engine: DynamicBatcher) -> float:
        tasks = [asyncio.create_task(engine.submit(0))]
        await held.busy()
        tasks += [asyncio.create_task(engine.submit(number)) for number in range(4)]
        await until(lambda: engine.metrics().waiting == 4)
        with pytest.raises(Overloaded) as caught:
            await engine.submit(9)
        held.let_go()
        await asyncio.gather(*tasks)
        return caught.value.retry_after

    with serving(held, max_queue=4, max_batch_size=2, profile=profile_of(latency)) as engine:
        found = asyncio.run(ask(engine))
    assert 2 * 1.5 <= found <= 1.0 + 2 * 1.5, "what runs, and two batches of two"


# Deadlines and cancellation.


def test_a_deadline_is_answered_while_the_worker_is_busy() -> None:
    held = Held()

    async def ask(engine: DynamicBatcher) -> tuple[float, float]:
        first = asyncio.create_task(engine.submit(0, deadline=0.3))
        await held.busy()
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="while it waited"):
            await engine.submit(1, deadline=0.1)
        waited = time.monotonic() - start
        with pytest.raises(DeadlineExceeded, match="while it ran"):
            await first
        ran = time.monotonic() - start
        held.let_go()
        assert await engine.submit(2) == 4
        return waited, ran

    with serving(held) as engine:
        waited, ran = asyncio.run(ask(engine))
        assert 0.1 <= waited < 5
        assert waited < ran < 5
        assert held.batches == [[0], [2]], "expired work never reaches the function"
        assert engine.metrics().expired == 2


def test_who_goes_away_is_not_worked_for() -> None:
    held = Held()

    async def ask(engine: DynamicBatcher) -> None:
        first = asyncio.create_task(engine.submit(0))
        await held.busy()
        gone = [asyncio.create_task(engine.submit(number)) for number in range(100, 300)]
        await until(lambda: engine.metrics().waiting == 200)
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        assert engine.metrics().waiting == 0
        others = [asyncio.create_task(engine.submit(number)) for number in range(1, 21)]
        await until(lambda: engine.metrics().waiting == 20)
        held.let_go()
        assert await asyncio.gather(first, *others) == [2 * number for number in range(21)]

    with serving(held, max_batch_size=32) as engine:
        asyncio.run(ask(engine))
        assert held.batches == [[0], list(range(1, 21))]
        assert engine.metrics().cancelled == 200


@pytest.mark.parametrize("deadline", [0, -1.0, "soon"])
def test_a_deadline_that_has_passed_is_refused(deadline: Any) -> None:
    with serving(double) as engine, pytest.raises(InvalidSettings, match="passed already"):
        engine.call(1, deadline=deadline)


def test_priorities_go_first() -> None:
    held = Held()

    async def ask(engine: DynamicBatcher) -> None:
        first = asyncio.create_task(engine.submit(0))
        await held.busy()
        low = [asyncio.create_task(engine.submit(number)) for number in (1, 2)]
        await until(lambda: engine.metrics().waiting == 2)
        high = [asyncio.create_task(engine.submit(number, priority=1)) for number in (3, 4)]
        await until(lambda: engine.metrics().waiting == 4)
        held.let_go()
        await asyncio.gather(first, *low, *high)

    with serving(held, max_batch_size=2) as engine:
        asyncio.run(ask(engine))
        assert held.batches == [[0], [3, 4], [1, 2]]


# The end.


def test_draining_answers_what_waits_and_refuses_what_comes() -> None:
    held = Held()

    async def ask(engine: DynamicBatcher) -> list[Any]:
        tasks = [asyncio.create_task(engine.submit(number)) for number in range(3)]
        await held.busy()
        await until(lambda: engine.metrics().accepted == 3)
        draining = asyncio.create_task(engine.drain())
        await until(lambda: not engine.ready)
        with pytest.raises(Draining):
            await engine.submit(9)
        held.let_go()
        await draining
        return await asyncio.gather(*tasks)

    engine = DynamicBatcher(held)
    assert asyncio.run(ask(engine)) == [0, 2, 4]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("microbatch-Held")]
    with pytest.raises(Draining):
        engine.call(1)


def test_after_the_timeout_those_left_are_told() -> None:
    held = Held()

    async def ask(engine: DynamicBatcher) -> list[Any]:
        tasks = [asyncio.create_task(engine.submit(number)) for number in range(3)]
        await held.busy()
        await until(lambda: engine.metrics().accepted == 3)
        await engine.drain(timeout=0.05)
        return await asyncio.gather(*tasks, return_exceptions=True)

    engine = DynamicBatcher(held, max_batch_size=1)
    results = asyncio.run(ask(engine))
    held.let_go()
    assert all(isinstance(result, Draining) for result in results)


def test_a_closed_event_loop_ends_no_worker() -> None:
    held = Held()

    async def leave(engine: DynamicBatcher) -> None:
        engine.start()
        asyncio.create_task(engine.submit(1))  # noqa: RUF006 (it is cancelled with its loop)
        await held.busy()

    with serving(held) as engine:
        asyncio.run(leave(engine))
        held.let_go()
        assert engine.call(2) == 4
