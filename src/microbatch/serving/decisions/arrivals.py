"""How requests arrive, kept in a few numbers that are cheap to bring up to date. No clock: times come in."""

from __future__ import annotations

import math

from microbatch.serving.decisions.view import NEVER, Pace

STEP = 1.1
"""A median is followed by going up or down by a tenth: no window to keep, and ten times another pace takes 25 items."""
SHORTEST = 1e-7
"""Seconds; two items of one request come at once."""
MEAN_OVER = 32
"""Arrivals over which the mean gap is taken, about."""


class Arrivals:
    """Follows gaps between arrivals, and how soon those who were answered ask again.

    The median gap is short where requests come in bursts, while the mean says how much comes in the long run. The
    time from answering k items to the k-th arrival after it tells closed loops (clients that ask again as soon as
    they are answered: far shorter than a batch) from independent requests (about as long as a batch).
    """

    def __init__(self) -> None:
        self._gap = self._mean = self._return = NEVER
        self._last = self._answered_at = -NEVER
        self._owed = 0
        self._measuring = False

    def arrived(self, *times: float) -> None:
        """Items have come, at these times in order."""
        gap, mean, last = self._gap, self._mean, self._last
        for now in times:
            if last > -NEVER:
                seen = max(now - last, SHORTEST)
                gap = seen if gap == NEVER else min(gap * STEP, seen) if seen > gap else max(gap / STEP, seen)
                mean = seen if mean == NEVER else mean + (seen - mean) / MEAN_OVER
            last = now
        self._gap, self._mean, self._last = gap, mean, last
        if 0 < self._owed <= len(times):
            self._measured(times[self._owed - 1])
        self._owed = max(0, self._owed - len(times))

    def answered(self, count: int, now: float) -> None:
        """A batch of items has been answered."""
        if self._owed > 0:
            self._measured(now)  # not all came back by now: it takes at least as long
            if now > self._answered_at + 2 * self._return:
                self._owed = 0
        self._owed += count
        self._answered_at = now
        self._measuring = True

    def pace(self, now: float) -> Pace:
        """What a policy may know."""
        patient = now <= self._answered_at + 2 * self._return
        owed = self._owed if patient and self._return < NEVER else 0
        return Pace(self._gap, self._mean, self._last, self._answered_at, owed, self._return)

    def _measured(self, now: float) -> None:
        if self._measuring:
            self._return = _towards(self._return, max(now - self._answered_at, SHORTEST))
            self._measuring = False


def _towards(median: float, seen: float) -> float:
    """The median one step nearer to a value; never past it."""
    if math.isinf(median):
        return seen
    return min(median * STEP, seen) if seen > median else max(median / STEP, seen)
