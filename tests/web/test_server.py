"""The server as it runs: real sockets, slow and vanishing clients, signals in a real process."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from microbatch.errors import InvalidSettings
from microbatch.serving.engine.batcher import DynamicBatcher
from microbatch.web import connections
from microbatch.web.application import application
from microbatch.web.server import bind, serve, url_of
from tests.web.asking import JSON_TYPE, as_json, connect, fetch
from tests.web.engines import Instant
from tests.web.running import process, running

PATIENCE = 60.0


@contextmanager
def opened(url: str, data: bytes = b"") -> Iterator[socket.socket]:
    """A bare connection that has sent some bytes."""
    parts = urlsplit(url)
    with closing(socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE)) as found:
        found.sendall(data)
        yield found


def head(path: str = "/predict", **headers: Any) -> bytes:
    """The beginning of a request, up to its body."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def everything(connection: socket.socket) -> bytes:
    """What is sent until the other end closes."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


class Held:
    """A function that waits for its gate, and remembers what it was given."""

    def __init__(self) -> None:
        self.entered, self.gate = threading.Event(), threading.Event()
        self.seen: list[Any] = []

    def __call__(self, items: list[Any]) -> list[Any]:
        self.seen += items
        self.entered.set()
        assert self.gate.wait(PATIENCE)
        return [2 * item for item in items]

    def wait_for(self, count: int) -> None:
        """Until so many items have come."""
        until(lambda: len(self.seen) >= count)


def until(condition: Any) -> None:
    """Wait until something is true."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_requests_are_answered_in_batches_that_nobody_sees() -> None:
    held = Held()
    engine = DynamicBatcher(held, max_batch_size=8, max_queue_delay=0.0)
    answers: dict[int, bytes] = {}

    def client(number: int, url: str) -> None:
        answers[number] = fetch(url, "POST", "/predict", as_json(number), JSON_TYPE).body

    with running(engine) as url:
        threads = [threading.Thread(target=client, args=(number, url)) for number in range(12)]
        for thread in threads:
            thread.start()
        until(lambda: engine.metrics().accepted == 12)
        held.gate.set()
        for thread in threads:
            thread.join(PATIENCE)
        metrics = engine.metrics()
    assert {number: json.loads(answers[number]) for number in range(12)} == {n: {"result": 2 * n} for n in range(12)}
    assert metrics.batches < 12


def test_one_connection_carries_many_requests() -> None:
    with running(Instant(lambda item: item)) as url, closing(connect(url)) as connection:
        for number in range(5):
            connection.request("POST", "/predict", as_json(number), JSON_TYPE)
            response = connection.getresponse()
            assert (response.status, json.loads(response.read())) == (200, {"result": number})
        connection.request("POST", "/predict", b"{", JSON_TYPE)
        assert connection.getresponse().read()
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_beyond_the_limit_is_refused_while_it_is_read(declared: bool) -> None:
    body = b"1" * 5_000_000
    with running(Instant(lambda item: item), body_limit=1000) as url, closing(connect(url)) as connection:
        connection.request(
            "POST", "/predict", body if declared else iter([body]), JSON_TYPE, encode_chunked=not declared
        )
        response = connection.getresponse()
        assert response.status == 413
        assert json.loads(response.read())["error"]["type"] == "InvalidRequest"


def test_a_body_that_does_not_come_is_given_up() -> None:
    with (
        running(Instant(lambda item: item), body_timeout=0.2) as url,
        opened(url, head(Content_Length=9) + b"[1") as slow,
    ):
        assert slow.recv(65536).startswith(b"HTTP/1.1 408 ")


def test_headers_that_do_not_come_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_TIMEOUT", 0.2)
    with running(Instant(lambda item: item)) as url:
        with opened(url) as silent, opened(url, b"POST /predict HT") as slow:
            assert everything(silent) == b""
            assert everything(slow).startswith(b"HTTP/1.1 408 ")
        with opened(url, head(Content_Length=1) + b"1") as kept:
            assert b"200 OK" in kept.recv(65536)
            kept.sendall(b"POST /pre")
            assert everything(kept).startswith(b"HTTP/1.1 408 ")


