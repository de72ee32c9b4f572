"""The two ways to ask: when requests are due (open loop), or as soon as a client has its answer (closed loop)."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from microbatch.batch.progress import Progress
from microbatch.web.load.requests import Question
from microbatch.web.load.result import Run, run_of
from microbatch.web.load.sender import Sender
from microbatch.web.load.settings import Load
from microbatch.web.load.tally import Tally

LEAD = 0.05
"""Seconds between the last connection that is opened beforehand and the first request."""
SLICE = 64
"""Requests that are sent in a row before answers are looked at again."""
OVERTIME = 1.0
"""Seconds that a client which cannot keep to its schedule is given after the end to send the rest."""
EXPECTED_LATENCY = 0.05
"""Seconds; connections are opened beforehand for the requests that this makes simultaneous, others when needed."""
FEWEST, MOST_BEFOREHAND = 8, 256
TICK = 0.25
"""Seconds between two steps of the bar."""


class Course:
    """From the warm-up to the end of one run: when it starts, when it is over, and the processor time between."""

    def __init__(
        self, sender: Sender, warmup: float, until: float | None, progress: Progress | None, name: str
    ) -> None:
        self.over = asyncio.Event()
        self.interrupted = False
        self.elapsed = self.cpu_seconds = 0.0
        self._sender = sender
        self._loop = asyncio.get_running_loop()
        self._cpu = time.process_time()
        self._progress, self._name, self._until = progress, name, until
        sender.start = self._loop.time() + LEAD + warmup
        self._loop.call_at(sender.start, self._begin)
        if until is not None:
            self._loop.call_at(sender.start + until, self.over.set)
        if progress is not None:
            self._tick()

    async def wait(self) -> None:
        """Until it is over."""
        with _on_interrupt(self._halt):
            await self.over.wait()
            self.elapsed = self._loop.time() - self._sender.start
            self.cpu_seconds = time.process_time() - self._cpu
            await self._sender.ended()
        await self._sender.close()

    def _begin(self) -> None:
        self._cpu = time.process_time()

    def _halt(self) -> None:
        self.interrupted = self._sender.halted = True
        self.over.set()

    def _tick(self) -> None:
        if self._progress is None or self.over.is_set():
            return
        since = self._loop.time() - self._sender.start
        share = 0.0 if self._until is None else min(max(since / max(self._until, TICK), 0.0), 1.0)
        self._progress(share, f"{self._name}, {self._sender.tally.requests} answered" if since > 0 else "warming up")
        self._loop.call_later(TICK, self._tick)


async def open_loop(question: Question, address: str, load: Load, rate: float | None, progress: Progress | None) -> Run:
    """Requests when they are due, whatever the server does.

    Raises:
        InvalidSettings: traffic that cannot be made, or a server that takes no connection.
    """
    times = load.times(rate)
    until = float(times[-1]) if load.window is None else load.window
    mean = len(times) / max(until + load.warmup, 1e-3)
    tally = Tally(window=load.window, target=load.target, until=until)
    sender = Sender(question, address, most=load.connections, timeout=load.timeout, tally=tally)
    await sender.open(min(max(FEWEST, round(mean * EXPECTED_LATENCY)), MOST_BEFOREHAND, load.connections))
    course = Course(sender, load.warmup, None, progress, f"{mean:.4g} requests/s")
    _Schedule(sender, times.tolist(), until, course.over).send()
    await course.wait()
    return run_of(
        tally, clients=None, rate=rate, cpu_seconds=course.cpu_seconds, elapsed=course.elapsed,
        connections=sender.opened, interrupted=course.interrupted,
    )  # fmt: skip


class _Schedule:
    """Sends each request when it is due, and says when the last is out and the end has come."""

    def __init__(self, sender: Sender, times: list[float], until: float, over: asyncio.Event) -> None:
        self._sender, self._times, self._over = sender, times, over
        self._end = sender.start + until
        self._next = 0
        self._loop = asyncio.get_running_loop()

    def send(self) -> None:
        """All that is due, a slice at a time; then wakes up for the next."""
        start, now = self._sender.start, self._loop.time()
        for due in self._times[self._next : self._next + SLICE]:
            if start + due > now:
                break
            self._sender.send(start + due)
            self._next += 1
        if self._over.is_set():
            return
        if self._next == len(self._times) or now > self._end + OVERTIME:
            self._loop.call_at(self._end, self._over.set)
        else:
            self._loop.call_at(start + self._times[self._next], self.send)


async def closed_loop(question: Question, address: str, load: Load, clients: int, progress: Progress | None) -> Run:
    """So many clients, each of which asks again as soon as it has its answer.

    Raises:
        InvalidSettings: a server that takes no connection.
    """
    tally = Tally(window=load.window, target=load.target)
    sender = Sender(question, address, most=clients, timeout=load.timeout, tally=tally)
    await sender.open(clients)
    course = Course(sender, load.warmup, load.duration, progress, f"{clients} client{'s' * (clients != 1)}")
    loop = asyncio.get_running_loop()

    def ask() -> None:
        if load.requests is not None and tally.due >= load.requests:
            course.over.set()
        elif not course.over.is_set():
            sender.send(loop.time())

    sender.next_ask = ask
    for _ in range(clients):
        loop.call_later(LEAD, ask)
    await course.wait()
    return run_of(
        tally, clients=clients, rate=None, cpu_seconds=course.cpu_seconds, elapsed=course.elapsed,
        connections=sender.opened, interrupted=course.interrupted,
    )  # fmt: skip


@contextmanager
def _on_interrupt(halt: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C ends the run instead of the program; only the main thread can say so."""
    loop = asyncio.get_running_loop()
    with suppress(ValueError, RuntimeError, NotImplementedError):
        loop.add_signal_handler(signal.SIGINT, halt)
    try:
        yield
    finally:
        with suppress(ValueError, RuntimeError, NotImplementedError):
            loop.remove_signal_handler(signal.SIGINT)
