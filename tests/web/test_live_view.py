"""What the live page says, from numbers alone."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch.serving.decisions.metrics import LaunchRecord, Metrics
from microbatch.serving.decisions.tenants import TenantMetrics
from microbatch.serving.engine.batcher import DynamicBatcher
from microbatch.web.live import FRESH, PAUSE, Live
from microbatch.web.live_axes import MOST_TICKS, curve_axes, top_of
from microbatch.web.live_view import (
    MOST_BARS,
    SHOWN,
    WINDOW,
    Look,
    curve_of,
    history_of,
    look_at,
    rates_of,
    sizes_of,
    starting,
    tenants_of,
    view_of,
)

QUIET = Metrics(
    accepted=0, answered=0, failed=0, refused=0, expired=0, cancelled=0, batches=0, retries=0, items_run=0, real_work=0,
    padded_work=0, out_of_memory=0, worker_restarts=0, waiting=0, running=0, ready=True, workers_alive=1,
    max_batch_size=32, size_limit=32, arrival_gap=None, retry_after=0.0, latency={}, reasons={}, batch_sizes={},
    curve=(), launches=(), notes=(), uptime=100.0, workers=1, max_queue=1024, policy="marginal_gain",
)  # fmt: skip
LATENCY = {"p50": 0.017, "p90": 0.03, "p99": 0.034, "max": 0.05}


def record(size: int = 4, **changes: Any) -> LaunchRecord:
    first = LaunchRecord(at=1.0, size=size, cost=size, reason="a worker is free", waited=0.0, seconds=0.003, calls=1)
    return replace(first, **changes)


BUSY = replace(
    QUIET, accepted=10_000, answered=9_000, batches=400, latency=LATENCY, launches=tuple(record() for _ in range(400)),
    curve=((1, 0.003), (8, 0.004), (32, 0.006)), busy_seconds=80.0,
)  # fmt: skip


def looks(*metrics: Metrics) -> list[Look]:
    found: list[Look] = []
    for each in metrics:
        found.append(look_at(each, found[-1] if found else None))
    return found


def after(metrics: Metrics, seconds: float, **counts: float) -> Metrics:
    grown: dict[str, Any] = {name: getattr(metrics, name) + more for name, more in counts.items()}
    return replace(metrics, uptime=metrics.uptime + seconds, **grown)


def test_rates_are_of_the_last_seconds() -> None:
    before = after(BUSY, 1, answered=100_000)
    now = after(before, WINDOW, answered=500, failed=50, batches=50, busy_seconds=WINDOW / 2)
    rates = rates_of(looks(BUSY, before, now), workers=1)
    assert rates is not None
    assert (rates.answered, rates.failed, rates.busy, rates.batch) == (100, 10, 0.5, 11)
    both = rates_of(looks(BUSY, before, now), workers=2)
    assert both is not None and both.busy == 0.25
    assert rates_of(looks(BUSY), workers=1) is None


STATES = (
    (QUIET, "ready", "No request yet."),
    (replace(QUIET, accepted=2, running=2), "ready", "The first batch is running."),
    (replace(QUIET, draining=True, ready=False, waiting=2, running=1), "draining", "Still to be answered: 3 items;"),
    (replace(QUIET, ready=False, workers_alive=0), "not ready", "No worker is alive"),
)


@pytest.mark.parametrize(("metrics", "word", "says"), STATES)
def test_the_state_and_the_sentence(metrics: Metrics, word: str, says: str) -> None:
    view = view_of("m", metrics, looks(metrics))
    assert view["state"]["word"] == word
    assert says in view["sentence"]


def test_what_a_busy_server_says() -> None:
    now = after(BUSY, 1, answered=812, batches=35, busy_seconds=0.94)
    view = view_of("m", now, looks(BUSY, now))
    assert view["sentence"] == "812 items per second, in batches of 23.2."
    assert [(fact["label"], fact["value"]) for fact in view["facts"]] == [
        ("throughput", "812 /s"), ("p50 latency", "17 ms"), ("p99 latency", "34 ms"), ("batch size", "23.2"),
        ("queue", "0"), ("workers busy", "94 %"),
    ]  # fmt: skip
    assert view["alerts"] == []
    assert view["reasons"]["rows"] == [{"label": "a worker is free", "value": "100 %", "share": 1.0}]


def test_what_an_idle_server_says() -> None:
    silent = replace(BUSY, uptime=100.0, launches=(record(at=10.0, seconds=5.0),))
    assert view_of("m", silent, looks(silent, after(silent, 1)))["sentence"] == (
        "Idle. The last request was answered 1 min 25 s ago."
    )


def test_a_server_that_only_fails_is_not_idle() -> None:
    now = after(BUSY, 1, failed=3, batches=3)
    assert view_of("m", now, looks(BUSY, now))["sentence"] == "No item gets a result."


def test_a_target_that_was_missed_long_ago_is_no_alert() -> None:
    slow = replace(BUSY, latency_target=0.02)
    assert view_of("m", slow, looks(slow, after(slow, 1)))["alerts"] == []


ALERTS: tuple[tuple[dict[str, float], dict[str, Any], str], ...] = (
    ({"refused": 30}, {}, "The queue is full: 30 items per second are refused."),
    ({"failed": 3}, {}, "3 items per second fail."),
    ({"expired": 2}, {}, "2 items per second miss their deadline."),
    ({}, {"latency_target": 0.02}, "One answer in a hundred takes 34 ms; the target is 20 ms."),
    ({}, {"workers": 2}, "1 of 2 workers are alive."),
    ({}, {"size_limit": 8}, "Memory ran out: batches have at most 8 items now."),
    ({}, {"notes": ("Batching cannot help this model here.",)}, "Batching cannot help this model here."),
)


@pytest.mark.parametrize(("counts", "changes", "says"), ALERTS)
def test_what_needs_a_person_is_said(counts: dict[str, float], changes: dict[str, Any], says: str) -> None:
    before = replace(BUSY, **changes)
    now = after(before, 1, answered=10, **counts)
    (alert,) = view_of("m", now, looks(before, now))["alerts"]
    assert alert.startswith(says)


def test_the_last_minute() -> None:
    moments = [BUSY]
    for second in range(80):
        moments.append(after(moments[-1], 1.0, answered=0 if second % 2 else 100))
    history = history_of(looks(*moments)[-SHOWN - 1 :])
    points = history["throughput"]["points"]
    assert len(points) == SHOWN
    assert history["throughput"]["top"] == "100 /s" and set(points) == {0.0, 1.0}
    # nothing was answered in every other second: its latency is unknown, not that of the second before
    assert history["latency"]["lines"]["p99"].count(None) == SHOWN // 2


def test_many_sizes_are_put_together() -> None:
    few, many = sizes_of([record(size) for size in (1, 2, 2)]), sizes_of([record(size) for size in range(1, 101)])
    assert [row["label"] for row in few["rows"]] == ["1", "2"]
    assert [row["value"] for row in few["rows"]] == ["33 %", "67 %"]
    assert len(many["rows"]) <= MOST_BARS
    assert [row["label"] for row in many["rows"]][:3] == ["1", "2–3", "4–7"]
    assert sum(row["share"] for row in many["rows"]) == pytest.approx(1.0)


def test_whose_work_it_was() -> None:
    def tenant(served: int) -> TenantMetrics:
        return TenantMetrics(
            accepted=1, answered=1, failed=0, refused=0, expired=0, cancelled=0, waiting=0, served=served, latency={}
        )

    view = tenants_of(replace(BUSY, tenants={"a": tenant(10), "b": tenant(30)}))
    assert view is not None
    assert [(row["label"], row["value"]) for row in view["rows"]] == [("b", "75 %"), ("a", "25 %")]
    assert tenants_of(replace(BUSY, tenants={"a": tenant(0)})) is not None
    assert tenants_of(BUSY) is None


def test_the_curve_has_what_ran_and_leaves_failures_out() -> None:
    ran = (record(8, seconds=0.004), record(8, seconds=0.004), record(32, seconds=0.5, calls=3))
    view = curve_of(replace(BUSY, launches=ran))
    assert view is not None
    assert len(view["line"]) == 3 and len(view["dots"]) == 1
    dot = view["dots"][0]
    assert (dot["x"], dot["y"]) == view["line"][1]
    assert "16 times the throughput" in view["says"]
    assert curve_of(QUIET) is None


@given(
    st.lists(
        st.tuples(st.integers(1, 1 << 24), st.floats(1e-7, 1e4)),
        min_size=1,
        max_size=40,
        unique_by=lambda point: point[0],
    )
)
def test_every_point_lies_inside_the_picture(points: list[tuple[int, float]]) -> None:
    across, up = curve_axes(sorted(points))
    for cost, seconds in points:
        assert 0 < across.place(cost) < 1 and 0 < up.place(seconds) < 1
    for axis in (across, up):
        assert 1 <= len(axis.ticks) <= MOST_TICKS
        assert all(low < high for low, high in pairwise(axis.ticks))
        assert all(0 <= axis.place(tick) <= 1 for tick in axis.ticks)


@given(st.lists(st.one_of(st.none(), st.floats(0, 1e9)), max_size=60), st.floats(1e-6, 1e3))
def test_the_top_is_round_and_above_all(values: list[float | None], least: float) -> None:
    top = top_of(values, least)
    most = max([least, *(value for value in values if value is not None)])
    assert most <= top * (1 + 1e-9) <= 10.1 * most
    assert f"{top:.0e}".split("e")[0] in "125"


class Counted:
    """An engine that counts how often it is asked."""

    started = True

    def __init__(self) -> None:
        self.asked = 0

    def metrics(self) -> Metrics:
        self.asked += 1
        return replace(BUSY, uptime=float(self.asked), answered=100 * self.asked)


def test_all_viewers_share_one_look() -> None:
    now, engine = [0.0], Counted()
    live = Live({"m": engine}, clock=lambda: now[0])  # type: ignore[dict-item]
    first = live.event()
    assert live.pause < FRESH
    now[0] += live.pause
    assert live.event() != first and engine.asked == 2
    for _ in range(10):
        for _ in range(50):
            live.event()
        now[0] += PAUSE
    assert engine.asked == 2 + 9
    now[0] += 100 * WINDOW  # nobody looked meanwhile: no history is made up
    event = json.loads(live.event().removeprefix(b"data: "))
    assert event["models"][0]["history"]["throughput"]["points"] == []


def test_the_last_event_says_that_the_server_stops() -> None:
    live = Live({"m": Counted()})  # type: ignore[dict-item]
    live.event()
    assert json.loads(live.event(stopping=True)[6:])["models"][0]["state"]["word"] == "draining"


def test_an_engine_that_has_not_started_is_shown_and_not_started() -> None:
    engine = DynamicBatcher(lambda items: items)
    event = json.loads(Live({"m": engine}).event().removeprefix(b"data: "))
    assert not engine.started
    assert event["models"] == [starting("m")]
    assert set(starting("m")) == set(view_of("m", BUSY, looks(BUSY)))


def test_an_event_is_plain_json() -> None:
    strange = replace(BUSY, retry_after=float("inf"), arrival_gap=float("nan"))
    msgspec.json.decode(msgspec.json.encode(view_of("m", strange, looks(strange))))
