"""What a server has done so far, counted where it happens and given out as plain numbers."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from microbatch.notebook import notebook_form
from microbatch.serving.decisions.queue import Entry
from microbatch.serving.decisions.tenants import TenantCounters, TenantMetrics

KEPT = 1000
"""Launches and latencies that are remembered."""
LATENCY_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds in seconds by which all latencies since the start are counted: three to a decade where servers live."""
FADES = 0.8
"""What a batch counts when the next has run, beside that one, in what an item takes lately."""
MOST_REASONS = 30
"""A policy of the user may word each reason anew; beyond so many they are counted as `OTHER`."""
OTHER = "another reason"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRecord:
    """One batch.

    Attributes:
        at: when it was launched, in seconds since the start of the server.
        size: items.
        cost: what the table of latencies is read at: items, or padded work.
        reason: why then, and why these.
        waited: seconds that its oldest item had waited.
        seconds: until all its items had an answer.
        calls: of the function or model; more than one where it failed.
    """

    at: float
    size: int
    cost: int
    reason: str
    waited: float
    seconds: float
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """A server at one moment. Seconds and counts.

    Attributes:
        accepted: items that were let into the queue.
        answered: with a result.
        failed: with an error of their own, of the model or of a worker.
        refused: the queue was full.
        expired: their deadline passed.
        cancelled: nobody waited for the answer any more.
        batches: launches.
        retries: further calls after one that failed.
        items_run: items that the model was given, repeats included.
        real_work, padded_work: in costs; equal without padding.
        out_of_memory: calls that ran out of memory.
        worker_restarts: of processes.
        waiting, running: items now.
        ready: whether requests are welcome.
        workers_alive: workers that could run a batch.
        max_batch_size: as set or found.
        size_limit: what memory allows of it, as far as is known.
        arrival_gap: mean seconds between two arrivals; None when unknown.
        retry_after: seconds until what waits now is answered.
        latency: p50, p90, p99 and max of recent answers; empty before the first.
        reasons: launches by reason.
        batch_sizes: launches by size.
        curve: expected seconds by cost.
        launches: the last ones.
        notes: what the user should know.
        uptime: seconds since the start.
        draining: about to stop: what waits is answered, nothing more is let in.
        workers: all of them, dead or alive.
        max_queue: items that may wait.
        policy: its name.
        latency_target: seconds, as the user set it; None without one.
        busy_seconds: that workers spent on batches, in all.
        latency_sum: of all answers, in seconds.
        latency_counts: answers with a result by the bounds of `LATENCY_BUCKETS`; the last for those beyond.
        tenants: by name, the last `MOST_TENANTS` that asked; requests of nobody in particular are not among them.
    """

    accepted: int
    answered: int
    failed: int
    refused: int
    expired: int
    cancelled: int
    batches: int
    retries: int
    items_run: int
    real_work: int
    padded_work: int
    out_of_memory: int
    worker_restarts: int
    waiting: int
    running: int
    ready: bool
    workers_alive: int
    max_batch_size: int
    size_limit: int
    arrival_gap: float | None
    retry_after: float
    latency: dict[str, float]
    reasons: dict[str, int]
    batch_sizes: dict[int, int]
    curve: tuple[tuple[int, float], ...]
    launches: tuple[LaunchRecord, ...]
    notes: tuple[str, ...]
    uptime: float = 0.0
    draining: bool = False
    workers: int = 1
    max_queue: int = 0
    policy: str = ""
    latency_target: float | None = None
    busy_seconds: float = 0.0
    latency_sum: float = 0.0
    latency_counts: tuple[int, ...] = (0,) * (len(LATENCY_BUCKETS) + 1)
    tenants: dict[str, TenantMetrics] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers."""
        document = dataclasses.asdict(self)
        document["batch_sizes"] = {str(size): count for size, count in self.batch_sizes.items()}
        document["curve"] = [list(row) for row in self.curve]
        return document

    def _repr_html_(self) -> str | None:
        return notebook_form(self)


class Counters:
    """What is counted; changed under the lock of the engine."""

    def __init__(self) -> None:
        self.accepted = self.answered = self.failed = self.refused = self.expired = self.cancelled = 0
        self.batches = self.retries = self.items_run = self.real_work = self.padded_work = self.out_of_memory = 0
        self.busy_seconds = self.latency_sum = self._lately_seconds = self._lately_items = 0.0
        self.reasons: Counter[str] = Counter()
        self.batch_sizes: Counter[int] = Counter()
        self.latencies: deque[float] = deque(maxlen=KEPT)
        self.latency_counts = [0] * (len(LATENCY_BUCKETS) + 1)
        self.launches: deque[LaunchRecord] = deque(maxlen=KEPT)
        self.tenants = TenantCounters()

    def totals(self) -> dict[str, Any]:
        """The plain counts and sums, by their names in `Metrics`."""
        return {name: getattr(self, name) for name in _TOTALS}

    def ran(self, entries: Sequence[Entry], size: int) -> None:
        """One call of the model that gave results; `size` items with those that filled it up."""
        real = sum(entry.facts.cost for entry in entries)
        self.items_run += size
        self.real_work += real
        self.padded_work += max(real, size * max(entry.facts.length for entry in entries))

    def answer(self, entry: Entry, result: object, seconds: float) -> None:
        """An item got its result or its own error, so long after it came."""
        self.tenants.answer(entry, result, seconds)
        if isinstance(result, BaseException):
            self.failed += 1
            return
        self.answered += 1
        self.latencies.append(seconds)
        self.latency_sum += seconds
        self.latency_counts[bisect_left(LATENCY_BUCKETS, seconds)] += 1

    def launched(self, record: LaunchRecord) -> None:
        """A batch has been answered."""
        self.batches += 1
        self.retries += record.calls - 1
        known = record.reason in self.reasons or len(self.reasons) < MOST_REASONS
        self.reasons[record.reason if known else OTHER] += 1
        self.busy_seconds += record.seconds
        self.batch_sizes[record.size] += 1
        self.launches.append(record)
        self._lately_seconds = self._lately_seconds * FADES + record.seconds
        self._lately_items = self._lately_items * FADES + record.size

    @property
    def seconds_per_item(self) -> float:
        """Of recent batches together: one of a single item says little about full ones. 0 before the first."""
        return self._lately_seconds / self._lately_items if self._lately_items else 0.0

    def quantiles(self) -> dict[str, float]:
        """Of recent latencies."""
        ordered = sorted(self.latencies)
        if not ordered:
            return {}
        places = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
        return {name: ordered[round(share * (len(ordered) - 1))] for name, share in places.items()}


_TOTALS = (
    "accepted", "answered", "failed", "refused", "expired", "cancelled", "batches", "retries", "items_run", "real_work",
    "padded_work", "out_of_memory", "latency_sum",
)  # fmt: skip
