"""The connections of one run: which are free, which carry a request, and which requests wait for one."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle

from microbatch.web.load.connection import Connection
from microbatch.web.load.preflight import no_answer
from microbatch.web.load.requests import Question
from microbatch.web.load.tally import NO_CONNECTION, TIMED_OUT, Tally

SWEEP = 0.1
"""Seconds between two looks for requests that are over their time; a tenth of that time where it is shorter."""
PAUSE = 0.1
"""Seconds before a client of a closed loop whose connection failed tries again."""
KEPT_FREE = 64
"""Files that are open for other reasons."""
MOST_FILES = 100_000


class Sender:
    """Sends what is due at once on a free connection, on a new one while more are allowed, else on the next free one.

    Times are by the clock of the loop; the tally gets them from `start` on.

    Args:
        question: the requests.
        address: numeric, of the server.
        most: connections at once.
        timeout: seconds from the moment a request was due to its end.
        tally: is told what happens.
    """

    def __init__(self, question: Question, address: str, *, most: int, timeout: float, tally: Tally) -> None:
        self.start = 0.0
        self.tally = tally
        self.opened = 0
        self.halted = False
        self.next_ask: Callable[[], None] | None = None
        self._question = question
        self._address = address
        self._most = most
        self._timeout = timeout
        self._requests: Iterator[bytes] = cycle(question.wire())
        self._loop = asyncio.get_running_loop()
        self._free: list[Connection] = []
        self._all: set[Connection] = set()
        self._waiting: deque[float] = deque()
        self._opening: set[asyncio.Task[None]] = set()
        self._tls = ssl.create_default_context() if question.target.scheme == "https" else None
        self._sweeper = self._loop.call_later(self._sweep_gap, self._sweep)

    @property
    def pending(self) -> int:
        """Requests without an end so far."""
        return len(self._waiting) + sum(connection.due is not None for connection in self._all)

    async def open(self, count: int) -> None:
        """Connections before the clock starts.

        Raises:
            InvalidSettings: not even one can be opened.
        """
        results = await asyncio.gather(*(self._connect() for _ in range(count)), return_exceptions=True)
        self._free += [made for made in results if isinstance(made, Connection)]
        if not self._free:
            error = results[0]
            raise no_answer(self._question.target, error if isinstance(error, Exception) else ConnectionRefusedError())

    def send(self, due: float) -> None:
        """A request that is due."""
        now = self._loop.time()
        while self._free:
            connection = self._free.pop()
            if not connection.closed:
                self.tally.begin(due - self.start, now - self.start)
                connection.ask(next(self._requests), due)
                return
        may_open = len(self._all) + len(self._opening) < self._most
        self.tally.begin(due - self.start, now - self.start, waits=not may_open)
        self._waiting.append(due)
        if may_open:
            self._open_another()

    def answered(self, connection: Connection, status: int | str, text: str) -> None:
        """The request of a connection has come to an end."""
        assert connection.due is not None
        self._finish(connection.due, status, text)
        connection.due = None
        self._put_to_use(connection)
        self._ask_again(failed=status == NO_CONNECTION)

    def lost(self, connection: Connection) -> None:
        """A connection is gone; a request may wait for another."""
        self._all.discard(connection)
        with suppress(ValueError):
            self._free.remove(connection)
        if len(self._waiting) > len(self._opening) and len(self._all) + len(self._opening) < self._most:
            self._open_another()

    async def ended(self) -> None:
        """Until no request is without an end, which the timeout bounds, or it is halted."""
        while self.pending and not self.halted:
            await asyncio.sleep(min(self._sweep_gap, 0.02))

    async def close(self) -> None:
        """All connections, at once; nothing is counted any more."""
        self.next_ask = None
        self._sweeper.cancel()
        self._waiting.clear()
        for task in self._opening:
            task.cancel()
        for connection in tuple(self._all):
            connection.close()
        await asyncio.sleep(0)

    def _finish(self, due: float, status: int | str, text: str = "") -> None:
        self.tally.finish(due - self.start, self._loop.time() - self.start, status, text)

    def _put_to_use(self, connection: Connection) -> None:
        if connection.closed:
            return
        if self._waiting:
            connection.ask(next(self._requests), self._waiting.popleft())
        else:
            self._free.append(connection)

    def _ask_again(self, *, failed: bool = False) -> None:
        """A closed loop goes on: at once, or after a pause where nobody answers."""
        if failed:
            self._loop.call_later(PAUSE, self._ask_again)
        elif self.next_ask is not None:
            self.next_ask()

    def _open_another(self) -> None:
        task = self._loop.create_task(self._open_one())
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open_one(self) -> None:
        """A further connection; where none can be had, one of those that wait for it has no answer."""
        try:
            connection = await self._connect()
        except OSError as error:
            if self._waiting:
                self._finish(self._waiting.popleft(), NO_CONNECTION, str(error))
                self._ask_again(failed=True)
            return
        self._put_to_use(connection)

    async def _connect(self) -> Connection:
        target = self._question.target
        _, connection = await asyncio.wait_for(
            self._loop.create_connection(
                lambda: Connection(self),
                self._address,
                target.port,
                ssl=self._tls,
                server_hostname=target.host if self._tls else None,
            ),
            self._timeout,
        )
        if not connection.closed:
            self._all.add(connection)
        self.opened = max(self.opened, len(self._all))
        return connection

    @property
    def _sweep_gap(self) -> float:
        return min(SWEEP, self._timeout / 10)

    def _sweep(self) -> None:
        """End what is over its time, in the order in which it was due as far as it waits."""
        late = self._loop.time() - self._timeout
        while self._waiting and self._waiting[0] <= late:
            self._finish(self._waiting.popleft(), TIMED_OUT)
            self._ask_again()
        for connection in [one for one in self._all if one.due is not None and one.due <= late]:
            due = connection.due
            connection.close()
            assert due is not None
            self._finish(due, TIMED_OUT)
            self._ask_again()
        self._sweeper = self._loop.call_later(self._sweep_gap, self._sweep)


def room() -> int:
    """Connections that this process may have; the soft limit on open files is raised to the hard one."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return MOST_FILES
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard - KEPT_FREE
