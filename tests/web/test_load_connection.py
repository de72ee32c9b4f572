"""One connection of the load generator, fed by hand: answers in any pieces."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from microbatch.web.load.connection import Connection
from microbatch.web.load.tally import NO_CONNECTION, NOT_HTTP


class Wire(asyncio.Transport):
    """Remembers what was written and whether it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.is_closed = True

    abort = close


class Told:
    """Whom a connection tells what happened."""

    def __init__(self) -> None:
        self.ends: list[int | str] = []
        self.losses = 0

    def answered(self, connection: Connection, status: int | str, text: str) -> None:
        assert connection.due is not None
        connection.due = None
        self.ends.append(status)

    def lost(self, connection: Connection) -> None:
        self.losses += 1


def asked() -> tuple[Connection, Wire, Told]:
    wire, told = Wire(), Told()
    connection = Connection(told)
    connection.connection_made(wire)
    connection.ask(b"GET / HTTP/1.1\r\n\r\n", 1.0)
    assert wire.written == b"GET / HTTP/1.1\r\n\r\n"
    return connection, wire, told


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
ANSWERS = {
    OK: 200,
    b"HTTP/1.1 100 Continue\r\n\r\n" + OK: 200,
    b"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n" + OK: 200,
    b"HTTP/1.1 204 No Content\r\n\r\n": 204,
    b"HTTP/1.1 429 Too Many\r\nContent-Length: 0\r\n\r\n": 429,
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n": 200,
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_answer_in_any_pieces_is_one_answer_at_its_end(answer: bytes, size: int) -> None:
    connection, wire, told = asked()
    pieces = [answer[start : start + size] for start in range(0, len(answer), size)]
    for piece in pieces[:-1]:
        connection.data_received(piece)
        assert told.ends == []
    connection.data_received(pieces[-1])
    assert told.ends == [ANSWERS[answer]]
    assert not connection.closed and not wire.is_closed
    connection.ask(b"again", 2.0)
    connection.data_received(OK)
    assert told.ends == [ANSWERS[answer], 200]


def test_a_server_that_closes_after_its_answer_is_asked_no_more() -> None:
    connection, wire, told = asked()
    connection.data_received(OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert told.ends == [200]
    assert connection.closed and wire.is_closed


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", 200),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nless", NO_CONNECTION),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", NO_CONNECTION),
        (b"HTTP/1.1 200", NO_CONNECTION),
        (b"", NO_CONNECTION),
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_the_end_of_the_connection_ends_an_answer_without_a_length_only(
    answer: bytes, status: int | str, size: int
) -> None:
    connection, _, told = asked()
    for start in range(0, len(answer), size):
        connection.data_received(answer[start : start + size])
    connection.connection_lost(None)
    assert (told.ends, told.losses) == ([status], 1)


def test_a_reset_is_no_end_of_an_answer() -> None:
    connection, _, told = asked()
    connection.data_received(b"HTTP/1.1 200 OK\r\n\r\nuntil the")
    connection.connection_lost(ConnectionResetError())
    assert told.ends == [NO_CONNECTION]


def test_what_is_not_http_ends_the_connection() -> None:
    connection, wire, told = asked()
    connection.data_received(b"220 smtp.example\r\n")
    assert told.ends == [NOT_HTTP]
    assert connection.closed and wire.is_closed


def test_what_comes_without_a_question_ends_the_connection() -> None:
    connection, wire, told = asked()
    connection.data_received(OK)
    connection.data_received(b"HTTP/1.1 408 Too Slow\r\nContent-Length: 0\r\n\r\n")
    assert told.ends == [200]
    assert connection.closed and wire.is_closed
    connection.connection_lost(None)
    assert (told.ends, told.losses) == ([200], 1)


def test_one_that_is_given_up_tells_of_nothing_but_its_end() -> None:
    connection, _, told = asked()
    connection.close()
    connection.connection_lost(None)
    assert (told.ends, told.losses) == ([], 1)
