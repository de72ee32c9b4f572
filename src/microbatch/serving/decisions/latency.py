"""Seconds of a batch by its cost: a table from a profile, a measurement or the launches themselves, corrected online.

A table and not only a line, so that cliffs are seen: batches stop below one where that finishes all items sooner.
No torch, clock or thread.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import numpy as np

from microbatch.curves.codec import load_profile
from microbatch.curves.objective import smallest_near_best
from microbatch.curves.profile import Profile
from microbatch.errors import InvalidProfile

DRIFT = 0.1
"""Share of a launch's log error that corrects the whole table: a machine that slows down slows every size."""
OWN = 0.1
"""Share that corrects the launch's own size."""
NOTICED = 0.02
"""Corrections are collected until they reach so much, in log seconds; then what follows is found anew."""
OUTLIER = 4.0
"""A single launch counts as at most so many times slower or faster than expected."""
PAYS = 0.97
"""Two launches instead of one must be at least 3 % faster together."""
HELPS = 1.1
"""Batching helps if the best throughput is at least so many times that of single items."""
LARGEST_COST = 1 << 24
EXACT_UP_TO = 64
"""Costs up to here have a row each; above, rows lie an eighth of an octave apart."""


class Latency:
    """What batches cost here, brought up to date by every launch.

    Args:
        points: seconds by cost; empty when nothing is known yet.
    """

    def __init__(self, points: Mapping[int, float] | None = None) -> None:
        self._sizes = sorted(points or {})
        self._seconds = [float((points or {})[size]) for size in self._sizes]
        self._known: dict[int, float] = {}
        self._best: dict[int, int] = {}
        self._within: dict[float, int] = {}
        self._collected: dict[int, float] = {}
        self._drift = 0.0

    @property
    def known(self) -> bool:
        """Whether any size has been measured."""
        return bool(self._sizes)

    def seconds(self, cost: int) -> float:
        """Expected seconds of a batch of that cost: between rows in a straight line, beyond them along the last one."""
        found = self._known.get(cost)
        if found is None:
            found = self._known[cost] = self._interpolated(cost)
        return found

    def best_size(self, waiting: int) -> int:
        """How many of the waiting items to launch first, so that all are done soonest: all, or those below a cliff."""
        if waiting == 1:
            return 1
        found = self._best.get(waiting)
        if found is None:
            found = self._best[waiting] = self._split(waiting)
        return found

    def padded_size(self, items: int, most: int) -> int:
        """The size that a batch is filled up to: the fastest of those up to twice as large, if it is clearly faster."""
        if items not in self._sizes:
            return items
        larger = [size for size in self._sizes if items < size <= min(2 * items, most)]
        best = min(larger, key=self.seconds, default=items)
        return best if self.seconds(best) <= PAYS * self.seconds(items) else items

    def observe(self, cost: int, seconds: float) -> None:
        """A launch of that cost took so long."""
        row = row_of(cost)
        if not self._sizes:
            self._insert(row, seconds)
            return
        error = math.log(min(max(seconds / self.seconds(cost), 1 / OUTLIER), OUTLIER))
        if row not in self._sizes:
            self._insert(row, self._interpolated(row))
        self._drift += DRIFT * error
        own = self._collected[row] = self._collected.get(row, 0.0) + OWN * error
        if abs(self._drift) > NOTICED or abs(own) > NOTICED:
            self._correct()

    def curve(self) -> tuple[tuple[int, float], ...]:
        """The table as it stands: (cost, seconds)."""
        return tuple(zip(self._sizes, self._seconds))

    def recommended(self) -> int:
        """The smallest row within 2 % of the best throughput."""
        return self._sizes[smallest_near_best(np.array(self._sizes, dtype=float), np.array(self._seconds))]

    def largest_within(self, seconds: float) -> int | None:
        """The largest row whose batch takes no longer; None when even the smallest does."""
        fitting = [size for size, each in self.curve() if each <= seconds]
        return max(fitting, default=None)

    def cost_within(self, seconds: float) -> int:
        """About the largest cost whose batch takes no longer, 1 at least; beyond the rows in a straight line, below the
        smallest in proportion to it, for nothing is known there."""
        found = self._within.get(seconds)
        if found is None:
            found = self._within[seconds] = self._search(seconds)
        return found

    def _search(self, seconds: float) -> int:
        low, high = self._sizes[0], 2 * self._sizes[-1]
        if self._seconds[0] > seconds:
            return max(1, int(low * seconds / self._seconds[0]))
        while self.seconds(high) <= seconds and high < LARGEST_COST:
            low, high = high, 2 * high
        while high - low > max(1, low // 64):
            middle = (low + high) // 2
            low, high = (middle, high) if self.seconds(middle) <= seconds else (low, middle)
        return low

    def gain(self) -> float:
        """Best throughput over that of the smallest row."""
        rates = [size / each for size, each in self.curve()]
        return max(rates) / rates[0]

    def _insert(self, row: int, seconds: float) -> None:
        place = bisect_left(self._sizes, row)
        self._sizes.insert(place, row)
        self._seconds.insert(place, seconds)
        self._forget()

    def _correct(self) -> None:
        for place, row in enumerate(self._sizes):
            self._seconds[place] *= math.exp(self._drift + self._collected.get(row, 0.0))
        self._drift = 0.0
        self._collected.clear()
        self._forget()

    def _forget(self) -> None:
        self._known.clear()
        self._best.clear()
        self._within.clear()

    def _interpolated(self, cost: int) -> float:
        sizes, seconds = self._sizes, self._seconds
        place = bisect_left(sizes, cost)
        if place == 0:
            return seconds[0]
        if place == len(sizes):
            if len(sizes) == 1:
                return seconds[0] * cost / sizes[0]
            place -= 1
        low, high = sizes[place - 1], sizes[place]
        slope = (seconds[place] - seconds[place - 1]) / (high - low)
        return seconds[place - 1] + (max(slope, 0.0) if cost > high else slope) * (cost - low)

    def _split(self, waiting: int) -> int:
        whole = self.seconds(waiting) if self._sizes else 0.0
        best, least = waiting, PAYS * whole
        for size in self._sizes:
            if size >= waiting:
                break
            together = self.seconds(size) + self.seconds(waiting - size)
            if together <= least:
                best, least = size, together
        return best


def row_of(cost: int) -> int:
    """The row of the table that a cost belongs to: itself, or the next eighth of an octave above it."""
    if cost <= EXACT_UP_TO:
        return cost
    step = 1 << (cost.bit_length() - 4)
    return -(-cost // step) * step


def latency_of(profile: str | Path | Profile, *, tokens: bool = False) -> Latency:
    """The table of a saved profile: the median of each size's samples.

    Args:
        profile: a path or a profile.
        tokens: costs are tokens; a profile of sequences counts their tokens then.

    Raises:
        InvalidProfile: a profile of training, or one whose items are not what costs count.
    """
    profile = load_profile(profile)
    if profile.mode == "training":
        raise InvalidProfile("The profile is one of training steps.", "Measure one with --mode inference.")
    per_item = 1
    if tokens and profile.unit != "tokens":
        if profile.sequence is None:
            raise InvalidProfile(
                f"Costs are tokens, and the profile counts {profile.unit} of unknown length.",
                "Leave out profile=, or measure a model with a sequence.",
            )
        per_item = profile.sequence
    return Latency({point.batch_size * per_item: median(point.samples) for point in profile.points if point.samples})


def measured_latency(run: Callable[[int], float], sizes: tuple[int, ...], repeats: int = 3) -> Latency:
    """The table from running each size a few times, the first call of each left out.

    Args:
        run: seconds of one batch of a size.
        sizes: what to run.
        repeats: the least of so many counts: interruptions only add time.
    """
    table = {}
    for size in sizes:
        run(size)
        table[size] = min(run(size) for _ in range(repeats))
    return Latency(table)
