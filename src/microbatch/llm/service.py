"""A running engine: the thread that takes steps, and how requests reach it from event loops and threads. No torch."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable

from microbatch.errors import Draining, InvalidSettings, MicrobatchError, ModelFailed, Overloaded
from microbatch.llm.loop import StepLoop
from microbatch.llm.metrics import Counters
from microbatch.llm.sequence import Request
from microbatch.units import format_seconds

logger = logging.getLogger(__name__)

BLOCKED = 0.01
"""Seconds until the next try where nothing could be computed although somebody waits."""
PATIENCE = 60.0
"""Seconds for the step under way when the engine gives up what it still has."""


class Service:
    """The state that threads share; `enter`, `abort`, `close` and the counts may be called from any thread."""

    def __init__(
        self, name: str, loop: StepLoop, counters: Counters, *, max_waiting: int, clock: Callable[[], float]
    ) -> None:
        """
        Args:
            name: for logs and errors.
            loop: takes the steps.
            counters: what has happened.
            max_waiting: requests that may wait; whoever comes then is refused.
            clock: what tells seconds.
        """
        self.name, self.max_waiting = name, max_waiting
        self._loop, self._counters, self._clock = loop, counters, clock
        # reentrant: collecting garbage inside may call `stop` of an engine that nobody refers to any more
        self._changed = threading.Condition(threading.RLock())
        self._inbox: deque[tuple[Callable[[Request], None], Request]] = deque()
        self._entering = 0
        self._draining = self._giving_up = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._serve, name=f"microbatch-{name}", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether requests are welcome."""
        return not self._draining and self._thread.is_alive() and self._pid == os.getpid()

    @property
    def draining(self) -> bool:
        """Whether no more requests are taken."""
        return self._draining

    @property
    def waiting(self) -> int:
        """Sequences that wait, those on their way to the loop among them."""
        return self._entering + self._loop.waiting

    @property
    def running(self) -> int:
        """Sequences that hold blocks."""
        return self._loop.running

    def enter(self, request: Request, *, patient: bool = False) -> None:
        """Hand a request over.

        Args:
            request: that has been found admissible.
            patient: its caller counts its requests itself, and is not refused.

        Raises:
            Draining: the engine is about to stop.
            Overloaded: too many wait.
            InvalidSettings: this process is a copy of the one that the engine runs in.
        """
        if self._pid != os.getpid():
            raise InvalidSettings(
                f"{self.name} was started in process {self._pid}; this is a fork of it, without its thread.",
                "Make the engine after the fork.",
            )
        with self._changed:
            if self._draining:
                raise self._stopping()
            if not patient and self.waiting >= self.max_waiting:
                self._counters.refused += 1
                raise self._overloaded()
            self._inbox.append((self._loop.add, request))
            self._entering += 1
            self._changed.notify()

    def abort(self, request: Request) -> None:
        """Nobody wants the answer any more: before the next step its blocks are free."""
        if request.settled or self._pid != os.getpid():
            return
        with self._changed:
            self._inbox.append((self._loop.abort, request))
            self._changed.notify()

    def close(self, timeout: float | None = None) -> None:
        """Take no more requests, answer those that are there, and stop.

        Args:
            timeout: seconds after which what is unfinished is answered with `Draining`; None waits for all.
        """
        if self._pid != os.getpid():  # whoever held the lock in the fork's parent will never give it back here
            return
        with self._changed:
            self._draining = True
            self._changed.notify()
        if not self._thread.ident:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._giving_up = True
            self._thread.join(PATIENCE)

    def stop(self) -> None:
        """Stop soon: nobody refers to the engine any more, or the process ends."""
        if self._pid != os.getpid():
            return
        with self._changed:
            self._draining = self._giving_up = True
            self._changed.notify()
        if self._thread.ident and self._thread is not threading.current_thread():
            self._thread.join(PATIENCE)

    def seconds_to_drain(self) -> float:
        """Until those that wait now have been answered, at the rate of late; 1 while nothing is known."""
        seen = self._counters.totals()["histograms"]["request_inference_time_seconds"]
        if not seen.count:
            return 1.0
        return float(seen.total / seen.count * max(1.0, self.waiting / max(1, self.running)))

    def _serve(self) -> None:
        """What the thread does all its life. However it ends, nobody is left without an answer."""
        try:
            while self._take():
                self._step()
        except BaseException:  # a logits processor that leaves the program, or a defect of the last line of defence
            logger.critical("%s: its thread was ended", self.name, exc_info=True)
        finally:
            with self._changed:
                self._draining = self._giving_up = True
            self._take()

    def _step(self) -> None:
        try:
            done = self._loop.step()
        except Exception as error:  # nothing that a step does may end the thread
            logger.exception("%s: a step failed", self.name)
            self._loop.fail_all(_told(error))
            return
        if not done:
            with self._changed:
                if not self._inbox:
                    self._changed.wait(BLOCKED)

    def _take(self) -> bool:
        """Wait for work and take in what has come; False when it is time to end."""
        with self._changed:
            while not self._inbox and not self._loop.busy and not self._draining:
                self._changed.wait()
            messages = list(self._inbox)
            self._inbox.clear()
            self._entering = 0
            ending, giving_up = self._draining, self._giving_up  # with these messages: none comes once it drains
        for act, request in messages:
            try:
                act(request)
            except Exception as error:
                logger.exception("%s: a request could not be taken in", self.name)
                self._loop.fail(request, _told(error))
        if giving_up:
            self._loop.fail_all(self._stopping())
            return False
        return self._loop.busy or not ending

    def _stopping(self) -> Draining:
        return Draining(f"{self.name} is about to stop.", "Send the request to another server.")

    def _overloaded(self) -> Overloaded:
        seconds = self.seconds_to_drain()
        return Overloaded(
            f"{self.waiting} of at most {self.max_waiting} requests wait.",
            f"Try again in {format_seconds(max(1.0, seconds))}.", retry_after=seconds,
        )  # fmt: skip


def _told(error: Exception) -> Exception:
    if isinstance(error, MicrobatchError):
        return error
    failure = ModelFailed(f"A step of the engine failed: {type(error).__name__}: {error}", "See the log.")
    failure.__cause__ = error
    return failure
