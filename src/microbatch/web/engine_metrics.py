"""The metrics of every engine, asked for without waiting for one that has not started."""

from __future__ import annotations

from collections.abc import Mapping

from microbatch.serving.decisions.metrics import Metrics
from microbatch.web.engine import Engine


def metrics_of(engines: Mapping[str, Engine]) -> dict[str, Metrics | None]:
    """By name; None for an engine that has not started, which `metrics` would wait for.

    An engine says so with ``started``; one without that is taken to have started.
    """
    return {name: engine.metrics() if getattr(engine, "started", True) else None for name, engine in engines.items()}
