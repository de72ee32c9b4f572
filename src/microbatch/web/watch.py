"""Looks after a request while it is worked on: a body that does not come, and a client that has gone, end it."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from microbatch.web.request import Request

GRACE = 0.005
"""Seconds. What is answered sooner is not watched: it has most likely been launched, and a task for each request costs
more than all routing."""


GONE = "microbatch.gone"
"""Of the extensions of a scope: a list of what to call when its connection is lost. Our own connections have it; under
another server a task waits for the message of ASGI, which costs ten times as much for a request beyond the grace."""
NO_EXTENSIONS: dict[str, Any] = {}


class Watch:
    """In its ``with`` block, the task of a request is cancelled when its client disconnects or its body is too slow.

    Attributes:
        gone: the client has disconnected.
        slow: the body did not come in time.
    """

    __slots__ = ("_loop", "_request", "_task", "_timer", "_told", "_waits_for_body", "_watcher", "gone", "slow")

    def __init__(self, request: Request) -> None:
        self._request = request
        self.gone = self.slow = self._waits_for_body = False
        self._watcher: asyncio.Task[None] | None = None

    def __enter__(self) -> Watch:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task(self._loop)
        self._timer = self._loop.call_later(GRACE, self._look)
        self._told = self._request.scope.get("extensions", NO_EXTENSIONS).get(GONE)
        if self._told is not None:
            self._told.append(self._lost)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._timer.cancel()
        if self._told is not None:
            self._told.clear()
        if self._watcher is not None:
            self._watcher.cancel()

    def body_has_come(self) -> None:
        """Watch the client from now on, if the grace is over: two readers would have shared the parts of the body."""
        if self._waits_for_body:
            self._timer.cancel()
            self._begin()

    def _look(self) -> None:
        """The grace is over."""
        if not self._request.unread:
            self._begin()
            return
        self._waits_for_body = True
        self._timer = self._loop.call_later(self._request.application.body_timeout, self._end_slow)

    def _begin(self) -> None:
        if self._told is None:
            self._watcher = self._loop.create_task(self._wait())

    async def _wait(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._lost()

    def _lost(self) -> None:
        self.gone = True
        self._end()

    def _end_slow(self) -> None:
        self.slow = True
        self._end()

    def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()
