"""Whole runs against scripted servers on real sockets. Times are wide: the machine may be busy."""

from __future__ import annotations

import time
from typing import Any

import pytest

from microbatch.errors import InvalidSettings
from microbatch.web.load.requests import Body, Question
from microbatch.web.load.result import LoadReport
from microbatch.web.load.run import generate
from microbatch.web.load.settings import Load
from microbatch.web.load.target import target_of
from tests.web.scripted import Answer, Scripted, reply, scripted

OK = reply()


def at_once(number: int, request: bytes) -> tuple[float, bytes]:
    return 0.0, OK


def load(server: Scripted, *bodies: bytes, warmup: float = 0.0, **asked: Any) -> LoadReport:
    question = Question(target=target_of(server.url), bodies=tuple(Body(body) for body in bodies or (b"[1]",)))
    return generate(question, Load(warmup=warmup, **asked))


def ran(answer: Answer, **asked: Any) -> LoadReport:
    with scripted(answer) as server:
        return load(server, **asked)


def test_an_open_loop_sends_what_is_due_and_no_more() -> None:
    with scripted(at_once) as server:
        (run,) = load(server, rates=(100.0,), traffic="uniform", duration=1.0, warmup=0.3).runs
    assert len(server.requests) == 130
    assert (run.requests, run.errors) == (100, {})
    assert run.offered == pytest.approx(100)
    assert run.throughput == pytest.approx(100, rel=0.4)  # a busy machine may hold back the last answers


@pytest.mark.parametrize("asked", [{"clients": (4,)}, {"rates": (500.0,)}])
def test_a_number_of_requests_is_exact(asked: dict[str, Any]) -> None:
    with scripted(at_once) as server:
        (run,) = load(server, requests=50, duration=None, **asked).runs
    assert run.requests == len(server.requests) == 50


def test_latency_counts_from_when_a_request_was_due() -> None:
    """A server that works at half the rate: by the end the wait is half the schedule, not one service time."""
    with scripted(lambda number, request: (0.02, OK), serial=True) as server:
        (run,) = load(server, rates=(100.0,), traffic="uniform", duration=0.6, connections=1).runs
    assert run.requests == 60
    assert run.latency["max"] is not None and run.latency["max"] > 0.5
    assert run.latency["p50"] is not None and run.latency["p50"] > 0.2
    assert run.waited_for_connection > 50
    assert run.connections == server.connections == 1


def test_a_stall_delays_all_that_were_due_in_it() -> None:
    stalled: list[float] = []

    def stall_once(number: int, request: bytes) -> tuple[float, bytes]:
        if number == 20:
            stalled.append(time.monotonic())
            time.sleep(0.4)  # the whole server stands still
        return 0.0, OK

    (run,) = ran(stall_once, rates=(100.0,), traffic="uniform", duration=1.0).runs
    assert stalled
    late = sum(count for edge, count in run.histogram if edge > 0.1)
    assert late >= 25  # about 30 are due in the first 0.3 s of it


def test_clients_of_a_closed_loop_wait_for_their_answers() -> None:
    with scripted(lambda number, request: (0.02, OK)) as server:
        (run,) = load(server, clients=(4,), duration=0.6, warmup=0.1).runs
    assert server.most == server.connections == 4
    assert run.latency["p50"] is not None and run.latency["p50"] >= 0.0195
    assert run.throughput <= 4 / 0.02 * 1.05
    assert run.throughput * run.latency["p50"] == pytest.approx(4, rel=0.5)  # Little's law
    assert run.errors == {}


def test_every_body_is_sent_in_turn() -> None:
    with scripted(at_once) as server:
        load(server, b'"a"', b'"bb"', clients=(1,), requests=5, duration=None)
    assert [request.split(b"\r\n\r\n")[1] for request in server.requests] == [b'"a"', b'"bb"'] * 2 + [b'"a"']


def test_statuses_are_counted_and_their_first_text_is_kept() -> None:
    body = b'{"error": {"type": "Overloaded", "message": "The queue is full."}}'
    (run,) = ran(
        lambda number, request: (0.0, reply(429, body) if number % 3 == 0 else OK), clients=(1,), requests=30,
        duration=None,
    ).runs  # fmt: skip
    assert run.errors == {"429": 10}
    assert run.samples == {"429": "The queue is full."}
    assert run.requests == 30


def test_what_never_comes_times_out_and_the_run_ends() -> None:
    began = time.monotonic()
    report = ran(lambda number, request: (30.0 if number == 3 else 0.0, OK), rates=(50.0,), duration=0.3, timeout=1.5)
    assert report.runs[0].errors == {"timeout": 1}
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("clients", [1, 3])
def test_a_server_that_hangs_up_is_an_error_and_the_clients_go_on(clients: int) -> None:
    (run,) = ran(
        lambda number, request: (0.0, None if number % 5 == 4 else OK), clients=(clients,), requests=20, duration=None
    ).runs
    assert run.errors == {"connection": 4}
    assert run.requests == 20


def test_answers_of_every_framing() -> None:
    forms = (
        reply(200, b"x" * 100_000),
        reply(204, b""),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nuntil the end",
        reply(200, headers="Connection: close\r\n"),
    )
    with scripted(lambda number, request: (0.0, forms[number % len(forms)])) as server:
        (run,) = load(server, clients=(1,), requests=12, duration=None).runs
    assert (run.requests, run.errors) == (12, {})
    assert server.connections >= 4  # two of the forms end the connection


def test_an_answer_that_is_cut_off_is_an_error() -> None:
    cut = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\nConnection: close\r\n\r\nonly this"
    (run,) = ran(lambda number, request: (0.0, cut), clients=(1,), requests=2, duration=None).runs
    assert run.errors == {"connection": 2}


def test_what_is_not_http_is_an_error() -> None:
    (run,) = ran(lambda number, request: (0.0, b"220 smtp ready\r\n"), clients=(1,), requests=2, duration=None).runs
    assert run.errors == {"not HTTP": 2}
    assert "smtp" in run.samples["not HTTP"]


def test_several_loads_are_a_table() -> None:
    report = ran(at_once, clients=(1, 2), requests=10, duration=None)
    assert [run.clients for run in report.runs] == [1, 2]
    assert report.traffic is None
    report = ran(at_once, rates=(100.0, 200.0), requests=10, duration=None)
    assert [run.rate for run in report.runs] == [100, 200]


def test_a_ramp_doubles_until_the_server_does_not_keep_up() -> None:
    with scripted(lambda number, request: (0.005, OK), serial=True) as server:  # 200 a second at most
        report = load(server, rates=(30.0,), ramp=True, duration=0.8, traffic="uniform", timeout=5.0)
    rates = [run.rate for run in report.runs]
    assert rates == [30.0 * 2**k for k in range(len(rates))]
    assert 1 <= len(rates) <= 5


def test_a_server_that_nobody_runs() -> None:
    with scripted(at_once) as server:
        gone = server
    with pytest.raises(InvalidSettings, match="refused"):
        load(gone, clients=(1,))


def test_a_server_that_goes_away_in_the_middle() -> None:
    with scripted(lambda number, request: (0.0, OK if number < 10 else None)) as server:
        (run,) = load(server, rates=(100.0,), traffic="uniform", duration=0.5).runs
    assert run.requests == 50
    assert run.errors == {"connection": 40}


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"clients": (1,), "rates": (1.0,)},
        {"clients": (1,), "traffic": "poison"},
        {"rates": (1.0, 2.0), "ramp": True},
        {"clients": (1,), "duration": None},
    ],
)
def test_contradictions_are_refused_before_anything_is_sent(asked: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettings):
        Load(**asked)
