"""Traces: each request has a span, linked to the span of its batch, whoever its parent is."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler
from opentelemetry.trace import SpanKind, StatusCode

from microbatch.errors import InvalidSettings
from microbatch.serving.decisions.metrics import LaunchRecord
from microbatch.serving.engine.batcher import DynamicBatcher
from microbatch.web.application import application
from microbatch.web.tracing import traced, traced_if_wanted, wanted
from tests.serving.engines import LONG, Held, serving
from tests.serving.functions import double, poisoned
from tests.web.running import process, running_application

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Spans:
    """A provider whose spans are kept."""

    def __init__(self, sampler: Sampler = ALWAYS_ON) -> None:
        self.kept = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=sampler)
        self.provider.add_span_processor(SimpleSpanProcessor(self.kept))

    def of(self, kind: SpanKind) -> list[ReadableSpan]:
        return [span for span in self.kept.get_finished_spans() if span.kind == kind]

    @property
    def requests(self) -> list[ReadableSpan]:
        return self.of(SpanKind.SERVER)

    @property
    def batches(self) -> list[ReadableSpan]:
        return [span for span in self.of(SpanKind.INTERNAL) if span.name.startswith("batch ")]


@pytest.fixture
def spans() -> Spans:
    return Spans()


@contextmanager
def tracing(run: Any, spans: Spans, **settings: Any) -> Iterator[str]:
    app = traced(application({"m": DynamicBatcher(run, **settings)}), spans.provider)
    with running_application(app) as url:
        yield url


def post(url: str, item: Any, path: str = "/predict", headers: Sequence[tuple[str, str]] = ()) -> int:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=LONG)
    try:
        connection.request("POST", path, json.dumps(item), {"Content-Type": "application/json", **dict(headers)})
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def identity(span: ReadableSpan) -> int:
    found: int = span.get_span_context().span_id  # type: ignore[union-attr]  # a finished span has one
    return found


def linked(span: ReadableSpan) -> set[int]:
    return {link.context.span_id for link in span.links}


def test_each_request_links_to_its_batch(spans: Spans) -> None:
    held = Held()
    with tracing(held, spans, max_batch_size=4) as url:
        threads = [threading.Thread(target=post, args=(url, 0))]
        threads[0].start()
        assert held.entered.acquire(timeout=LONG)
        threads += [threading.Thread(target=post, args=(url, item)) for item in (1, 2, 3)]
        for thread in threads[1:]:
            thread.start()
        held.let_go(1)
        assert held.entered.acquire(timeout=LONG)
        held.let_go()
        for thread in threads:
            thread.join(LONG)
    requests, batches = spans.requests, spans.batches
    assert len(requests) == 4 and 2 <= len(batches) <= 4
    assert sum(batch.attributes["microbatch.batch.size"] for batch in batches if batch.attributes) == 4  # type: ignore[misc]
    for request in requests:
        (own,) = [batch for batch in batches if identity(batch) in linked(request)]
        assert identity(request) in linked(own)
        assert request.links[0].attributes == {"microbatch.model": "m", "microbatch.batch.reason": reason_of(own)}
    for batch in batches:
        assert batch.parent is not None and batch.parent.span_id in linked(batch)
        assert len(linked(batch)) == (batch.attributes or {})["microbatch.batch.size"]


def reason_of(span: ReadableSpan) -> Any:
    return (span.attributes or {})["microbatch.batch.reason"]


def test_requests_of_one_batch_share_its_span() -> None:
    """Without a server: the queue is full of them when the batch is launched."""
    held, spans = Held(), Spans()
    tracer = spans.provider.get_tracer("test")

    async def ask(engine: DynamicBatcher, item: int) -> None:
        with tracer.start_as_current_span(f"request {item}", kind=SpanKind.SERVER):
            await engine.submit_many([item, item])

    async def all_of_them(engine: DynamicBatcher) -> None:
        first = asyncio.create_task(ask(engine, 0))
        await held.busy()
        others = [asyncio.create_task(ask(engine, item)) for item in (1, 2, 3)]
        while engine.metrics().waiting < 6:
            await asyncio.sleep(0.002)
        held.let_go()
        await asyncio.gather(first, *others)

    with serving(held, max_batch_size=4) as engine:
        traced(application({"m": engine}), spans.provider)
        asyncio.run(all_of_them(engine))
    sizes = [(batch.attributes or {})["microbatch.batch.size"] for batch in spans.batches]
    assert sizes == [2, 4, 2]
    assert [len(linked(batch)) for batch in spans.batches] == [1, 2, 1]
    assert all(len(request.links) == 1 for request in spans.requests)


@pytest.mark.parametrize(("sampler", "flag"), [(ALWAYS_ON, "01"), (ParentBased(ALWAYS_OFF), "01")])
def test_a_traceparent_is_honoured(sampler: Sampler, flag: str) -> None:
    spans = Spans(sampler)
    with tracing(double, spans) as url:
        assert post(url, 1, headers=[("traceparent", f"00-{TRACE}-{PARENT}-{flag}")]) == 200
    (request,), (batch,) = spans.requests, spans.batches
    assert request.context is not None and batch.context is not None and request.parent is not None
    assert f"{request.context.trace_id:032x}" == TRACE == f"{batch.context.trace_id:032x}"
    assert f"{request.parent.span_id:016x}" == PARENT
    assert request.name == "POST /predict"


def test_what_is_not_recorded_costs_no_span() -> None:
    spans = Spans(ParentBased(ALWAYS_OFF))
    with tracing(double, spans) as url:
        assert post(url, 1) == 200
        assert post(url, 1, headers=[("traceparent", f"00-{TRACE}-{PARENT}-00")]) == 200
        assert post(url, 1, headers=[("traceparent", "no traceparent at all")]) == 200
    assert spans.kept.get_finished_spans() == ()


def test_the_status_and_the_route(spans: Spans) -> None:
    with tracing(poisoned, spans) as url:
        assert [post(url, 1), post(url, "bad"), post(url, 1, "/predict/m"), post(url, 1, "/wp-admin/x.php")] == [
            200, 500, 200, 404,
        ]  # fmt: skip
        for path in ("/metrics", "/health", "/ready", "/"):
            connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=LONG)
            connection.request("GET", path)
            assert connection.getresponse().status == 200
            connection.close()
    told = [(span.name, (span.attributes or {})["http.response.status_code"], span.status.status_code)
            for span in spans.requests]  # fmt: skip
    assert told == [
        ("POST /predict", 200, StatusCode.UNSET),
        ("POST /predict", 500, StatusCode.ERROR),
        ("POST /predict/{name}", 200, StatusCode.UNSET),
        ("POST", 404, StatusCode.UNSET),
    ]


def test_spans_of_the_function_belong_to_the_batch(spans: Spans) -> None:
    tracer = spans.provider.get_tracer("user")

    def run(items: list[int]) -> list[int]:
        with tracer.start_as_current_span("tokenise"):
            return double(items)

    with tracing(run, spans) as url:
        assert post(url, 1) == 200
    (batch,) = spans.batches
    (own,) = [span for span in spans.kept.get_finished_spans() if span.name == "tokenise"]
    assert own.parent is not None and own.parent.span_id == identity(batch)


def test_repeats_of_a_batch_are_told(spans: Spans) -> None:
    held_back = threading.Event()

    def run(items: list[Any]) -> list[Any]:
        if items == ["first"]:
            assert held_back.wait(LONG)
            return items
        return poisoned(items)

    tracer = spans.provider.get_tracer("test")

    async def ask(engine: DynamicBatcher) -> None:
        first = asyncio.create_task(engine.submit("first"))
        while engine.metrics().running < 1:
            await asyncio.sleep(0.002)
        with tracer.start_as_current_span("request", kind=SpanKind.SERVER):
            others = asyncio.create_task(engine.submit_many([1, "bad", 2, 3]))
            while engine.metrics().waiting < 4:
                await asyncio.sleep(0.002)
            held_back.set()
            await asyncio.gather(first, others)

    with serving(run, max_batch_size=4) as engine:
        traced(application({"m": engine}), spans.provider)
        asyncio.run(ask(engine))
    (batch,) = spans.batches
    assert (batch.attributes or {})["microbatch.batch.calls"] == 5


class Broken:
    """A watch that fails at everything it may fail at."""

    def mark(self) -> object:
        return self

    def batch(self, marks: Sequence[object], reason: str) -> AbstractContextManager[Callable[[LaunchRecord], None]]:
        raise RuntimeError("broken")


def test_a_watch_that_fails_denies_nobody_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    with serving(double) as engine:
        engine.watch(Broken())
        assert engine.map(range(5)) == [0, 2, 4, 6, 8]
        engine.watch(None)
        assert engine.call(1) == 2
    assert "could not be watched" in caplog.text


ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}


@pytest.mark.parametrize(
    ("environment", "asks"),
    [({}, False), (ENDPOINT, True), ({"OTEL_TRACES_EXPORTER": "console"}, True),
     ({"OTEL_TRACES_EXPORTER": "none"}, False),
     (ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, False), (ENDPOINT | {"OTEL_SDK_DISABLED": "true"}, False),
     ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"}, True)],
)  # fmt: skip
def test_who_asks_for_traces(environment: dict[str, str], asks: bool) -> None:
    assert wanted(environment) == asks
    if not asks:
        app = application({"m": DynamicBatcher(double)})
        assert traced_if_wanted(app, environment) is app


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    app = application({"m": DynamicBatcher(double)})
    with pytest.raises(InvalidSettings, match=r"zipkin.*otlp"):
        traced_if_wanted(app, {"OTEL_TRACES_EXPORTER": "zipkin"})
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(InvalidSettings, match=r"not installed.*microbatch\[otel\]"):
        traced_if_wanted(app, ENDPOINT)


APP = "def embed(items: list[float]) -> list[float]:\n    return [2 * item for item in items]\n"


@pytest.mark.alone
def test_spans_arrive_at_a_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command with a variable of OpenTelemetry and nothing else; the last spans come at its end."""
    (tmp_path / "app.py").write_text(APP)
    got: queue.Queue[ExportTraceServiceRequest] = queue.Queue()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            got.put(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        with process([sys.executable, "-m", "microbatch", "serve", "app:embed", "--port", "0"], cwd=tmp_path) as server:
            assert post(server.url, 1, headers=[("traceparent", f"00-{TRACE}-{PARENT}-01")]) == 200
            server.process.terminate()
            assert server.wait() == 0
        collector.shutdown()
    resources = [resource for _ in range(got.qsize()) for resource in got.get().resource_spans]
    assert {
        value.value.string_value for r in resources for value in r.resource.attributes if value.key == "service.name"
    } == {"microbatch"}
    found = {span.name: span for r in resources for scope in r.scope_spans for span in scope.spans}
    assert set(found) == {"POST /predict", "batch embed"}
    assert {span.trace_id.hex() for span in found.values()} == {TRACE}
    assert found["POST /predict"].links[0].span_id == found["batch embed"].span_id
