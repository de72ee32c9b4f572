"""uvicorn's connections with the bounds that it leaves open.

uvicorn gives a request any time and any size until its headers are complete, and a client that was answered before it
had sent its whole body may go on sending for ever. A few thousand such clients would hold every file descriptor. Of
several requests in a row it tells only the last that their client has gone. The one class here is given to uvicorn as
its ``http=``.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from microbatch.web.watch import GONE

HEADER_TIMEOUT = 15.0
"""Seconds from the first byte of a request, or of the connection, to the end of the headers."""
HEADER_LIMIT = 64 * 2**10
"""Bytes of the request line and the headers together; what one read brings may be more, and is bounded by itself."""
LEFTOVER_TIMEOUT = 10.0
"""Seconds in which the rest of a body that was answered already is thrown away."""
TURNED_AWAY_TIMEOUT = 1.0
"""Seconds in which one connection too many may say something, and be told; then it is closed without a word."""


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
        self._unanswered: list[RequestResponseCycle] = []
        self._turned_away = len(self.connections) > self.most
        if self._turned_away:
            self._due = self.loop.call_later(TURNED_AWAY_TIMEOUT, transport.close)
        else:
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone, and nobody waits for its answers any more."""
        self._nothing_due()
        self._abandon()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """A part of the next request, or of several."""
        if self._turned_away:
            self._refuse(503, b"All %d connections are taken." % self.most, b"Overloaded")
            return
        super().data_received(data)
        if self._in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > HEADER_LIMIT:
                self._refuse(431, b"The headers are too large.")
        elif self._due is None and self._answered_early():
            self._due = self.loop.call_later(LEFTOVER_TIMEOUT, self.transport.close)

    def on_message_begin(self) -> None:
        """The first byte of a request, be it the first one of the connection or a later one."""
        super().on_message_begin()
        self._in_headers = self._begun = True
        self._header_bytes = 0
        if self._due is None:
            self._expect_headers()

    def on_headers_complete(self) -> None:
        """The body begins, for which the application has its own bounds."""
        self._in_headers = self._begun = False
        self._nothing_due()
        to_tell: Any = []
        self.scope["extensions"] = {GONE: to_tell}
        super().on_headers_complete()
        self._unanswered = [cycle for cycle in self._unanswered if not cycle.response_complete]
        self._unanswered.append(self.cycle)

    def on_message_complete(self) -> None:
        """The request is complete; if it was answered before, uvicorn no longer waits for the next one with a limit."""
        answered = self._answered_early()
        self._nothing_due()
        super().on_message_complete()
        if answered:
            self._expect_headers()

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
