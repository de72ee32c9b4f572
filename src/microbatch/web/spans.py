"""A span for each request, one for each batch, and a link from each request to the batches that its items were in.

A batch has many requests and cannot be the child of all. It is a child of the first of them that is recorded, so that
whoever keeps a share of the traces keeps the batches of what is kept; all of them, this one too, link to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer

from microbatch.serving.decisions.metrics import LaunchRecord
from microbatch.web.routes import Route

Scope = MutableMapping[str, Any]

UNTRACED = frozenset({"/", "/live", "/metrics", "/health", "/ready"})
"""Paths that are asked for again and again and run no batch."""


class RequestSpans:
    """Puts a span around each request to an application. The ``traceparent`` header of a client is its parent."""

    lanes: Mapping[bytes, Any] = {}
    """The short way has no place for a span."""

    def __init__(self, app: Any, tracer: Tracer) -> None:
        """
        Args:
            app: a `microbatch.web.application.Application`; all its attributes are attributes of this object.
            tracer: makes the spans.
        """
        self._app, self._tracer = app, tracer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._app, name)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] in UNTRACED:
            await self._app(scope, receive, send)
            return
        method, route = scope["method"], route_of(self._app.routes, scope["path"])
        attributes = {"http.request.method": method, "url.path": scope["path"]}
        if route:
            attributes["http.route"] = route
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        with self._tracer.start_as_current_span(
            f"{method} {route}".strip(), propagate.extract(headers), SpanKind.SERVER, attributes
        ) as span:
            await self._app(scope, receive, _noting(send, span))


def route_of(routes: Sequence[Route], path: str) -> str:
    """The path of the route, its parameter by name: a span is not to be called after what a stranger asked for."""
    literal = next((route.path for route in routes if route.path == path), "")
    return literal or next((route.path for route in routes if route.parameter and path.startswith(route.prefix)), "")


def _noting(send: Any, span: Span) -> Any:
    """Sends, and notes the status in the span; from 500 on the fault is the server's."""
    if not span.is_recording():
        return send

    async def noted(message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            span.set_attribute("http.response.status_code", message["status"])
            if message["status"] >= 500:
                span.set_status(Status(StatusCode.ERROR))
        await send(message)

    return noted


class BatchSpans:
    """A `microbatch.serving.engine.watching.Watch`: a span for each batch with a request that is recorded."""

    def __init__(self, tracer: Tracer, model: str) -> None:
        """
        Args:
            tracer: makes the spans.
            model: the name under which the engine is served.
        """
        self._tracer, self._model = tracer, model

    def mark(self) -> Span:
        """The span in which a request comes in."""
        return trace.get_current_span()

    @contextmanager
    def batch(self, marks: Sequence[object], reason: str) -> Iterator[Callable[[LaunchRecord], None]]:
        """Around a batch; the spans of the function that it runs, in this thread, belong to it."""
        requests = [mark for mark in marks if isinstance(mark, Span) and mark.is_recording()]
        if not requests:
            yield _untold
            return
        attributes = {"microbatch.model": self._model, "microbatch.batch.reason": reason}
        with self._tracer.start_as_current_span(
            f"batch {self._model}", trace.set_span_in_context(requests[0]), SpanKind.INTERNAL, attributes,
            [Link(request.get_span_context()) for request in requests],
        ) as span:  # fmt: skip
            for request in requests:
                request.add_link(span.get_span_context(), attributes)
            yield lambda record: span.set_attributes(attributes_of(record))


def attributes_of(record: LaunchRecord) -> dict[str, int | float]:
    """What the span of a batch says of it."""
    return {
        "microbatch.batch.size": record.size,
        "microbatch.batch.cost": record.cost,
        "microbatch.batch.calls": record.calls,
        "microbatch.batch.waited": record.waited,
    }


def _untold(record: LaunchRecord) -> None:
    """Nothing of this batch is recorded."""
