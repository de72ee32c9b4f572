"""What can be said of a Ray deployment without Ray: what is sent, what is refused, what is told."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import microbatch
from microbatch.errors import InvalidSettings
from microbatch.serving.engine.batcher import DynamicBatcher
from microbatch.web import ray_serve
from microbatch.web.metrics_table import SERIES
from microbatch.web.ray_metrics import RayMetrics, readings
from microbatch.web.ray_serve import engine_of
from tests.serving.functions import double
from tests.web import ray_functions


def test_a_decorated_function_is_found_again_by_its_name() -> None:
    assert pickle.loads(pickle.dumps(ray_functions.work)) is ray_functions.work


def test_an_engine_is_made_anew_from_its_settings() -> None:
    with DynamicBatcher(double, name="twice", max_batch_size=3, max_queue=7, latency_target=0.5) as engine:
        engine.call(1)
        again = pickle.loads(pickle.dumps(engine))
    assert not again.ready
    with again:
        assert again.call(4) == 8
        assert (again.name, again.metrics().max_queue, again.metrics().answered) == ("twice", 7, 1)
        assert again.metrics().max_batch_size == 3


def test_a_source_is_an_engine_or_makes_one() -> None:
    engine = DynamicBatcher(double)
    assert engine_of(engine) is engine
    assert engine_of(ray_functions.work) is ray_functions.work.engine
    assert engine_of(lambda: engine) is engine
    assert engine_of(lambda: ray_functions.work) is ray_functions.work.engine
    with pytest.raises(InvalidSettings, match="returned a int"):
        engine_of(lambda: 3)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("source", [double, 3, lambda x, y=1: x])
def test_what_makes_no_engine_is_refused_at_once(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidSettings, match="no engine"):
        ray_serve._check(source)


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidSettings, match=r"microbatch\[ray\]"):
        microbatch.ray_application(ray_functions.work)


class Told:
    """Stands for a metric of Ray."""

    def __init__(self, kind: str, keys: tuple[str, ...]) -> None:
        self.kind, self.keys = kind, keys
        self.values: dict[tuple[str, ...], float] = {}

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert self.kind == "gauge"
        self.values[tuple(tags[key] for key in self.keys)] = value

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert self.kind == "counter"
        assert value > 0
        place = tuple(tags[key] for key in self.keys)
        self.values[place] = self.values.get(place, 0.0) + value


class Recording(RayMetrics):
    """Ray's metrics as tests can read them."""

    def _metric(self, kind: str, name: str, text: str, keys: tuple[str, ...]) -> Told:
        assert text
        return self._made.setdefault(name, Told(kind, keys))  # type: ignore[no-any-return]


def test_counters_add_up_and_gauges_are_set() -> None:
    told = Recording()
    with DynamicBatcher(double) as engine:
        for calls in range(1, 4):
            engine.call(calls)
            told.tell({"twice": engine.metrics(), "not started": None})
        made: dict[str, Any] = told._made
        assert made["items"].values["twice", "answered"] == 3.0
        assert made["items_accepted"].values == {("twice",): 3.0}
        assert made["ready"].values == {("twice",): 1.0}
        assert made["latency_seconds_count"].values == {("twice",): 3.0}
        assert made["latency_seconds_sum"].values["twice",] == pytest.approx(engine.metrics().latency_sum)
        assert made["latency_quantile_seconds"].values["twice", "max"] > 0


def test_a_count_that_begins_anew_is_no_step_back() -> None:
    told = RayMetrics()
    assert [told._since("items", {"model": "m"}, value) for value in (3.0, 5.0, 2.0, 2.0)] == [3.0, 2.0, 2.0, 0.0]


def test_every_series_is_told() -> None:
    with DynamicBatcher(double) as engine:
        engine.call(1)
        names = {name for _, name, _, _, _ in readings(engine.metrics())}
    expected = {series.name for series in SERIES if series.kind != "histogram"}
    assert expected - names <= {"arrival_gap_seconds", "tenant_items", "tenant_items_waiting", "tenant_work",
                                "tenant_latency_seconds"}  # fmt: skip  # unknown, and nobody's
