"""Engines that share a CPU take turns, in order, and none of them waits for ever for another."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from microbatch.errors import DeadlineExceeded
from microbatch.serving.engine.batcher import DynamicBatcher
from microbatch.serving.engine.gate import Gate, batches_at_once, share_cpu
from tests.serving.engines import LONG, Held, serving, until
from tests.serving.functions import double


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Asker:
    """A thread that goes through a gate when it may."""

    def __init__(self, gate: Gate) -> None:
        self.inside = threading.Event()
        self.go = threading.Event()
        self._gate = gate
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        ticket = self._gate.enter()
        self.inside.set()
        assert self.go.wait(LONG)
        ticket.leave()

    def leave(self) -> None:
        self.go.set()
        self.thread.join(LONG)


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def in_line(gate: Gate, count: int) -> None:
    eventually(lambda: len(gate._line) == count)


def test_as_many_as_there_are_slots_in_the_order_of_asking() -> None:
    gate = Gate(lambda: 2)
    askers: list[Asker] = []
    for number in range(4):
        askers.append(Asker(gate))
        if number < 2:
            assert askers[-1].inside.wait(LONG)
        else:
            in_line(gate, number - 1)
    assert not askers[2].inside.is_set()
    askers[1].leave()
    assert askers[2].inside.wait(LONG)
    assert not askers[3].inside.is_set()
    askers[0].leave()
    assert askers[3].inside.wait(LONG)
    for asker in askers[2:]:
        asker.leave()


def test_who_stays_too_long_no_longer_counts() -> None:
    clock = Clock()
    gate = Gate(lambda: 1, patience=0.05, clock=clock)
    stuck, second = Asker(gate), Asker(gate)
    first = stuck if stuck.inside.wait(LONG) else second
    in_line(gate, 1)
    assert not second.inside.wait(0.2)
    clock.now = 0.06
    assert second.inside.wait(LONG)
    third = Asker(gate)
    in_line(gate, 1)
    second.leave()
    assert third.inside.wait(LONG)  # nobody waits for the one that is stuck again
    third.leave()
    first.leave()
    assert not gate._inside


def test_batches_at_once_have_a_core_for_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    for threads, at_once in ((8, 1), (4, 2), (3, 2), (1, 8), (16, 1)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert batches_at_once() == at_once


class Overlap:
    """Counts how many of its calls run at once, over all functions that it makes."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.now = self.most = 0

    def function(self) -> Callable[[list[Any]], list[Any]]:
        def run(items: list[Any]) -> list[Any]:
            with self.lock:
                self.now += 1
                self.most = max(self.most, self.now)
            time.sleep(0.003)
            with self.lock:
                self.now -= 1
            return double(items)

        return run


@pytest.mark.parametrize("slots", [1, 2])
def test_engines_that_share_never_run_more_at_once(slots: int) -> None:
    async def main() -> None:
        overlap, gate = Overlap(), Gate(lambda: slots)
        engines = [DynamicBatcher(overlap.function(), max_batch_size=4, workers=2).start() for _ in range(3)]
        for engine in engines:
            engine.share(gate)
        tasks = [asyncio.create_task(engine.submit(number)) for number in range(60) for engine in engines]
        assert await asyncio.gather(*tasks) == [2 * number for number in range(60) for _ in engines]
        for engine in engines:
            engine.close()
        assert overlap.most == slots
        assert not gate._inside
        assert not gate._line

    asyncio.run(main())


def test_a_batch_is_formed_when_its_turn_comes() -> None:
    async def main() -> None:
        held, gate = Held(), Gate(lambda: 1)
        with serving(held, max_batch_size=1) as first, serving(double, max_batch_size=8) as second:
            for engine in (first, second):
                engine.start()
                engine.share(gate)
            blocking = asyncio.create_task(first.submit(1))
            await held.busy()
            waiting = [asyncio.create_task(second.submit(number)) for number in range(5)]
            await until(lambda: second.metrics().waiting == 5)
            await until(lambda: len(gate._line) == 1)
            late = asyncio.create_task(second.submit(9, deadline=0.05))
            with pytest.raises(DeadlineExceeded, match="while it waited"):
                await late
            held.let_go(1)
            assert await asyncio.gather(*waiting) == [0, 2, 4, 6, 8]
            assert await blocking == 2
            assert second.metrics().batch_sizes == {5: 1}
            assert second.metrics().launches[0].seconds < LONG

    asyncio.run(main())


def test_a_model_that_hangs_stops_no_other() -> None:
    async def main() -> None:
        held, gate = Held(), Gate(lambda: 1, patience=0.1)
        with serving(held, max_batch_size=1) as hangs, serving(double, max_batch_size=8) as other:
            for engine in (hangs, other):
                engine.start()
                engine.share(gate)
            stuck = asyncio.create_task(hangs.submit(1))
            await held.busy()
            assert await asyncio.gather(*(other.submit(number) for number in range(20))) == list(range(0, 40, 2))
            held.let_go()
            assert await stuck == 2

    asyncio.run(main())


def test_turns_end_with_the_engine() -> None:
    async def main() -> None:
        held, gate = Held(), Gate(lambda: 1)
        with serving(held, max_batch_size=1) as closing, serving(double) as other:
            for engine in (closing, other):
                engine.start()
                engine.share(gate)
            answer = asyncio.create_task(closing.submit(1))
            await held.busy()
            draining = asyncio.create_task(closing.drain())
            held.let_go()
            await draining
            assert await answer == 2
            assert await other.submit(4) == 8
            await until(lambda: not gate._inside)

    asyncio.run(main())


def test_only_engines_on_the_cpu_share() -> None:
    module = torch.nn.Linear(2, 2)
    here, also, away = (DynamicBatcher(module, devices=devices) for devices in ((), ("cpu", "cuda:0"), ("cuda:0",)))
    function = DynamicBatcher(double)
    engines = [here, also, function, away]

    def sharing() -> list[bool]:
        return [engine._gate is not None for engine in engines]

    share_cpu([here, away])
    assert sharing() == [False] * 4
    share_cpu(engines)
    assert sharing() == [True, True, True, False]
    assert here._gate is also._gate is function._gate
