"""A batch waits until the event loop has handed in the requests that it has, and not longer."""

from __future__ import annotations

import asyncio

from microbatch.serving.decisions.policies import GATHER_READING, marginal_gain
from microbatch.serving.decisions.view import Pace, QueueView, Waiting
from microbatch.serving.engine.influx import QUIET_TURNS, Influx
from tests.serving.engines import Held, serving


def test_what_one_turn_of_the_loop_hands_in_shares_a_batch() -> None:
    model = Held()

    async def ask() -> None:
        with serving(model, max_batch_size=8) as engine:
            first = asyncio.create_task(engine.submit(0.0))
            await model.busy()
            model.let_go(1)
            await first
            await asyncio.sleep(0.05)  # the worker waits for work
            rest = [asyncio.create_task(engine.submit(float(number))) for number in range(1, 6)]
            await model.busy()
            model.let_go()
            await asyncio.gather(*rest)

    asyncio.run(ask())
    assert model.batches == [[0.0], [1.0, 2.0, 3.0, 4.0, 5.0]]


def test_it_ends_when_the_loop_was_quiet_for_some_turns() -> None:
    done: list[int] = []

    async def turn() -> None:
        loop = asyncio.get_running_loop()
        influx = Influx(lambda: done.append(turns))
        turns = 0
        influx.came(loop)
        for turns in range(1, 4 * QUIET_TURNS):
            await asyncio.sleep(0)
            if turns == QUIET_TURNS:
                influx.came(loop)
            assert bool(influx) == (not done)

    asyncio.run(turn())
    assert len(done) == 1
    assert QUIET_TURNS + 1 < done[0] <= 3 * QUIET_TURNS


def test_a_loop_that_was_stopped_in_the_middle_is_forgotten() -> None:
    done: list[bool] = []
    influx = Influx(lambda: done.append(True))

    async def hand_in() -> None:
        influx.came(asyncio.get_running_loop())
        assert influx

    for _ in range(2):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(hand_in())
        loop.close()
        assert not influx and not done
    assert len(influx._quiet) == 1


def test_the_policy_waits_for_requests_that_are_being_read_but_no_longer_than_a_batch_takes() -> None:
    def view(now: float, *, reading: bool) -> QueueView:
        return QueueView(
            now=now, waiting=[Waiting(0.0)], num_waiting=1, oldest=0.0, free_workers=1, free_since=0.0,
            max_batch_size=8, max_queue_delay=None, token_budget=None, seconds=lambda _: 0.02, best_size=None,
            pace=Pace(), uniform=True, reading=reading,
        )  # fmt: skip

    assert marginal_gain(view(0.001, reading=False)).launch
    waits = marginal_gain(view(0.001, reading=True))
    assert (not waits.launch, waits.reason, waits.until) == (True, GATHER_READING, 0.02)
    assert marginal_gain(view(0.021, reading=True)).launch
