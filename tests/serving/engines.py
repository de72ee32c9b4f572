"""Engines as tests need them: closed at the end, with functions that can be held back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from microbatch.serving.engine.batcher import DynamicBatcher
from tests.serving.functions import double

LONG = 30.0
"""Seconds within which a test must get what it waits for; far more than it takes."""


class Held:
    """A function that doubles, and waits in each call until it is let go; every batch is remembered."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)

    def __call__(self, items: list[Any]) -> list[Any]:
        self.batches.append(list(items))
        self.entered.release()
        assert self.gate.acquire(timeout=LONG)
        return double(items)

    def let_go(self, calls: int = 1000) -> None:
        for _ in range(calls):
            self.gate.release()

    async def busy(self) -> None:
        """Until a call has begun."""
        assert await asyncio.to_thread(self.entered.acquire, timeout=LONG)


@contextmanager
def serving(run: Any, **settings: Any) -> Iterator[DynamicBatcher]:
    engine = DynamicBatcher(run, **settings)
    try:
        yield engine
    finally:
        if isinstance(run, Held):
            run.let_go()
        engine.close()


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.002)
