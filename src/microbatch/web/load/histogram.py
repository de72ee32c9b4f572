"""Latencies counted in buckets: constant memory however long a run lasts, and quantiles with a bounded error."""

from __future__ import annotations

from math import ceil, log

GROWTH = 1.01
"""From one edge to the next."""
LEAST = 1e-6
"""Seconds; whatever is shorter is counted there."""
ERROR = GROWTH**0.5 - 1
"""A quantile is the geometric middle of its bucket, so it is off by at most so much: 0.5 %."""

_PER_LOG = 1 / log(GROWTH)


class Histogram:
    """Counts of seconds. The largest value and the number of values are exact."""

    def __init__(self) -> None:
        self.count = 0
        self.highest = 0.0
        self._counts: dict[int, int] = {}

    def add(self, seconds: float) -> None:
        """One value."""
        bucket = int(log(seconds / LEAST) * _PER_LOG) if seconds > LEAST else 0
        self._counts[bucket] = self._counts.get(bucket, 0) + 1
        self.count += 1
        self.highest = max(self.highest, seconds)

    def quantile(self, share: float) -> float | None:
        """The smallest value that at least `share` of all values do not exceed; None where there are none."""
        rank = max(1, ceil(share * self.count - 1e-9))
        if rank >= self.count:
            return self.highest if self.count else None
        seen = 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= rank:
                return min(LEAST * float(GROWTH ** (bucket + 0.5)), self.highest)
        raise AssertionError("the counts of the buckets add up to `count`")

    def rows(self) -> tuple[tuple[float, int], ...]:
        """(upper edge in seconds, values below it and above the edge before), without empty buckets, ascending."""
        return tuple((LEAST * GROWTH ** (bucket + 1), self._counts[bucket]) for bucket in sorted(self._counts))