def test_headers_without_end_are_given_up() -> None:
    with running(Instant(lambda item: item)) as url, opened(url, b"GET /health HTTP/1.1\r\n") as endless:
        with pytest.raises(ConnectionError):  # noqa: PT012
            for number in range(100_000):
                endless.sendall(f"X-{number}: {'x' * 1000}\r\n".encode())
            raise AssertionError("nobody stopped it")
        assert fetch(url, "GET", "/health").status == 200


def test_a_body_that_was_answered_already_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LEFTOVER_TIMEOUT", 0.2)
    with running(Instant(lambda item: item), body_limit=10) as url, opened(url, head(Content_Length=10**9)) as endless:
        assert endless.recv(65536).startswith(b"HTTP/1.1 413 ")
        with pytest.raises(ConnectionError):  # noqa: PT012
            end = time.monotonic() + PATIENCE
            while time.monotonic() < end:
                endless.sendall(b"1" * 1000)
                time.sleep(0.01)


@pytest.mark.parametrize("junk", [b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9\r\n\r\n", b"\r\n\r\n\r\n", b"{}" * 100])
def test_what_is_no_request_does_no_harm(junk: bytes) -> None:
    with running(Instant(lambda item: item)) as url:
        with opened(url, junk) as connection:
            connection.shutdown(socket.SHUT_WR)
            assert b"Traceback" not in everything(connection)
        assert fetch(url, "GET", "/health").status == 200


def test_clients_that_vanish_take_their_work_with_them() -> None:
    held = Held()
    engine = DynamicBatcher(held, max_batch_size=4, max_queue_delay=0.0)
    with running(engine) as url:
        first = threading.Thread(target=fetch, args=(url, "POST", "/predict", b"0", JSON_TYPE))
        first.start()
        held.wait_for(1)
        gone = [opened(url, head(Content_Length=3) + str(100 + number).encode()) for number in range(30)]
        for connection in gone:
            connection.__enter__()
        until(lambda: engine.metrics().accepted == 31)
        for connection in gone:
            connection.__exit__(None, None, None)
        until(lambda: engine.metrics().cancelled == 30)
        held.gate.set()
        first.join(PATIENCE)
        assert fetch(url, "POST", "/predict", b"7", JSON_TYPE).json() == {"result": 14}
    assert held.seen == [0, 7]


def test_a_stream_that_nobody_reads_on_takes_its_work_with_it() -> None:
    held = Held()
    engine = DynamicBatcher(held, max_batch_size=1, max_queue_delay=0.0)
    body = as_json({"items": [1, 2, 3], "stream": True})
    with running(engine) as url:
        with opened(url, head(Content_Length=len(body)) + body):
            held.wait_for(1)
        until(lambda: engine.metrics().cancelled >= 2)
        held.gate.set()
        assert fetch(url, "POST", "/predict", b"7", JSON_TYPE).json() == {"result": 14}
    assert held.seen == [1, 7]


def test_results_are_streamed_as_they_come() -> None:
    gates = {1: threading.Event(), 2: threading.Event()}

    def run(items: list[int]) -> list[int]:
        assert all(gates[item].wait(PATIENCE) for item in items)
        return items

    engine = DynamicBatcher(run, max_batch_size=1, max_queue_delay=0.0)
    with running(engine) as url, closing(connect(url)) as connection:
        connection.request(
            "POST", "/predict", as_json({"items": [1, 2]}), JSON_TYPE | {"accept": "application/x-ndjson"}
        )
        gates[1].set()
        response = connection.getresponse()
        assert json.loads(response.readline()) == {"index": 0, "result": 1}
        gates[2].set()
        assert json.loads(response.readline()) == {"index": 1, "result": 2}
        assert response.read() == b""


def test_a_deadline_is_answered_on_time_while_the_worker_is_busy() -> None:
    held = Held()
    with running(DynamicBatcher(held, max_batch_size=1, max_queue_delay=0.0)) as url:
        first = threading.Thread(target=fetch, args=(url, "POST", "/predict", b"0", JSON_TYPE))
        first.start()
        held.wait_for(1)
        start = time.monotonic()
        late = fetch(url, "POST", "/predict", b"1", JSON_TYPE | {"microbatch-deadline": "0.2"})
        assert (late.status, late.json()["error"]["type"]) == (504, "DeadlineExceeded")
        assert 0.2 <= time.monotonic() - start < 20
        held.gate.set()
        first.join(PATIENCE)
    assert held.seen == [0]


def test_a_full_queue_says_when_to_come_back() -> None:
    held = Held()
    engine = DynamicBatcher(held, max_batch_size=1, max_queue=4, max_queue_delay=0.0)
    replies: list[Any] = []

    def client(number: int, url: str) -> None:
        replies.append(fetch(url, "POST", "/predict", as_json(number), JSON_TYPE))

    with running(engine) as url:
        threads = [threading.Thread(target=client, args=(number, url)) for number in range(11)]
        threads[0].start()
        held.wait_for(1)
        for thread in threads[1:]:
            thread.start()
        until(lambda: len(replies) == 6)  # refused at once, though nothing is answered
        assert {reply.status for reply in replies} == {429}
        assert all(int(reply.headers["retry-after"]) >= 1 for reply in replies)
        held.gate.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert sorted(reply.status for reply in replies) == [200] * 5 + [429] * 6


def test_a_port_in_use_is_one_clear_error() -> None:
    with closing(bind("127.0.0.1", 0)) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        engine = Instant(lambda item: item)
        with pytest.raises(InvalidSettings, match=f"Port {port} of 127.0.0.1 is in use"):
            serve(application({"m": engine}), port=port)
        assert not engine.started  # nothing is warmed for a port that cannot be had


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"host": "x" * 70}, "xxxx"),
        ({"port": 99999}, "99999"),
        ({"host": "203.0.113.1", "port": 0}, "203.0.113.1"),
        ({"certificate": "cert.pem"}, "private key"),
        ({"certificate": "cert.pem", "private_key": "key.pem"}, "cert.pem"),
        ({"drain_timeout": -1.0}, "drain_timeout=-1"),
    ],
)
def test_settings_that_cannot_be_are_one_clear_error(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidSettings, match=says):
        serve(application({"m": Instant(lambda item: item)}), **settings)


