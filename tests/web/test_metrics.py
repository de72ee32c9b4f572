"""`/metrics`: prometheus-client's own parser reads it back, and it says what was sent."""

from __future__ import annotations

import asyncio
import http.client
import json
import math
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from microbatch.errors import DeadlineExceeded, Overloaded
from microbatch.llm.metrics import BUCKETS
from microbatch.serving.decisions.metrics import LATENCY_BUCKETS, MOST_REASONS, OTHER
from microbatch.serving.decisions.view import Decision, QueueView, launch
from microbatch.serving.engine.batcher import DynamicBatcher
from microbatch.web.metrics import exposition
from microbatch.web.metrics_table import OUTCOMES, RESPONSES, RESPONSES_HELP, RESPONSES_LABELS, SERIES, SIZE_BUCKETS
from microbatch.web.text_metrics_table import TEXT_SERIES
from tests.serving.engines import Held, serving, until
from tests.serving.functions import double, poisoned, slow
from tests.web.running import running
from tests.web.text_engines import Echoing

Key = tuple[str, frozenset[tuple[str, str]]]


def read(text: bytes) -> dict[Key, float]:
    """Every sample by its name and labels; none of them twice."""
    found: dict[Key, float] = {}
    for family in parse_text(text.decode()):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found
            found[key] = sample.value
    return found


def of(samples: Mapping[Key, float], name: str, **labels: str) -> float:
    return samples[f"microbatch_{name}", frozenset({"model": "m", **labels}.items())]


def page(engine: Any) -> dict[Key, float]:
    return read(exposition({"m": engine})[0])


def test_counters_are_what_was_sent() -> None:
    with serving(poisoned, max_batch_size=8) as engine:
        results = engine.map([*range(20), "bad", *range(30), "worse"], return_errors=True)
        metrics, samples = engine.metrics(), page(engine)
    assert sum(isinstance(result, ValueError) for result in results) == 2
    assert of(samples, "items_accepted_total") == 52
    assert of(samples, "items_total", outcome="answered") == 50
    assert of(samples, "items_total", outcome="failed") == 2
    assert of(samples, "latency_seconds_count") == 50
    assert of(samples, "latency_seconds_sum") == pytest.approx(metrics.latency_sum)
    assert of(samples, "retries_total") == metrics.retries > 0
    assert of(samples, "batch_size_count") == metrics.batches
    assert of(samples, "batch_size_sum") == 52
    assert sum(value for (name, _), value in samples.items() if name == "microbatch_batches_total") == metrics.batches


def test_every_way_to_end_is_counted_once() -> None:
    held = Held()

    async def ask(engine: DynamicBatcher) -> dict[Key, float]:
        first = asyncio.create_task(engine.submit(1))
        await held.busy()
        with pytest.raises(DeadlineExceeded):
            await engine.submit(2, deadline=0.02)
        gone, *waiting = [asyncio.create_task(engine.submit(item)) for item in (3, 4, 5)]
        await until(lambda: engine.metrics().waiting == 3)
        refused = await asyncio.gather(engine.submit(6), engine.submit(7), return_exceptions=True)
        assert [type(each) for each in refused] == [Overloaded, Overloaded]
        gone.cancel()
        await until(lambda: engine.metrics().cancelled == 1)
        busy = page(engine)
        held.let_go()
        await asyncio.gather(first, *waiting)
        return busy

    with serving(held, max_batch_size=1, max_queue=3) as engine:
        held_back = asyncio.run(ask(engine))
        engine.close()
        samples = page(engine)
    assert (of(held_back, "items_running"), of(held_back, "items_waiting")) == (1, 2)
    assert of(held_back, "busy_seconds_total") > 0
    assert of(samples, "items_total", outcome="expired") == 1
    assert of(samples, "items_total", outcome="cancelled") == 1
    assert of(samples, "items_total", outcome="refused") == 2
    ended = sum(of(samples, "items_total", outcome=outcome) for outcome in OUTCOMES if outcome != "refused")
    assert of(samples, "items_accepted_total") == ended
    assert (of(samples, "ready"), of(samples, "draining")) == (0, 1)


@pytest.fixture
def used() -> Any:
    with serving(double, max_batch_size=8, examples=[1]) as engine:
        engine.map(range(100))
        yield engine


