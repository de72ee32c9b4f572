"""The short way gives the same bytes as the long one, and leaves to it whatever is unusual."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from microbatch.serving.engine.batcher import DynamicBatcher
from microbatch.web import direct
from microbatch.web.application import application
from microbatch.web.direct import is_plain, lanes_of
from microbatch.web.http import LARGE
from tests.serving.engines import Held, serving
from tests.web.hard_clients import connect, read_answer, request, until, vanish
from tests.web.running import running, running_application

LONG_WAY = "Microbatch-Priority: 0\r\n"
"""A header that changes nothing, but has to be looked at."""
CASES: dict[str, Any] = {
    "a number": 3.0,
    "a text": "ä\u2028x",
    "a list": [1.5, -2.0],
    "an envelope": {"item": 4.0},
    "several": {"items": [1.0, 2.0]},
    "none": {"items": []},
    "an envelope with more": {"item": 1.0, "more": 2},
    "what the function refuses": "refused",
    "what has no form in JSON": "no form",
    "null": None,
    "what cannot be weighed": "no weight",
}


class NoWeight:
    """A result whose size is a method, as some images have it."""

    def size(self, axis: int) -> int:
        return axis


def run(items: list[Any]) -> list[Any]:
    if "refused" in items:
        raise ValueError("refused, in a word")
    odd = {"no form": object(), "no weight": NoWeight()}
    return [odd[item] if isinstance(item, str) and item in odd else [item, item] for item in items]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(DynamicBatcher(run)) as url:
        yield url


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The path of each request that an engine got by the short way."""
    paths: list[str] = []
    post = direct.Lane.post

    def noted(self: direct.Lane, body: bytes, answered: Any) -> Any:
        withdraw = post(self, body, answered)
        if withdraw is not None:
            paths.append(self.path)
        return withdraw

    monkeypatch.setattr(direct.Lane, "post", noted)
    return paths


def answer_to(url: str, data: bytes) -> bytes:
    """All bytes of one answer, but for the date."""
    with connect(url) as connection:
        connection.sendall(data)
        return whole_answer(connection)


def whole_answer(connection: socket.socket) -> bytes:
    stream, answer = connection.makefile("rb"), b""
    while not answer.endswith(b"\r\n\r\n"):
        line = stream.readline()
        assert line, answer
        answer += line
    found = re.search(rb"content-length: (\d+)", answer)
    body = stream.read(int(found[1])) if found else b""
    return re.sub(rb"date: [^\r]*\r\n", b"", answer) + body


@pytest.mark.parametrize("case", CASES)
def test_both_ways_give_the_same_bytes(url: str, case: str) -> None:
    item = CASES[case]
    assert answer_to(url, request(item)) == answer_to(url, request(item, headers=LONG_WAY))


def test_a_body_that_is_no_json_is_told_the_same(url: str) -> None:
    broken = request("x").replace(b'"x"', b'"x,')
    assert answer_to(url, broken) == answer_to(
        url, broken.replace(b"Content-Type", LONG_WAY.encode() + b"Content-Type")
    )


@pytest.mark.parametrize(
    ("headers", "short"),
    [
        ("", True), ("Accept: */*\r\nUser-Agent: x\r\n", True), ("Accept: application/json\r\n", True),
        ("Accept: application/x-ndjson\r\n", False), (LONG_WAY, False), ("Microbatch-Deadline: 5\r\n", False),
        ("X-Tenant: a\r\n", False), ("Connection: close\r\n", False), ("Expect: 100-continue\r\n", False),
        ("Content-Encoding: gzip\r\n", False),
    ],
)  # fmt: skip
def test_which_requests_go_the_short_way(url: str, taken: list[str], headers: str, short: bool) -> None:
    with connect(url) as connection:
        connection.sendall(request(2.0, headers=headers))
        assert connection.recv(9) == b"HTTP/1.1 "
    assert taken == (["/predict"] if short else [])


def test_a_body_in_two_parts_goes_the_long_way(url: str, taken: list[str]) -> None:
    data = request([1.0, 2.0])
    with connect(url) as connection:
        for part in (data[:20], data[20:-4], data[-4:]):  # within the headers, within the body
            connection.sendall(part)
            until(lambda: True)
        status, document = read_answer(connection.makefile("rb"))
    assert (status, document) == (200, {"result": [[1.0, 2.0], [1.0, 2.0]]})
    whole = answer_to(url, data)
    assert json.loads(whole.rpartition(b"\r\n\r\n")[2]) == document


