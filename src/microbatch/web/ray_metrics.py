"""What `/metrics` tells of one server, told to Ray instead, which gathers it from all replicas of a cluster.

The rows are those of `metrics_table`; Ray adds the deployment and the replica. A histogram cannot be handed over whole:
its sum and its count are counters, from which a mean over any time follows, and recent quantiles are gauges.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from microbatch.serving.decisions.metrics import Metrics
from microbatch.web.engine import Engine
from microbatch.web.engine_metrics import metrics_of
from microbatch.web.metrics_table import PREFIX, SERIES, Histogram, Labels

logger = logging.getLogger(__name__)

QUANTILES = ("p50", "p90", "p99", "max")

Reading = tuple[str, str, str, dict[str, str], float]
"""Kind, name, help, labels and value of one series of one model."""


async def report(engines: Mapping[str, Engine], period: float) -> None:
    """Tell Ray every so often, for ever."""
    told = RayMetrics()
    while True:
        try:
            told.tell(metrics_of(engines))
        except Exception:  # nobody is denied an answer because nobody counts
            logger.exception("metrics could not be told to Ray")
        await asyncio.sleep(period)


class RayMetrics:
    """Ray's metrics of one replica, made as they are first told."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}
        self._before: dict[tuple[str, Labels], float] = {}

    def tell(self, models: Mapping[str, Metrics | None]) -> None:
        """Set what is a state now, and add to a counter what has come since.

        Args:
            models: by name; None for one that has not started.
        """
        for model, metrics in models.items():
            for kind, name, text, labels, value in readings(metrics) if metrics is not None else ():
                tags = {"model": model, **labels}
                metric = self._metric(kind, name, text, tuple(tags))
                if kind == "gauge":
                    metric.set(value, tags)
                elif (more := self._since(name, tags, value)) > 0:
                    metric.inc(more, tags)

    def _since(self, name: str, tags: dict[str, str], value: float) -> float:
        key = (name, tuple(tags.values()))
        before, self._before[key] = self._before.get(key, 0.0), value
        return value - before if value >= before else value  # a tenant that had been forgotten begins anew

    def _metric(self, kind: str, name: str, text: str, keys: Labels) -> Any:
        if name not in self._made:
            from ray.serve import metrics

            made = {"counter": metrics.Counter, "gauge": metrics.Gauge}[kind]
            self._made[name] = made(PREFIX + name, description=text, tag_keys=keys)
        return self._made[name]


def readings(metrics: Metrics) -> Iterator[Reading]:
    """Everything that is told of one model."""
    for series in SERIES:
        found = series.read(metrics)
        if isinstance(found, Histogram):
            yield "counter", f"{series.name}_sum", series.help, {}, found.total
            yield "counter", f"{series.name}_count", series.help, {}, found.buckets[-1][1]
            continue
        for labels, value in found:
            yield series.kind, series.name, series.help, dict(zip(series.labels, labels)), value
    for name in QUANTILES:
        if name in metrics.latency:
            text = "Seconds from acceptance to answer, of the last thousand."
            yield "gauge", "latency_quantile_seconds", text, {"quantile": name}, metrics.latency[name]
