"""The whole server on real sockets, against clients that are slow, vanish, send too much, or come in floods."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import pytest

from microbatch.serving.engine.batcher import DynamicBatcher
from microbatch.web.load.sender import room
from tests.serving.engines import Held
from tests.serving.functions import double
from tests.web.hard_clients import (
    LONG,
    FastClient,
    ask,
    connect,
    dripping,
    read_answer,
    request,
    until,
    vanish,
)
from tests.web.running import running

LIMIT = 100_000
"""Bytes of a body in these tests."""


@contextmanager
def doubling(**options: Any) -> Iterator[str]:
    with running(DynamicBatcher(double, examples=[1.0], max_batch_size=8), body_limit=LIMIT, **options) as url:
        yield url


@contextmanager
def many(url: str, count: int) -> Iterator[list[socket.socket]]:
    """So many connections, closed at the end."""
    if room() < 2 * count + 200:  # both ends are in this process
        pytest.skip(f"{count} connections need more open files than are allowed here")
    with ExitStack() as stack:
        yield [stack.enter_context(connect(url)) for _ in range(count)]


SLOW = {
    "in their headers": (b"POST /predict HTTP/1.1\r\nHost: x\r\nX-Slow: ", b"a"),
    "in their bodies": (request([1.0], length=5000), b" "),
    "silent": (b"", b""),
}
"""How a client begins, and what it sends now and then."""


@pytest.mark.alone
@pytest.mark.parametrize("how", SLOW)
def test_a_thousand_slow_clients_do_not_stop_a_fast_one(how: str) -> None:
    begin, drop = SLOW[how]
    with doubling() as url, many(url, 1000) as slow:
        client = FastClient(url)
        for connection in slow:
            connection.sendall(begin)
        with dripping(slow, drop) if drop else nullcontext():
            assert [client.ask(k) for k in range(100)] == [2 * k for k in range(100)]
            assert ask(url, 7.5) == (200, {"result": 15.0})  # and a new one gets in
        client.close()
    assert sorted(client.seconds)[50] < 0.25
    assert max(client.seconds) < 5


@pytest.mark.alone
def test_slow_bodies_end_in_a_word() -> None:
    with doubling(body_timeout=0.5) as url, many(url, 20) as slow:
        for connection in slow:
            connection.sendall(request([1.0], length=5000))
        answers = [read_answer(connection.makefile("rb")) for connection in slow]
    assert {status for status, _ in answers} == {408}


class Queue:
    """A server whose model is held by one item, so that what comes after waits."""

    def __init__(self, stack: ExitStack) -> None:
        self.model = Held()
        self.engine = DynamicBatcher(self.model, max_batch_size=8, check="off")
        self.url = stack.enter_context(running(self.engine))
        stack.callback(self.model.let_go)
        self.holder = stack.enter_context(connect(self.url))
        self.holder.sendall(request("holder"))
        assert self.model.entered.acquire(timeout=LONG)

    @property
    def seen(self) -> set[Any]:
        """Items that the model was given."""
        return {item for batch in self.model.batches for item in batch}

    def waits(self, count: int) -> None:
        """Until so many items wait."""
        until(lambda: self.engine.metrics().waiting == count)


@pytest.fixture
def held() -> Iterator[Queue]:
    with ExitStack() as stack:
        yield Queue(stack)


def test_two_hundred_clients_that_vanish_leave_no_work(held: Queue) -> None:
    gone = [connect(held.url) for _ in range(200)]
    for number, connection in enumerate(gone):
        connection.sendall(request(f"gone {number}"))
    held.waits(200)
    for number, connection in enumerate(gone):
        vanish(connection, rudely=number % 2 == 0)
    held.waits(0)
    new = [connect(held.url) for _ in range(20)]
    for number, connection in enumerate(new):
        connection.sendall(request(f"new {number} "))
    held.waits(20)
    held.model.let_go()
    for number, connection in enumerate(new):
        with connection:
            assert read_answer(connection.makefile("rb")) == (200, {"result": f"new {number} " * 2})
    assert read_answer(held.holder.makefile("rb")) == (200, {"result": "holder" * 2})
    assert held.seen == {"holder", *(f"new {number} " for number in range(20))}
    metrics = held.engine.metrics()
    assert metrics.cancelled == 200
    assert len(held.model.batches) <= 1 + 20  # the holder, and the new ones in batches


@pytest.mark.parametrize("rudely", [False, True])
def test_who_vanishes_with_requests_in_a_row_leaves_no_work(held: Queue, rudely: bool) -> None:
    connection = connect(held.url)
    connection.sendall(b"".join(request(f"gone {number}") for number in range(3)))
    held.waits(1)  # the next ones wait for the answer before them
    vanish(connection, rudely=rudely)
    held.waits(0)
    held.model.let_go()
    assert read_answer(held.holder.makefile("rb"))[0] == 200
    assert ask(held.url, 1.0) == (200, {"result": 2.0})
    assert held.seen == {"holder", 1.0}


def test_who_has_sent_many_items_and_vanishes_leaves_no_work(held: Queue) -> None:
    connection = connect(held.url)
    connection.sendall(request({"items": [f"gone {number}" for number in range(50)]}))
    held.waits(50)
    vanish(connection, rudely=False)
    held.waits(0)
    held.model.let_go()
    assert ask(held.url, 1.0) == (200, {"result": 2.0})
    assert held.seen == {"holder", 1.0}


def test_who_says_nothing_more_but_stays_is_answered_or_let_go(held: Queue) -> None:
    """A half-closed connection looks like a closed one: its work may be dropped, but never its socket be kept."""
    connection = connect(held.url)
    connection.sendall(request(3.0))
    held.waits(1)
    connection.shutdown(socket.SHUT_WR)
    held.model.let_go()
    status, document = read_answer(connection.makefile("rb"))
    assert (status, document) in ((0, None), (200, {"result": 6.0}))
    assert connection.recv(1) == b""
    connection.close()
    assert ask(held.url, 1.0) == (200, {"result": 2.0})


def test_a_quick_answer_reaches_who_has_closed_his_half() -> None:
    with doubling() as url, connect(url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        assert read_answer(connection.makefile("rb"))[0] in (0, 200)
        assert ask(url, 2.0)[0] == 200


def test_requests_in_a_row_are_answered_in_their_order() -> None:
    with doubling() as url, connect(url) as connection:
        connection.sendall(b"".join(request(float(number)) for number in range(200)))
        stream = connection.makefile("rb")
        answers = [read_answer(stream) for _ in range(200)]
    assert answers == [(200, {"result": 2.0 * number}) for number in range(200)]


def test_a_bad_request_in_a_row_is_never_taken_for_the_answer_to_one_before_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with doubling() as url, connect(url) as connection:
        connection.sendall(request(1.0) + request(2.0) + b"NONSENSE\r\n\r\n")
        stream = connection.makefile("rb")
        answers = []
        while (answer := read_answer(stream))[0] != 0:
            answers.append(answer)
        right = [(200, {"result": 2.0}), (200, {"result": 4.0})]
        assert answers[:2] == right[: len(answers)]
        assert [status for status, _ in answers[2:]] in ([], [400])
        assert ask(url, 3.0) == (200, {"result": 6.0})
    assert "Traceback" not in capfd.readouterr().err


def test_what_is_no_request_is_told_in_the_form_of_all_errors() -> None:
    with doubling() as url, connect(url) as connection:
        connection.sendall(b"NONSENSE\r\n\r\n")
        status, document = read_answer(connection.makefile("rb"))
    assert (status, document["error"]["type"]) == (400, "InvalidRequest")


def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes() -> None:
    with doubling() as url, connect(url) as connection:
        connection.sendall(request(1.0, length=10**12))
        status, document = read_answer(connection.makefile("rb"))
        assert status == 413 and "100 kB" in document["error"]["message"]
        assert ask(url, 3.0)[0] == 200


def test_a_body_that_never_ends_is_refused_and_then_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("microbatch.web.connections.LEFTOVER_TIMEOUT", 0.5)
    chunk = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
    head = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with doubling() as url, connect(url) as connection:
        connection.sendall(head + chunk * (2 * LIMIT // len(chunk)))
        stream = connection.makefile("rb")
        assert read_answer(stream)[0] == 413
        end = time.monotonic() + LONG
        with suppress(OSError):
            while time.monotonic() < end:
                connection.send(chunk)
        assert time.monotonic() < end
        assert ask(url, 3.0) == (200, {"result": 6.0})


def test_headers_without_end_are_refused() -> None:
    with doubling() as url, connect(url) as connection:
        try:
            connection.sendall(b"GET / HTTP/1.1\r\nX: " + b"a" * 2_000_000)
            status = read_answer(connection.makefile("rb"))[0]
        except ConnectionError:
            status = 0
        assert status in (431, 0)
        assert ask(url, 3.0)[0] == 200


def test_a_flood_of_connections_is_bounded_and_told_so() -> None:
    with doubling(server={"max_connections": 50}) as url, many(url, 40) as inside:
        for connection in inside:
            connection.sendall(request(1.0))
            assert read_answer(connection.makefile("rb"))[0] == 200
        with many(url, 60) as flood:
            answers = []
            for connection in flood[10:]:
                connection.sendall(request(1.0))
                answers.append(read_answer(connection.makefile("rb")))
            assert {status for status, _ in answers} == {503}
            assert all("50 connections" in document["error"]["message"] for _, document in answers)
            for connection in inside:  # who was there is served as before
                connection.sendall(request(2.0))
                assert read_answer(connection.makefile("rb")) == (200, {"result": 4.0})
        end = time.monotonic() + LONG
        while (status := ask(url, 3.0)[0]) != 200 and time.monotonic() < end:
            time.sleep(0.05)
        assert status == 200  # when the flood is over, others get in