def test_histograms_add_up(used: DynamicBatcher) -> None:
    samples = page(used)
    for name, bounds in (("latency_seconds", LATENCY_BUCKETS), ("batch_size", SIZE_BUCKETS)):
        buckets = [of(samples, f"{name}_bucket", le=str(float(bound))) for bound in bounds]
        assert buckets == sorted(buckets)
        assert of(samples, f"{name}_bucket", le="+Inf") == of(samples, f"{name}_count") >= buckets[-1]
    sizes = used.metrics().batch_sizes
    for bound in SIZE_BUCKETS:
        expected = sum(launches for size, launches in sizes.items() if size <= bound)
        assert of(samples, "batch_size_bucket", le=str(float(bound))) == expected


def test_a_latency_is_counted_where_it_belongs() -> None:
    with serving(slow) as engine:
        engine.call(0.06)
        samples = page(engine)
    assert [of(samples, "latency_seconds_bucket", le=bound) for bound in ("0.05", "60.0")] == [0, 1]
    assert of(samples, "latency_seconds_sum") >= 0.06


def test_both_forms_say_the_same(used: DynamicBatcher) -> None:
    used.close()
    text, text_type = exposition({"m": used}, "text/plain")
    open_text, open_type = exposition({"m": used}, "application/openmetrics-text; version=1.0.0")
    assert text_type.startswith("text/plain") and open_type.startswith("application/openmetrics-text")
    families = parse_open_metrics(open_text.decode())  # type: ignore[no-untyped-call]  # it has no types
    ours = {family.name: family for family in families if family.name.startswith("microbatch_")}
    for family in parse_text(text.decode()):
        if family.name.startswith("microbatch_") and family.name != "microbatch_build_info":
            assert [(s.name, s.labels, s.value) for s in ours[family.name].samples] == [
                (s.name, s.labels, s.value) for s in family.samples
            ]
    assert ours["microbatch_build"].samples[0].name == "microbatch_build_info"


@pytest.mark.parametrize(
    "accept",
    ["", "text/plain; version=abc", "application/openmetrics-text; version=x.y", ";;,,=", "\xff", "text/plain;"],
)
def test_any_accept_header_is_answered(accept: str, used: DynamicBatcher) -> None:
    text, _ = exposition({"m": used}, accept)
    assert b"microbatch_items_accepted_total" in text


def test_every_series_of_the_table_is_there_and_no_other(used: DynamicBatcher) -> None:
    families = [f for f in parse_text(exposition({"m": used})[0].decode()) if f.name.startswith("microbatch_")]
    kinds = {f.name: (f.type, f.documentation, bool(f.samples)) for f in families}
    assert kinds.pop("microbatch_build_info")[2]
    own = {series for series in SERIES if "tenant" not in series.labels}
    assert kinds == {f"microbatch_{series.name}": (series.kind, series.help, series in own) for series in SERIES}


def test_an_engine_that_has_not_started_is_not_started() -> None:
    engine = DynamicBatcher(double)
    samples = page(engine)
    assert not engine.started
    assert {name for name, labels in samples if ("model", "m") in labels} == {"microbatch_ready"}
    assert of(samples, "ready") == 0


def test_tenants_are_told_apart() -> None:
    with serving(poisoned) as engine:
        for tenant, item in (("a", 1), ("a", 2), ("b", 3)):
            engine.call(item, tenant=tenant)
        with pytest.raises(ValueError, match="no number"):
            engine.call("bad", tenant="b")
        samples = page(engine)
    assert of(samples, "tenant_items_total", tenant="a", outcome="answered") == 2
    assert of(samples, "tenant_items_total", tenant="b", outcome="failed") == 1
    assert of(samples, "tenant_work_total", tenant="b") == 2
    assert of(samples, "tenant_items_waiting", tenant="a") == 0


def test_names_that_need_escaping() -> None:
    with serving(double) as engine:
        engine.call(1)
        name = 'a "quoted"\\name\nof two lines'
        samples = read(exposition({name: engine})[0])
    assert samples["microbatch_items_accepted_total", frozenset({("model", name)})] == 1


def test_reasons_are_bounded() -> None:
    numbers = count()

    def wordy(view: QueueView) -> Decision:
        return launch(range(1), f"launch number {next(numbers)}")

    with serving(double, policy=wordy, max_batch_size=1) as engine:
        engine.map(range(200))
        reasons = engine.metrics().reasons
    assert len(reasons) == MOST_REASONS + 1
    assert sum(reasons.values()) == 200 and reasons[OTHER] == 200 - MOST_REASONS


