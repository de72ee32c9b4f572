"""One connection that asks one thing at a time: a bare asyncio protocol over the parser that node and uvicorn use."""

from __future__ import annotations

import asyncio
from typing import Protocol

import httptools

from microbatch.web.load.preflight import said
from microbatch.web.load.tally import NO_CONNECTION, NOT_HTTP

KEPT = 4096
"""Bytes kept of an answer that is no success, for its text."""


class Owner(Protocol):
    """Whom a connection tells what happened."""

    def answered(self, connection: Connection, status: int | str, text: str) -> None:
        """Its request has come to an end; the connection is free again, or `closed`."""

    def lost(self, connection: Connection) -> None:
        """It is gone; a request that it carried has been answered for before."""


class Connection(asyncio.Protocol):
    """State of one connection.

    Attributes:
        due: when its request was due, by the clock of the loop; None while it is free.
        closed: no further request may be sent.
    """

    def __init__(self, owner: Owner) -> None:
        self.due: float | None = None
        self.closed = False
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._complete = self._has_headers = False
        self._keeps_alive = True
        self._first = self._body = b""

    def ask(self, request: bytes, due: float) -> None:
        """Send a request; the connection must be free."""
        self.due = due
        assert self._transport is not None
        self._transport.write(request)

    def close(self) -> None:
        """At once, without an answer to what it carries."""
        self.closed = True
        self.due = None
        if self._transport is not None:
            self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The way is open."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """A piece of an answer; what comes without a question is a server that is about to close."""
        if self.due is None:
            self._hang_up()
            return
        if not self._has_headers:
            self._first += data
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._hang_up()
            self._end(NOT_HTTP, said(data[:KEPT]))
            return
        if self._complete:
            self._end(self._parser.get_status_code(), said(self._body) if self._body else "")

    def connection_lost(self, exc: Exception | None) -> None:
        """The end, which is also how an answer without a length ends."""
        self.closed = True
        if self.due is not None:
            whole = self._has_headers and exc is None and not _has_length(self._first)
            self._end(self._parser.get_status_code() if whole else NO_CONNECTION, "" if whole else _why(exc))
        self._owner.lost(self)

    # What the parser calls.

    def on_headers_complete(self) -> None:
        """Status and headers are known."""
        self._has_headers = self._parser.get_status_code() >= 200

    def on_body(self, body: bytes) -> None:
        """A piece of the body; only the text of an error is kept."""
        if self._parser.get_status_code() >= 300 and len(self._body) < KEPT:
            self._body += body

    def on_message_complete(self) -> None:
        """The whole answer is there, or only an announcement (1xx) of one."""
        self._complete = self._has_headers
        self._keeps_alive = self._parser.should_keep_alive()

    def _end(self, status: int | str, text: str) -> None:
        if not self._keeps_alive:
            self._hang_up()
        self._complete = self._has_headers = False
        self._first = self._body = b""
        self._owner.answered(self, status, text)

    def _hang_up(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.close()


def _has_length(head: bytes) -> bool:
    """Whether an answer said how long it is, so that an earlier end is a loss."""
    lines = head.split(b"\r\n\r\n")[0].lower()
    return b"\r\ncontent-length:" in lines or b"\r\ntransfer-encoding:" in lines


def _why(error: Exception | None) -> str:
    return f"closed by the server: {error}" if error else "closed by the server before its answer"
