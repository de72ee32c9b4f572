"""What `/metrics` tells: one row for each series, read from `Metrics`. Its names are a promise: rows may be added."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, NamedTuple

from microbatch.serving.decisions.metrics import LATENCY_BUCKETS, Metrics

PREFIX = "microbatch_"
SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Upper bounds of the histogram of batch sizes; the same for every model, so that models can be added up."""
OUTCOMES = ("answered", "failed", "refused", "expired", "cancelled")
"""How an item ends, by the names in `Metrics`; each ends in exactly one way."""

Labels = tuple[str, ...]
Samples = Iterable[tuple[Labels, float]]


class Histogram(NamedTuple):
    """Counts by upper bound, cumulative, the last bound infinite; and the sum of all values."""

    buckets: tuple[tuple[float, float], ...]
    total: float


class Series(NamedTuple):
    """One row.

    Attributes:
        name: without its prefix; a counter's without ``_total``.
        kind: counter, gauge or histogram.
        help: one sentence.
        read: the samples, by the values of `labels`; or a `Histogram`.
        labels: beside the one of the model.
        prefix: of the name.
        model_label: what the label of the model is called.
    """

    name: str
    kind: str
    help: str
    read: Callable[[Any], Samples | Histogram]
    labels: Labels = ()
    prefix: str = PREFIX
    model_label: str = "model"

    @property
    def full_name(self) -> str:
        """As Prometheus stores it."""
        return f"{self.prefix}{self.name}{'_total' if self.kind == 'counter' else ''}"


def field_of(name: str) -> Callable[[Any], Samples]:
    """A number of an engine's metrics; no sample where it is None."""

    def read(metrics: Any) -> Samples:
        value = getattr(metrics, name)
        return [] if value is None else [((), float(value))]

    return read


def _outcomes(metrics: Metrics) -> Samples:
    return [((outcome,), getattr(metrics, outcome)) for outcome in OUTCOMES]


def _reasons(metrics: Metrics) -> Samples:
    return [((reason,), count) for reason, count in metrics.reasons.items()]


def _tenants(*fields: str) -> Callable[[Metrics], Samples]:
    """A number of each tenant; of several fields each by its name as well."""

    def read(metrics: Metrics) -> Samples:
        more = len(fields) > 1
        return [((tenant, field) if more else (tenant,), getattr(counts, field))
                for tenant, counts in metrics.tenants.items() for field in fields]  # fmt: skip

    return read


def _latency(metrics: Metrics) -> Histogram:
    bounds = (*LATENCY_BUCKETS, float("inf"))
    return Histogram(tuple(zip(bounds, accumulate(metrics.latency_counts))), metrics.latency_sum)


def _sizes(metrics: Metrics) -> Histogram:
    sizes = metrics.batch_sizes
    bounds = (*SIZE_BUCKETS, float("inf"))
    buckets = tuple((bound, sum(count for size, count in sizes.items() if size <= bound)) for bound in bounds)
    return Histogram(buckets, sum(size * count for size, count in sizes.items()))


SERIES = (
    Series("items_accepted", "counter", "Items let into the queue.", field_of("accepted")),
    Series("items", "counter", "Items by how they ended; refused ones were never accepted.", _outcomes, ("outcome",)),
    Series("latency_seconds", "histogram", "From acceptance to answer, of items answered with a result.", _latency),
    Series("batches", "counter", "Batches by the reason of their launch.", _reasons, ("reason",)),
    Series("batch_size", "histogram", "Items in a batch.", _sizes),
    Series("busy_seconds", "counter", "Seconds that workers spent on batches, of all workers together.",
           field_of("busy_seconds")),
    Series("retries", "counter", "Further calls of the model after one that failed.", field_of("retries")),
    Series("items_run", "counter", "Items that the model was given, repeats and filling included.",
           field_of("items_run")),
    Series("real_work", "counter", "Work of the items that ran, in items or tokens, without padding.",
           field_of("real_work")),
    Series("padded_work", "counter", "Work of the items that ran, padding included.", field_of("padded_work")),
    Series("out_of_memory", "counter", "Calls of the model that ran out of memory.", field_of("out_of_memory")),
    Series("worker_restarts", "counter", "Worker processes that died and were started again.",
           field_of("worker_restarts")),
    Series("items_waiting", "gauge", "Items in the queue.", field_of("waiting")),
    Series("items_running", "gauge", "Items in a batch that runs.", field_of("running")),
    Series("queue_limit", "gauge", "Items that may wait; further ones are refused.", field_of("max_queue")),
    Series("ready", "gauge", "1 when requests are welcome, else 0.", field_of("ready")),
    Series("draining", "gauge", "1 when about to stop: what waits is answered, nothing more is let in.",
           field_of("draining")),
    Series("workers", "gauge", "Workers, dead or alive.", field_of("workers")),
    Series("workers_alive", "gauge", "Workers that could run a batch.", field_of("workers_alive")),
    Series("batch_size_limit", "gauge", "Most items in a batch, as set or found.", field_of("max_batch_size")),
    Series("batch_size_limit_of_memory", "gauge", "Most items in a batch that memory allows, as far as is known.",
           field_of("size_limit")),
    Series("arrival_gap_seconds", "gauge", "Mean time between two arrivals; absent when unknown.",
           field_of("arrival_gap")),
    Series("retry_after_seconds", "gauge", "Until what waits now is answered, as measured.", field_of("retry_after")),
    Series("tenant_items", "counter", "Items of each tenant by how they ended.", _tenants(*OUTCOMES),
           ("tenant", "outcome")),
    Series("tenant_work", "counter", "Work launched for each tenant, in items or tokens.", _tenants("served"),
           ("tenant",)),
    Series("tenant_items_waiting", "gauge", "Items of each tenant in the queue.", _tenants("waiting"), ("tenant",)),
)  # fmt: skip
"""In the order of the page."""
RESPONSES, RESPONSES_LABELS = "http_responses", ("route", "status")
RESPONSES_HELP = "Responses of the server by route, empty where there is none, and status; of no model."
"""What is counted before a model sees anything: a wrong key, a body that is no item."""
