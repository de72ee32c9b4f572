"""Engines for tests: made to answer, to fail or to wait as a test needs it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any


class Instant:
    """An engine without batches: each item is given to a function, whose exception is the item's error.

    Attributes:
        asked: what it was asked, with the options.
        cancelled: requests whose tasks were cancelled.
    """

    def __init__(self, function: Callable[[Any], Any], examples: Sequence[Any] = (), *, ready: bool = True) -> None:
        self.function, self.examples, self.ready = function, tuple(examples), ready
        self.asked: list[tuple[Any, float | None, int]] = []
        self.cancelled = 0
        self.started = self.drained = False

    def start(self) -> Instant:
        self.started = True
        return self

    async def submit(self, item: Any, *, deadline: float | None = None, priority: int = 0) -> Any:
        result = (await self.submit_many([item], deadline=deadline, priority=priority))[0]
        if isinstance(result, Exception):
            raise result
        return result

    async def submit_many(self, items: Sequence[Any], *, deadline: float | None = None, priority: int = 0) -> list[Any]:
        self.asked += [(item, deadline, priority) for item in items]
        return [self._result(item) for item in items]

    def metrics(self) -> dict[str, int]:
        return {"answered": len(self.asked)}

    async def drain(self, timeout: float | None = None) -> None:
        self.ready, self.drained = False, True

    def _result(self, item: Any) -> Any:
        try:
            return self.function(item)
        except Exception as error:
            return error


class Refusing(Instant):
    """An engine that takes no request: each raises the same error."""

    def __init__(self, error: Exception) -> None:
        super().__init__(lambda item: item)
        self.error = error

    async def submit_many(self, items: Sequence[Any], *, deadline: float | None = None, priority: int = 0) -> list[Any]:
        raise self.error


class Waiting(Instant):
    """An engine that answers when it is told to."""

    def __init__(self) -> None:
        super().__init__(lambda item: item)
        self.gate = asyncio.Event()

    async def submit_many(self, items: Sequence[Any], *, deadline: float | None = None, priority: int = 0) -> list[Any]:
        self.asked += [(item, deadline, priority) for item in items]
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return list(items)