def test_the_url_is_one_that_a_client_can_use() -> None:
    with closing(bind("0.0.0.0", 0)) as everywhere, closing(bind("localhost", 0)) as local:
        assert url_of(everywhere) == f"http://127.0.0.1:{everywhere.getsockname()[1]}"
        assert url_of(local, secure=True).startswith("https://")


SLOW_SERVER = """
import time
from microbatch.serving.engine.batcher import DynamicBatcher
from microbatch.web.application import application
from microbatch.web.server import serve

def run(items):
    time.sleep({seconds})
    return items

serve(application({{"m": DynamicBatcher(run, max_batch_size=1)}}), port=0, drain_timeout={drain}, started=print)
print("ended", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_after_everybody_is_answered(number: signal.Signals) -> None:
    with process(SLOW_SERVER.format(seconds=0.3, drain=60)) as server, ExitStack() as stack:
        *asked, idle = [stack.enter_context(closing(connect(server.url))) for _ in range(5)]
        idle.connect()
        for place, connection in enumerate(asked):
            connection.request("POST", "/predict", as_json(place), JSON_TYPE)
        until(lambda: waiting(server.url) == 4)
        server.process.send_signal(number)
        answers = [connection.getresponse() for connection in asked]
        assert [(answer.status, json.loads(answer.read())["result"]) for answer in answers] == [
            (200, n) for n in range(4)
        ]
        assert server.wait() == 0
        with pytest.raises(ConnectionError):
            fetch(server.url, "GET", "/health")


def test_who_waits_too_long_at_the_end_is_told() -> None:
    with process(SLOW_SERVER.format(seconds=20, drain=0.3)) as server, closing(connect(server.url)) as connection:
        connection.request("POST", "/predict", b"1", JSON_TYPE)
        until(lambda: waiting(server.url) == 1)
        server.process.send_signal(signal.SIGTERM)
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())["error"]["type"]) == (503, "Draining")
        assert server.wait() == 0


def waiting(url: str) -> int:
    """Requests that a server has accepted and not yet answered, by its own page of metrics."""
    text = fetch(url, "GET", "/metrics").body.decode()
    found = re.findall(r"^microbatch_items_(?:waiting|running)(?:\{.*\})? (\S+)$", text, re.MULTILINE)
    return int(sum(map(float, found)))
