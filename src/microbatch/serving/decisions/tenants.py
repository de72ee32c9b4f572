"""What each tenant had of a server: counted where it happens, for as many tenants as are kept. Plain numbers."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from microbatch.serving.decisions.queue import Entry

MOST_TENANTS = 200
"""Names come from whoever asks: beyond so many, the one that has not been heard of for longest is forgotten."""
KEPT = 200
"""Latencies that are remembered of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantMetrics:
    """One tenant. Seconds and counts, as in `Metrics`.

    Attributes:
        accepted, answered, failed, refused, expired, cancelled: items.
        waiting: items now.
        served: cost of the items that were launched.
        latency: p50, p99 and max of recent answers; empty before the first.
    """

    accepted: int
    answered: int
    failed: int
    refused: int
    expired: int
    cancelled: int
    waiting: int
    served: int
    latency: dict[str, float]


class _Row:
    """What is counted of one tenant."""

    __slots__ = ("counts", "latencies")

    def __init__(self, kept: int) -> None:
        self.counts: Counter[str] = Counter()
        self.latencies: deque[float] = deque(maxlen=kept)


class TenantCounters:
    """Changed under the lock of the engine. Where nobody gives a tenant nothing is counted, nor looked at."""

    def __init__(self, most: int = MOST_TENANTS, kept: int = KEPT) -> None:
        """
        Args:
            most: tenants that are remembered.
            kept: latencies that are remembered of each.
        """
        self._most, self._kept = most, kept
        self._rows: OrderedDict[str, _Row] = OrderedDict()

    def came(self, what: str, tenant: str, count: int) -> None:
        """A request of so many items was accepted or refused; `what` is a field of `TenantMetrics`."""
        if tenant:
            self._row(tenant).counts[what] += count

    def count(self, what: str, entries: Iterable[Entry]) -> None:
        """Something happened to entries that had been accepted."""
        for row, _ in self._known(entries):
            row.counts[what] += 1

    def launched(self, entries: Iterable[Entry]) -> None:
        """Entries are on their way to a worker."""
        for row, entry in self._known(entries):
            row.counts["served"] += entry.facts.cost

    def answer(self, entry: Entry, result: object, seconds: float) -> None:
        """An entry got its result or its own error, so long after it came."""
        if not self._rows or not entry.facts.tenant:
            return
        row = self._row(entry.facts.tenant)
        if isinstance(result, BaseException):
            row.counts["failed"] += 1
        else:
            row.counts["answered"] += 1
            row.latencies.append(seconds)

    def metrics(self, waiting: dict[str, int]) -> dict[str, TenantMetrics]:
        """All that are kept, by name.

        Args:
            waiting: items of each tenant that wait now.
        """
        return {name: _metrics(row, waiting.get(name, 0)) for name, row in sorted(self._rows.items())}

    def _known(self, entries: Iterable[Entry]) -> Iterator[tuple[_Row, Entry]]:
        if self._rows:
            for entry in entries:
                if entry.facts.tenant:
                    yield self._row(entry.facts.tenant), entry

    def _row(self, tenant: str) -> _Row:
        row = self._rows.get(tenant)
        if row is None:
            row = self._rows[tenant] = _Row(self._kept)
            if len(self._rows) > self._most:
                self._rows.popitem(last=False)
        else:
            self._rows.move_to_end(tenant)
        return row


def _metrics(row: _Row, waiting: int) -> TenantMetrics:
    counts, ordered = row.counts, sorted(row.latencies)
    places = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return TenantMetrics(
        accepted=counts["accepted"],
        answered=counts["answered"],
        failed=counts["failed"],
        refused=counts["refused"],
        expired=counts["expired"],
        cancelled=counts["cancelled"],
        waiting=waiting,
        served=counts["served"],
        latency={name: ordered[round(share * (len(ordered) - 1))] for name, share in places.items()} if ordered else {},
    )
