"""Tenants in a running engine: shares, room, bounds of their own, and what is told of them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

import microbatch
from microbatch.errors import InvalidSettings, Overloaded, RequestTooLarge
from tests.serving.engines import Held, serving, until

ONE_BY_ONE = {"max_batch_size": 1, "policy": "launch_when_free"}


def test_a_flood_does_not_stand_before_another_tenant() -> None:
    async def main() -> None:
        held = Held()
        with serving(held, **ONE_BY_ONE) as engine:
            flood = [asyncio.create_task(engine.submit(number, tenant="flood")) for number in range(40)]
            await held.busy()
            await until(lambda: engine.metrics().waiting == 39)
            quiet = asyncio.create_task(engine.submit(1000, tenant="quiet"))
            await until(lambda: engine.metrics().waiting == 40)
            held.let_go(3)
            assert await quiet == 2000
            assert held.batches[:3].count([1000]) == 1
            held.let_go()
            assert await asyncio.gather(*flood) == [2 * number for number in range(40)]
            found = engine.metrics().tenants
            assert (found["flood"].answered, found["quiet"].answered) == (40, 1)
            assert found["quiet"].latency["max"] < found["flood"].latency["max"]
            document = json.loads(json.dumps(engine.metrics().to_json()))
            assert document["tenants"]["flood"]["served"] == 40

    asyncio.run(main())


def test_a_full_queue_makes_room_for_who_has_less_than_a_share() -> None:
    async def main() -> None:
        held = Held()
        with serving(held, max_queue=4, **ONE_BY_ONE) as engine:
            tasks = [asyncio.create_task(_outcome(engine.submit(0, tenant="flood")))]
            await held.busy()
            for number in range(1, 5):
                tasks.append(asyncio.create_task(_outcome(engine.submit(number, tenant="flood"))))
                await until(lambda: engine.metrics().waiting == len(tasks) - 1)
            quiet = asyncio.create_task(_outcome(engine.submit(100, tenant="quiet")))
            pushed_out = await tasks[4]
            assert isinstance(pushed_out, Overloaded)
            assert pushed_out.retry_after >= 0
            assert isinstance(await _outcome(engine.submit(5, tenant="flood")), Overloaded)
            assert engine.metrics().waiting == 4
            held.let_go()
            assert await quiet == 200
            assert await asyncio.gather(*tasks[:4]) == [0, 2, 4, 6]
            metrics = engine.metrics()
            assert metrics.refused == metrics.tenants["flood"].refused == 2
            assert metrics.tenants["quiet"].refused == 0

    asyncio.run(main())


def test_the_bound_is_exact_for_one_tenant() -> None:
    async def main() -> None:
        held = Held()
        with serving(held, max_queue=4, **ONE_BY_ONE) as engine:
            first = asyncio.create_task(_outcome(engine.submit(0, tenant="a")))
            await held.busy()
            others = [asyncio.create_task(_outcome(engine.submit(number, tenant="a"))) for number in range(10)]
            await until(lambda: sum(task.done() for task in others) == 6)
            assert engine.metrics().waiting == 4
            held.let_go()
            results = await asyncio.gather(first, *others)
            assert sum(isinstance(result, Overloaded) for result in results) == 6

    asyncio.run(main())


def test_a_tenant_with_a_bound_of_its_own() -> None:
    async def main() -> None:
        held = Held()
        with serving(held, max_queue=10, max_queue_per_tenant=2, **ONE_BY_ONE) as engine:
            tasks = [asyncio.create_task(_outcome(engine.submit(0, tenant="a")))]
            await held.busy()
            tasks += [asyncio.create_task(_outcome(engine.submit(1, tenant="a"))) for _ in range(2)]
            await until(lambda: engine.metrics().waiting == 2)
            with pytest.raises(Overloaded, match="2 of at most 2 items of 'a' wait"):
                await engine.submit(2, tenant="a")
            tasks.append(asyncio.create_task(_outcome(engine.submit(3, tenant="b"))))
            with pytest.raises(RequestTooLarge, match="at most 2"):
                await engine.submit_many([1, 2, 3], tenant="b")
            held.let_go()
            assert await asyncio.gather(*tasks) == [0, 2, 2, 6]
            assert engine.map(range(20)) == [2 * number for number in range(20)]

    asyncio.run(main())


def test_what_map_has_put_in_is_not_put_out() -> None:
    async def main() -> None:
        held = Held()
        with serving(held, max_queue=4, **ONE_BY_ONE) as engine:
            work = asyncio.create_task(asyncio.to_thread(engine.map, range(8)))
            await held.busy()
            await until(lambda: engine.metrics().waiting == 3)
            with pytest.raises(Overloaded):
                await engine.submit_many([100, 101], tenant="quiet")
            held.let_go()
            assert await work == [2 * number for number in range(8)]

    asyncio.run(main())


def test_a_tenant_goes_on_from_every_door_and_must_be_text() -> None:
    @microbatch.batched(max_batch_size=4)
    def embed(items: list[int]) -> list[int]:
        return [item + 1 for item in items]

    async def main() -> None:
        assert await embed(1, tenant="a") == 2
        assert embed.call(1, tenant="a") == 2
        assert [pair async for pair in embed.engine.submit_each([1, 2], tenant="a")] == [(0, 2), (1, 3)]
        with pytest.raises(InvalidSettings, match="tenant=3 is not text"):
            await embed(1, tenant=3)  # type: ignore[arg-type]
        assert embed.engine.metrics().tenants["a"].answered == 4
        embed.engine.close()

    asyncio.run(main())


async def _outcome(answer: Any) -> Any:
    """The result, or the exception."""
    try:
        return await answer
    except Exception as error:
        return error
