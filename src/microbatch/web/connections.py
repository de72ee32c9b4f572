"""uvicorn's connections with the bounds that it leaves open.

uvicorn gives a request any time and any size until its headers are complete, and a client that was answered before it
had sent its whole body may go on sending for ever. A few thousand such clients would hold every file descriptor. Of
several requests in a row it tells only the last that their client has gone. The one class here is given to uvicorn as
its ``http=``.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from microbatch.web.direct import Cycle, Lane, is_plain
from microbatch.web.watch import GONE

HEADER_TIMEOUT = 15.0
"""Seconds from the first byte of a request, or of the connection, to the end of the headers."""
HEADER_LIMIT = 64 * 2**10
"""Bytes of the request line and the headers together; what one read brings may be more, and is bounded by itself."""
LEFTOVER_TIMEOUT = 10.0
"""Seconds in which the rest of a body that was answered already is thrown away."""
TURNED_AWAY_TIMEOUT = 1.0
"""Seconds in which one connection too many may say something, and be told; then it is closed without a word."""
NO_LANES: dict[bytes, Lane] = {}


class Connection(HttpToolsProtocol):
    """One connection, whose headers come in time and within a size, and whose leftovers end.

    Attributes:
        most: connections that are served at once; set by the server.
    """

    most: int

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come; its first request is due."""
        super().connection_made(transport)
        self._header_bytes = 0
        self._in_headers = self._begun = False
        self._due: asyncio.TimerHandle | None = None
        self._idle_since = 0.0
        self._idle: asyncio.TimerHandle | None = None
        self._unanswered: list[RequestResponseCycle | Cycle] = []
        self._lanes: dict[bytes, Lane] = getattr(self.app, "lanes", NO_LANES)
        self._turned_away = len(self.connections) > self.most
        if self._turned_away:
            self._due = self.loop.call_later(TURNED_AWAY_TIMEOUT, transport.close)
        else:
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone, and nobody waits for its answers any more."""
        self._nothing_due()
        if self._idle is not None:
            self._idle.cancel()
        self._abandon()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """A part of the next request, or of several."""
        if self._turned_away:
            self._refuse(503, b"All %d connections are taken." % self.most, b"Overloaded")
            return
        super().data_received(data)
        cycle: Any = self.cycle
        if self.pipeline:
            self._listen()
        if self._in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > HEADER_LIMIT:
                self._refuse(431, b"The headers are too large.")
            elif self._due is None:
                self._expect_headers()
        elif type(cycle) is Cycle:
            if cycle.more_body:
                self._go_the_long_way(cycle)
        elif self._due is None and self._answered_early():
            self._due = self.loop.call_later(LEFTOVER_TIMEOUT, self.transport.close)

    def on_message_begin(self) -> None:
        """The first byte of a request, be it the first one of the connection or a later one."""
        self.url, self.headers, self.expect_100_continue = b"", [], False
        self._in_headers = self._begun = True
        self._header_bytes = 0

    def on_headers_complete(self) -> None:
        """The body begins, for which the application has its own bounds."""
        self._in_headers = self._begun = False
        self._nothing_due()
        lane = self._lanes.get(self.url)
        if lane is not None and self._is_idle() and self._is_usual() and is_plain(self.headers):
            cycle: Any = Cycle(lane)
            self.cycle = cycle
            self._unanswered = [cycle]
        else:
            self._begin_task()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        cycle: Any = self.cycle
        if type(cycle) is Cycle:
            cycle.body += body
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete; if it was answered before, uvicorn no longer waits for the next one with a limit."""
        cycle: Any = self.cycle
        if type(cycle) is Cycle:
            cycle.more_body = False
            self._hand_over(cycle)
            return
        answered = self._answered_early()
        self._nothing_due()
        super().on_message_complete()
        if answered:
            self._expect_headers()

    def on_response_complete(self) -> None:
        """The connection is idle, or has a next request. One timer does for many answers: it looks since when."""
        self._idle_since = self.loop.time()
        if self.pipeline or self.transport.is_closing():
            super().on_response_complete()
            return
        self.server_state.total_requests += 1
        self.flow.resume_reading()
        if self._idle is None:
            self._idle = self.loop.call_later(self.timeout_keep_alive, self._close_if_idle)

    def _listen(self) -> None:
        """uvicorn stops reading when requests wait, and the task of the first one begins again; here there is none."""
        first: Any = next(iter(self._unanswered), None)  # none where they have just been given up
        if type(first) is Cycle and not first.listens:
            first.listens = True
            self.flow.resume_reading()

    def _close_if_idle(self) -> None:
        self._idle = None
        if not self._is_idle() or self._in_headers:
            return
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self._idle = self.loop.call_later(left, self._close_if_idle)
        elif not self.transport.is_closing():
            self.transport.close()

    def _is_idle(self) -> bool:
        """Whether every request that came has been answered."""
        return (self.cycle is None or self.cycle.response_complete) and not self.pipeline

    def _is_usual(self) -> bool:
        parser = self.parser
        return parser.get_method() == b"POST" and parser.get_http_version() == "1.1" and parser.should_keep_alive()

    def _begin_task(self) -> None:
        """A request as uvicorn has them, answered by a task."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers += headers
        to_tell: Any = []
        self.scope["extensions"] = {GONE: to_tell}
        super().on_headers_complete()
        self._unanswered = [cycle for cycle in self._unanswered if not cycle.response_complete]
        self._unanswered.append(self.cycle)

    def _go_the_long_way(self, cycle: Cycle) -> None:
        """What has come so far is given to a task after all."""
        cycle.response_complete = True
        self._begin_task()
        if cycle.body:
            super().on_body(cycle.body)
        if not cycle.more_body:
            super().on_message_complete()

    def _hand_over(self, cycle: Cycle) -> None:
        try:
            withdraw = cycle.lane.post(cycle.body, partial(self._answer, cycle))
        except Exception as error:
            self._answer(cycle, error)
            return
        if withdraw is None:
            self._go_the_long_way(cycle)
        else:
            cycle.scope["extensions"][GONE].append(withdraw)

    def _answer(self, cycle: Cycle, answer: bytes | Exception) -> None:
        """Write the answer of a request on the short way."""
        if cycle.disconnected or self.transport.is_closing():
            return
        response = self.app.answered(cycle.lane.path, answer)
        body, head = response.body, [STATUS_LINE[response.status]]
        for name, value in (
            *self.server_state.default_headers,
            (b"content-type", response.content_type.encode()),
            *response.headers,
            (b"content-length", b"%d" % len(body)),
        ):
            head += (name, b": ", value, b"\r\n")
        if not cycle.keep_alive:
            head.append(b"connection: close\r\n")
        head += (b"\r\n", body)
        self.transport.write(b"".join(head))
        cycle.response_complete = True
        if not cycle.keep_alive:
            self.transport.close()
        self.on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """What came is no request of HTTP."""
        self._refuse(400, msg.encode("ascii", "replace"))

    def _abandon(self) -> None:
        """Tell every request that is not answered yet that its client has gone."""
        for cycle in self._unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
                to_tell: Any = cycle.scope["extensions"][GONE]
                for tell in to_tell:
                    tell()
        self._unanswered = []

    def _expect_headers(self) -> None:
        self._due = self.loop.call_later(HEADER_TIMEOUT, self._too_slow)

    def _answered_early(self) -> bool:
        cycle = self.cycle
        return cycle is not None and cycle.response_complete and cycle.more_body

    def _nothing_due(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _too_slow(self) -> None:
        """Whoever has begun a request is told; a connection that never said anything is just closed."""
        self._due = None
        if self._begun:
            self._refuse(408, b"The headers did not come in time.")
        else:
            self.transport.close()

    def _refuse(self, status: int, text: bytes, kind: bytes = b"InvalidRequest") -> None:
        """Close the connection; with a word, unless an earlier request is still being answered on it."""
        if self.transport.is_closing():
            return
        if all(cycle.response_complete for cycle in self._unanswered):
            document = b'{"error":{"type":"%s","message":"%s","remedy":""}}' % (kind, text)
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(document)
            self.transport.write(STATUS_LINE[status] + head + document)
        self._abandon()
        self.transport.close()
