"""Notices a client that has gone, and cancels the work that nobody waits for."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from microbatch.web.request import Request

GRACE = 0.005
"""Seconds. What is answered sooner is not watched: it has most likely been launched, and a task for each request costs
more than all routing."""


class Watch:
    """In its ``with`` block, the task of a request is cancelled when its client disconnects.

    Attributes:
        gone: whether that has happened.
    """

    __slots__ = ("_loop", "_request", "_task", "_timer", "_watcher", "gone")

    def __init__(self, request: Request) -> None:
        self._request = request
        self.gone = False
        self._watcher: asyncio.Task[None] | None = None

    def __enter__(self) -> Watch:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._timer = self._loop.call_later(GRACE, self._begin)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()

    def _begin(self) -> None:
        if self._request.unread:  # whoever reads the body notices by itself; two readers would share its parts
            self._timer = self._loop.call_later(GRACE, self._begin)
        else:
            self._watcher = self._loop.create_task(self._wait())

    async def _wait(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if self._task is not None:
            self._task.cancel()