def test_busy_seconds_never_fall() -> None:
    with serving(double, workers=2) as engine:
        seen = []
        for _ in range(50):
            engine.map(range(20))
            seen += [engine.metrics().busy_seconds for _ in range(3)]
        uptime = engine.metrics().uptime
    assert seen == sorted(seen)
    assert 0 < seen[-1] <= 2 * uptime


def test_over_http() -> None:
    engine = DynamicBatcher(poisoned, max_batch_size=4)
    with running({"m": engine}) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        statuses = []
        for item in (1, 2, "bad", 3):
            connection.request("POST", "/predict", json.dumps(item), {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read()
            statuses.append(response.status)
        for path in ("/predict", "/nothing"):
            connection.request("POST", path, "1", {"Content-Type": "text/plain"})
            connection.getresponse().read()
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        samples = read(response.read())
        connection.close()
    assert statuses == [200, 200, 500, 200]
    assert response.getheader("Content-Type", "").startswith("text/plain")
    assert of(samples, "items_total", outcome="answered") == 3
    assert of(samples, "items_total", outcome="failed") == 1
    assert of(samples, "ready") == 1
    responses = {(dict(labels)["route"], dict(labels)["status"]): value
                 for (name, labels), value in samples.items() if name == "microbatch_http_responses_total"}  # fmt: skip
    assert responses == {("/predict", "200"): 3, ("/predict", "500"): 1, ("/predict", "415"): 1, ("", "404"): 1}
    assert samples["process_resident_memory_bytes", frozenset()] > 0
    assert math.isfinite(samples["process_cpu_seconds_total", frozenset()])


def test_the_page_of_the_docs_lists_every_series(root: Path) -> None:
    text = (root / "docs" / "observe.md").read_text(encoding="utf-8")
    series = f"microbatch_{RESPONSES}_total"
    assert (
        f"| `{series}` | counter | {', '.join(f'`{label}`' for label in RESPONSES_LABELS)} | {RESPONSES_HELP} |" in text
    )
    listed = [line for line in text.splitlines() if line.startswith("| `microbatch_") and series not in line]
    labels = [", ".join(f"`{label}`" for label in ("model", *series.labels)) for series in SERIES]
    assert listed == [f"| `{s.full_name}` | {s.kind} | {names} | {s.help} |" for s, names in zip(SERIES, labels)]


# Engines that generate text.


def test_an_engine_of_text_is_told_under_vllm_s_names() -> None:
    samples = read(exposition({"m": Echoing()})[0])
    model = frozenset({"model_name": "m"}.items())
    assert samples["vllm:num_requests_running", model] == 3
    assert samples["vllm:num_requests_waiting", model] == 2
    assert samples["vllm:kv_cache_usage_perc", model] == 0.25
    assert samples["vllm:generation_tokens_total", model] == 50
    assert samples["vllm:prefix_cache_hits_total", model] == 4
    assert samples["vllm:request_success_total", model | {("finished_reason", "stop")}] == 5
    for name in BUCKETS:
        assert samples[f"vllm:{name}_count", model] == 3
        assert samples[f"vllm:{name}_sum", model] == 7.5
        assert samples[f"vllm:{name}_bucket", model | {("le", str(BUCKETS[name][0]))}] == 2
        assert samples[f"vllm:{name}_bucket", model | {("le", "+Inf")}] == 3
    assert of(samples, "ready") == 1
    assert of(samples, "steps_total") == 30
    assert not any(name.startswith("microbatch_items") for name, _ in samples)


def test_engines_of_both_kinds_stand_beside_each_other() -> None:
    with serving(double) as engine:
        engine.call(1)
        body, kind = exposition({"m": engine, "t": Echoing()}, "application/openmetrics-text; version=1.0.0")
        samples = read(exposition({"m": engine, "t": Echoing()})[0])
    assert kind.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
    assert of(samples, "items_accepted_total") == 1
    assert of(samples, "ready") == samples["microbatch_ready", frozenset({"model": "t"}.items())] == 1
    assert {name for name, labels in samples if dict(labels).get("model_name") == "m"} == set()


def test_every_figure_of_vllm_that_is_counted_is_told() -> None:
    told = {series.name for series in TEXT_SERIES}
    assert set(BUCKETS) <= told
    assert len(told) == len(TEXT_SERIES)


def test_an_engine_of_text_that_has_not_started_is_not_asked() -> None:
    engine = Echoing()
    engine.started = False
    engine.metrics = None  # type: ignore[assignment, method-assign]
    samples = read(exposition({"m": engine})[0])
    assert of(samples, "ready") == 0
    assert not any(name.startswith("vllm:") for name, _ in samples)
