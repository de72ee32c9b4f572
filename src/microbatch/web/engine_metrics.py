"""The metrics of the engines of each kind, asked for without waiting for one that has not started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from microbatch.serving.decisions.metrics import Metrics
from microbatch.web.text_engine import AnyEngine, generates_text, text_engines

if TYPE_CHECKING:
    from microbatch.llm.metrics import LLMMetrics


def metrics_of(engines: Mapping[str, AnyEngine]) -> dict[str, Metrics | None]:
    """Of engines that take items, by name; None for one that has not started, which `metrics` would wait for.

    An engine says so with ``started``; one without that is taken to have started.
    """
    return {name: _metrics(engine) for name, engine in engines.items() if not generates_text(engine)}


def text_metrics_of(engines: Mapping[str, AnyEngine]) -> dict[str, LLMMetrics | None]:
    """The same of engines that generate text."""
    return {name: _metrics(engine) for name, engine in text_engines(engines).items()}


def _metrics(engine: Any) -> Any:
    return engine.metrics() if getattr(engine, "started", True) else None
