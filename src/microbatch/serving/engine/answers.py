"""Answers on their way back: one wake-up for each event loop and batch, however many requests it answers."""

from __future__ import annotations

from asyncio import AbstractEventLoop, Future
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from microbatch.serving.decisions.queue import Reply


def deliver(replies: Iterable[Reply]) -> None:
    """Wake up whoever waits for these complete replies."""
    by_loop: dict[AbstractEventLoop, list[Future[None]]] = {}
    for reply in replies:
        if reply.loop is None:
            reply.future.set_result(None)
        else:
            by_loop.setdefault(reply.loop, []).append(reply.future)
    for loop, futures in by_loop.items():
        try:
            loop.call_soon_threadsafe(_wake, futures)
        except RuntimeError:  # the loop has been closed: nobody waits there any more
            continue


class Told:
    """In the place of a request's future: calls back in its event loop, with the result or the exception.

    Cheaper than a future and a task that waits for it, for whoever has many requests of one item.
    """

    __slots__ = ("_tell", "reply")

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self._tell = tell
        self.reply: Reply | None = None

    def done(self) -> bool:
        """Nobody cancels it: who has gone is withdrawn."""
        return False

    def set_result(self, _: None) -> None:
        """Its reply is complete."""
        if self.reply is not None:
            reply, self.reply = self.reply, None
            self._tell(reply.results[0])


class Announced(list[Any]):
    """Results that tell the event loop of each answer as it is put into its place, from whichever thread."""

    def __init__(self, results: list[Any], loop: AbstractEventLoop, tell: Callable[[tuple[int, Any]], None]) -> None:
        super().__init__(results)
        self._loop, self._tell = loop, tell

    def __setitem__(self, place: Any, result: Any) -> None:
        super().__setitem__(place, result)
        with suppress(RuntimeError):  # the loop has been closed: nobody waits there any more
            self._loop.call_soon_threadsafe(self._tell, (place, result))


def only(results: list[Any]) -> Any:
    """The result of a request with one item, or its exception raised."""
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


def first_error(results: list[Any]) -> BaseException | None:
    """The first exception among results."""
    return next((each for each in results if isinstance(each, BaseException)), None)


def _wake(futures: list[Future[None]]) -> None:
    for future in futures:
        if not future.done():  # cancelled meanwhile
            future.set_result(None)
