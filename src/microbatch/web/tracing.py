"""Traces by OpenTelemetry, for those who ask for them; loads nothing of it for the others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from microbatch.errors import InvalidSettings

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from microbatch.web.application import Application

WANTED_BY = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_EXPORTER")
"""Variables of the environment by which OpenTelemetry is told where traces go; one of them asks for traces."""


def traced(app: Application, provider: TracerProvider | None = None) -> Any:
    """The application with a span for each request and one for each batch; see `microbatch.web.spans`.

    Args:
        app: from `microbatch.web.application.application`.
        provider: of tracers; the global one without.

    Raises:
        InvalidSettings: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.trace import get_tracer

        from microbatch.web.spans import BatchSpans, RequestSpans
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    tracer = get_tracer("microbatch", tracer_provider=provider)
    for name, engine in app.engines.items():
        if hasattr(engine, "watch"):
            engine.watch(BatchSpans(tracer, name))
    return RequestSpans(app, tracer)


def traced_if_wanted(app: Application, environment: Mapping[str, str] = os.environ) -> Any:
    """The application, traced where the variables of OpenTelemetry ask for it; its spans go where they say.

    Raises:
        InvalidSettings: they ask, and the exporter is not installed; or they ask for an exporter there is not.
    """
    return traced(app, _provider(app.title, environment)) if wanted(environment) else app


def wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the variables of OpenTelemetry ask for traces."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    return any(environment.get(name) for name in WANTED_BY)


def _provider(service: str, environment: Mapping[str, str]) -> TracerProvider:
    """The one that has been set up already, else one that sends spans in the background, and the rest at the end.

    It becomes the global one, so that the spans of the user's own code go the same way.
    """
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            return trace.get_tracer_provider()
        exporter = _exporter(environment.get("OTEL_TRACES_EXPORTER") or "otlp")
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    named = {} if environment.get("OTEL_SERVICE_NAME") else {"service.name": service}
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return provider


def _exporter(name: str) -> Any:
    if name == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    if name == "otlp":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    raise InvalidSettings(f"OTEL_TRACES_EXPORTER={name} is not known here.", "Use otlp (over HTTP), console or none.")


def _missing(error: ModuleNotFoundError) -> InvalidSettings:
    return InvalidSettings(f"Traces need {error.name}, which is not installed.", "Run: pip install 'microbatch[otel]'")
