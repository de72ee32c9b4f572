"""Whether an event loop still hands in requests. While it does, a batch launched now would take the processor, or
Python's lock, from requests that are read already in part; they would only miss it."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable

QUIET_TURNS = 3
"""Turns of a loop without a request after which it has none: one to read, one for the task, one for its body."""


class Influx:
    """Follows event loops. What changes it runs in the thread of the loop that it is about."""

    def __init__(self, done: Callable[[], None]) -> None:
        """
        Args:
            done: called in a loop's thread when it has handed in all that it had.
        """
        self._done = done
        self._quiet: dict[AbstractEventLoop, int] = {}

    def __bool__(self) -> bool:
        """Whether a loop hands in requests; one that was stopped in the middle of it does not."""
        return any(loop.is_running() for loop in tuple(self._quiet))

    def came(self, loop: AbstractEventLoop) -> None:
        """A request has been handed in by this loop."""
        if loop not in self._quiet:
            for other in tuple(self._quiet):
                if other.is_closed():
                    del self._quiet[other]
            loop.call_soon(self._look, loop)
        self._quiet[loop] = 0

    def _look(self, loop: AbstractEventLoop) -> None:
        self._quiet[loop] += 1
        if self._quiet[loop] <= QUIET_TURNS:
            loop.call_soon(self._look, loop)
            return
        del self._quiet[loop]
        self._done()
