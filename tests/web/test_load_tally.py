"""From single requests to figures, and from figures to a verdict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from microbatch.web.load.result import LoadReport, Run, run_of
from microbatch.web.load.tally import LATE, TIMED_OUT, Tally
from microbatch.web.load.verdict import BURST, keeps_up, sentence

Asked = tuple[float, float, int | str]
"""due, end, status"""


def open_run(
    asked: Iterable[Asked], *, window: float | None = 1.0, target: float | None = None, sent_late: float = 0.0,
    cpu: float = 0.1, rate: float = 10.0,
) -> Run:  # fmt: skip
    rows = list(asked)
    tally = Tally(window=window, target=target, until=max(due for due, _, _ in rows) if window is None else window)
    for due, _, _ in rows:
        tally.begin(due, due + sent_late)
    for due, end, status in rows:
        tally.finish(due, end, status, f"text of {status}")
    elapsed = window or max(end for _, end, _ in rows)
    return run_of(tally, clients=None, rate=rate, cpu_seconds=cpu * elapsed, elapsed=elapsed, connections=1)


def steady(latency: float, *, count: int = 100, start: float = -0.5, seconds: float = 1.0) -> list[Asked]:
    """`count` a second from `start` to the end."""
    return [(k / count, k / count + latency, 200) for k in range(round(start * count), round(seconds * count))]


def test_a_steady_server_has_the_rate_that_comes_whatever_its_latency() -> None:
    for latency in (0.001, 0.3):
        run = open_run(steady(latency))
        assert run.requests == 100
        assert run.throughput == pytest.approx(100, abs=1.01)
        assert run.offered == 100
        assert run.latency["p50"] == pytest.approx(latency, rel=0.006)
        assert keeps_up(run)


def test_warm_up_is_in_no_count_but_its_late_answers_are_in_the_rate() -> None:
    run = open_run([(-0.2, -0.1, 200), (-0.1, 0.05, 200), (-0.1, 0.3, 500), (0.5, 0.6, 200)])
    assert (run.requests, run.errors) == (1, {})
    assert run.throughput == 2


def test_without_a_window_only_what_is_measured_counts() -> None:
    run = open_run([(-0.1, 0.05, 200), (0.0, 0.5, 200), (1.0, 2.0, 200)], window=None)
    assert (run.requests, run.seconds, run.throughput) == (2, 2.0, 1.0)


def test_goodput_is_what_comes_in_time() -> None:
    asked = [(0.0, 0.05, 200), (0.1, 0.16, 200), (0.2, 0.5, 200), (0.3, 0.31, 503)]
    run = open_run(asked, target=0.06)
    assert (run.throughput, run.goodput) == (3, 2)
    assert open_run(asked).goodput is None


def test_errors_are_counted_by_status_and_have_no_latency() -> None:
    run = open_run([(0.0, 0.5, 200), (0.1, 0.1001, 429), (0.2, 0.2001, 429), (0.3, 0.9, TIMED_OUT)])
    assert run.errors == {"429": 2, "timeout": 1}
    assert run.requests == 4
    assert run.latency["p50"] == run.latency["max"] == 0.5
    assert run.samples["429"] == "text of 429"
    assert not keeps_up(run)


def test_a_queue_that_grows_is_seen() -> None:
    half_as_fast = [(k / 100, 2 * k / 100, 200) for k in range(100)]
    run = open_run(half_as_fast)
    assert run.backlog_growth == 49
    assert run.throughput == 51
    assert not keeps_up(run)
    assert "Does not keep up with 10/s" in sentence((run,), None)


def test_a_burst_at_the_end_is_no_growing_queue() -> None:
    run = open_run([*steady(0.001)[:-1], *((0.999, 1.01, 200) for _ in range(BURST))])
    assert run.backlog_growth == BURST
    assert keeps_up(run)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cpu": 0.91}, "91 % busy"),
        ({"cpu": 0.89}, ""),
        ({"latency": 0.005, "sent_late": 1.1 * LATE}, "100 % of its requests late"),
        ({"latency": 0.3, "sent_late": 1.1 * LATE}, ""),  # nothing beside what the server takes
        ({"latency": 0.3, "sent_late": 0.04}, "100 % of its requests late, up to 40 ms"),
    ],
)
def test_figures_of_a_busy_client_are_void(changes: dict[str, float], said: str) -> None:
    run = open_run(
        steady(changes.get("latency", 0.01)), **{name: value for name, value in changes.items() if name != "latency"}
    )
    assert said in run.void and bool(said) == bool(run.void)
    assert sentence((run,), None).startswith("Void") == bool(said)


def test_json_has_the_agreed_keys() -> None:
    run = open_run(steady(0.01), target=0.05)
    report = LoadReport(url="http://x", traffic="poisson", target=0.05, runs=(run,), verdict="Fine.")
    document = report.to_json()
    assert set(document) >= {"requests", "errors", "throughput", "goodput", "latency", "client_cpu", "histogram"}
    assert list(document["latency"]) == ["p50", "p90", "p99", "max"]
    assert document["late"] == {"requests": 0, "p99": 0.0, "worst": 0.0}
    assert sum(count for _, count in document["histogram"]) == document["requests"]
    several = LoadReport(url="http://x", traffic="poisson", target=None, runs=(run, run), verdict="Fine.").to_json()
    assert [each["requests"] for each in several["runs"]] == [100, 100]
    assert "throughput" not in several


def test_an_interrupted_run_counts_the_seconds_that_it_lasted() -> None:
    tally = Tally(window=10.0, until=10.0)
    for k in range(20):
        tally.begin(k / 10, k / 10)
        tally.finish(k / 10, k / 10 + 0.01, 200)
    run = run_of(tally, clients=None, rate=10, cpu_seconds=0.1, elapsed=2.0, connections=1, interrupted=True)
    assert (run.seconds, run.throughput, run.offered) == (2.0, 10.0, 10.0)


def test_an_interrupt_in_the_warm_up_has_measured_nothing() -> None:
    run = run_of(Tally(window=1.0), clients=3, rate=None, cpu_seconds=0.2, elapsed=-0.5, connections=3)
    assert (run.requests, run.throughput, run.client_cpu, run.void) == (0, 0, 0, "")
    assert sentence((run,), None) == "Nothing was measured."


def test_one_sentence_for_each_outcome() -> None:
    fine = open_run(steady(0.01), target=0.05)
    assert sentence((fine,), 0.05).startswith("Keeps up with 10/s; half are answered within ")
    assert sentence((fine,), 0.05).endswith(", 100 % within 50 ms.")
    refused = open_run([(0.1, 0.11, 401)])
    void = replace(refused, void="the client was busy")
    assert sentence((void,), None) == sentence((refused,), None)
    assert sentence((refused,), None) == "No request was answered: 1 × 401 (text of 401)."
    partly = open_run([(0.1, 0.11, 200), (0.2, 0.21, 429)])
    assert "50 % of the requests fail" in sentence((partly,), None) and "429" in sentence((partly,), None)


def test_a_table_says_where_it_ends() -> None:
    slow = [(k / 100, 2 * k / 100, 200) for k in range(100)]
    fine, full = open_run(steady(0.01), rate=100.0), open_run(slow, rate=200.0)
    assert sentence((fine, full), None).startswith("Keeps up with 100/s, not with 200/s;")
    assert sentence((full,) * 2, None).startswith("Keeps up with none of these rates")
    assert sentence((fine, fine), None).startswith("Keeps up with 100/s;")