def test_requests_in_a_row_are_answered_in_order(url: str) -> None:
    ways = ["", LONG_WAY, "", "", LONG_WAY]
    with connect(url) as connection:
        connection.sendall(b"".join(request(number, headers=way) for number, way in enumerate(ways)))
        stream = connection.makefile("rb")
        assert [read_answer(stream) for _ in ways] == [(200, {"result": [n, n]}) for n in range(len(ways))]
        connection.sendall(request(7))  # and the connection is still good
        assert read_answer(stream) == (200, {"result": [7, 7]})


def test_what_is_no_request_behind_two_that_are(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with connect(url) as connection:
        connection.sendall(request(1) + request(2) + b"\0 is no method\r\n\r\n")
        while connection.recv(4096):
            pass
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_large_result_comes_whole() -> None:
    with (
        running(DynamicBatcher(lambda items: [[0.5] * LARGE for _ in items])) as url,
        connect(url) as connection,
    ):
        connection.sendall(request(1))
        assert read_answer(connection.makefile("rb")) == (200, {"result": [0.5] * LARGE})


def test_a_full_queue_refuses_at_once(taken: list[str]) -> None:
    model = Held()
    with serving(model, max_queue=1, max_batch_size=1) as engine, running(engine) as url, connect(url) as first:
        first.sendall(request(1.0))
        assert model.entered.acquire(timeout=30)
        with connect(url) as second, connect(url) as third:
            second.sendall(request(2.0))
            until(lambda: engine.metrics().waiting == 1)
            third.sendall(request(3.0))
            answer = whole_answer(third)
            assert answer.startswith(b"HTTP/1.1 429 ") and b"retry-after: " in answer
            model.let_go()
            assert read_answer(second.makefile("rb")) == (200, {"result": 4.0})
    assert taken == ["/predict"] * 2


@pytest.mark.parametrize("rudely", [False, True])
def test_who_has_gone_is_withdrawn(rudely: bool) -> None:
    model = Held()
    with serving(model, max_batch_size=1) as engine, running(engine) as url, connect(url) as first:
        first.sendall(request(1.0))
        assert model.entered.acquire(timeout=30)
        gone = connect(url)
        gone.sendall(request(2.0))
        until(lambda: engine.metrics().waiting == 1)
        vanish(gone, rudely=rudely)
        until(lambda: engine.metrics().waiting == 0)
        model.let_go()
        assert read_answer(first.makefile("rb"))[0] == 200
        assert model.batches == [[1.0]]
        assert engine.metrics().cancelled == 1


def test_several_engines_have_a_lane_each(taken: list[str]) -> None:
    engines = {"one": DynamicBatcher(run), "two": DynamicBatcher(run)}
    with running(engines) as url, connect(url) as connection:
        connection.sendall(request(1, path="/predict/two"))
        assert read_answer(connection.makefile("rb")) == (200, {"result": [1, 1]})
    assert taken == ["/predict/{name}"]
    assert set(lanes_of(application(engines))) == {b"/predict/one", b"/predict/two"}


def test_who_must_be_known_goes_the_long_way() -> None:
    assert lanes_of(application({"m": DynamicBatcher(run)}, keys=["a-key-of-some-length"])) == {}
    assert lanes_of(application({"m": DynamicBatcher(run)}, deadline=1.0)) == {}


def test_a_smaller_bound_of_bodies_is_kept() -> None:
    with running(DynamicBatcher(run), body_limit=100) as url:
        assert answer_to(url, request("x" * 200)).startswith(b"HTTP/1.1 413 ")


def test_names_with_a_hyphen_have_a_lane_and_those_that_a_path_spells_otherwise_have_none() -> None:
    names = lanes_of(application({"my-model.v2": DynamicBatcher(run), "a b": DynamicBatcher(run)}))
    assert set(names) == {b"/predict/my-model.v2"}


def test_answers_are_counted_by_route_and_status() -> None:
    app = application({"m": DynamicBatcher(run)})
    with running_application(app) as url:
        for item in (1, 2, "refused"):
            answer_to(url, request(item))
    assert app.answers == {("/predict", 200): 2, ("/predict", 500): 1}


def test_a_body_of_unknown_or_great_size_is_not_plain() -> None:
    typed = (b"content-type", b"application/json")
    assert is_plain([typed, (b"content-length", b"12")])
    assert not is_plain([typed])
    assert not is_plain([(b"content-length", b"12")])
    assert not is_plain([typed, (b"content-length", b"%d" % LARGE)])
    assert not is_plain([typed, (b"content-length", b"12"), (b"transfer-encoding", b"chunked")])
