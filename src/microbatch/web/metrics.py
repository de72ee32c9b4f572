"""`/metrics`: `metrics_table` and `text_metrics_table` in the text form of Prometheus, through its own client."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from microbatch import __version__
from microbatch.web.engine_metrics import metrics_of, text_metrics_of
from microbatch.web.metrics_table import (
    PREFIX,
    RESPONSES,
    RESPONSES_HELP,
    RESPONSES_LABELS,
    SERIES,
    Histogram,
    Samples,
    Series,
)
from microbatch.web.request import Request
from microbatch.web.response import Response
from microbatch.web.routes import Route
from microbatch.web.text_engine import AnyEngine
from microbatch.web.text_metrics_table import OF_BOTH, TEXT_SERIES

if TYPE_CHECKING:
    from microbatch.web.application import Application

Answers = Mapping[tuple[str, int], int]
OPEN_METRICS = "application/openmetrics-text"


async def metrics(request: Request) -> Response:
    """What has happened so far."""
    accept = request.header(b"accept").decode("latin-1")
    application = request.application
    body, content_type = exposition(application.engines, accept, application.answers)
    return Response(200, body, content_type)


def exposition(engines: Mapping[str, AnyEngine], accept: str = "", answers: Answers | None = None) -> tuple[bytes, str]:
    """The page and its content type.

    Args:
        engines: by the name of the model.
        accept: of the request; whoever asks for OpenMetrics gets that.
        answers: responses of the server by route and status.
    """
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is no number
        encode, content_type = choose_encoder("")
    return encode(ModelCollector(engines, answers)), content_type


class ModelCollector(Collector):
    """Reads what the engines have counted whenever it is asked, and keeps nothing; any registry may hold it."""

    _process = ProcessCollector(registry=None)

    def __init__(self, engines: Mapping[str, AnyEngine], answers: Answers | None = None) -> None:
        """
        Args:
            engines: by the name of the model.
            answers: responses of a server by route and status; nothing is told of them without one.
        """
        self._engines, self._answers = engines, answers

    def collect(self) -> Iterator[Metric]:
        """One family for each series, with the samples of every model, and what is known of this process."""
        models, texts = metrics_of(self._engines), text_metrics_of(self._engines)
        for series in SERIES:
            yield family_of(series, models | texts if series.name in OF_BOTH else models)
        if texts:
            for series in TEXT_SERIES:
                yield family_of(series, texts)
        if self._answers is not None:
            yield _responses(self._answers)
        yield InfoMetricFamily(f"{PREFIX}build", "The version of microbatch.", value={"version": __version__})
        yield from self._process.collect()


def family_of(series: Series, models: Mapping[str, Any]) -> Metric:
    """A series with the samples of every model; one that has not started is not ready, and that is all it tells."""
    labels = [series.model_label, *series.labels]
    family: Metric = _FAMILIES[series.kind](f"{series.prefix}{series.name}", series.help, labels=labels)
    for name, found in models.items():
        if found is not None:
            _add(family, name, series.read(found))
        elif series.name == "ready":
            _add(family, name, [((), 0.0)])
    return family


def _add(family: Any, name: str, read: Samples | Histogram) -> None:
    if isinstance(read, Histogram):
        family.add_metric([name], [(_bound(bound), count) for bound, count in read.buckets], read.total)
        return
    for labels, value in read:
        family.add_metric([name, *labels], value)


def _responses(answers: Answers) -> Metric:
    family = CounterMetricFamily(f"{PREFIX}{RESPONSES}", RESPONSES_HELP, labels=RESPONSES_LABELS)
    for (route, status), count in sorted(answers.items()):
        family.add_metric([route, str(status)], count)
    return family


def _bound(value: float) -> str:
    return "+Inf" if value == math.inf else str(float(value))


def _operation(_: Application) -> dict[str, Any]:
    text = {"schema": {"type": "string"}}
    found = {"description": "Counts and gauges of every model.", "content": {"text/plain": text, OPEN_METRICS: text}}
    return {"summary": "Metrics for Prometheus", "operationId": "metrics", "responses": {"200": found}}


_FAMILIES: dict[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}
ROUTES = (Route("GET", "/metrics", metrics, _operation),)
