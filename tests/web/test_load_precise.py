"""The event loop of load wakes up in microseconds, with any number of descriptors."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from microbatch.web.load.precise import PreciseSelector, precise_loop


@pytest.mark.alone
def test_timers_are_exact_to_a_fraction_of_a_millisecond() -> None:
    """asyncio over epoll rounds up to whole milliseconds: half of one too late on average, for ever."""

    async def lateness(seconds: float) -> float:
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds
        woken: asyncio.Future[float] = loop.create_future()
        loop.call_at(due, lambda: woken.set_result(loop.time() - due))
        return await woken

    with asyncio.Runner(loop_factory=precise_loop) as runner:
        late = sorted(runner.run(lateness(0.0011 + 1e-6 * number)) for number in range(60))
    assert late[0] >= 0
    assert late[5] < 0.0004  # the quickest of many: a busy machine delays the others


def test_what_is_ready_is_seen_at_once_and_nothing_else() -> None:
    here, there = socket.socketpair()
    with here, there, PreciseSelector() as selector:
        selector.register(here, 1)
        began = time.monotonic()
        assert selector.select(0.01) == []
        assert time.monotonic() - began >= 0.0099
        there.send(b"x")
        assert [key.fileobj for key, _ in selector.select(30)] == [here]
        assert [key.fileobj for key, _ in selector.select(None)] == [here]
        assert [key.fileobj for key, _ in selector.select(0)] == [here]
        assert [key.fileobj for key, _ in selector.select(-1)] == [here]
