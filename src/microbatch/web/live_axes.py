"""Axes of the live page's pictures: where a number lies, and at which numbers a label stands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

MOST_TICKS = 6
ROOM = 1.2
"""Factor that an axis goes beyond its values at each end."""
_STEPS = (1.0, 2.0, 5.0)


class Axis(NamedTuple):
    """A logarithmic axis from `low` to `high`, with labels at `ticks`."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        return round(math.log(value / self.low) / math.log(self.high / self.low), 4)

    def ticks_as(self, text: Callable[[float], str]) -> list[dict[str, Any]]:
        """Place and label of each tick."""
        return [{"at": self.place(tick), "label": text(tick)} for tick in self.ticks]


def curve_axes(points: Sequence[tuple[int, float]]) -> tuple[Axis, Axis]:
    """Axes for seconds by cost: powers of two across, 1, 2 and 5 of each decade up."""
    costs, seconds = zip(*points)
    return _axis(costs, _powers_of_two), _axis(seconds, _ones_twos_fives)


def top_of(values: Iterable[float | None], least: float) -> float:
    """A round number that no value exceeds: the top of a linear axis that begins at 0."""
    most = max((value for value in values if value is not None), default=0.0)
    most = max(most, least)
    decade = 10.0 ** math.floor(math.log10(most))
    return next(step * decade for step in (*_STEPS, 10.0) if step * decade >= most * (1 - 1e-9))


def _axis(values: Sequence[float], ticks_of: Callable[[float, float], list[float]]) -> Axis:
    least, most = min(values), max(values)
    low, high = least / ROOM, most * ROOM
    ticks = ticks_of(low, high) or sorted({least, most})
    return Axis(low, high, tuple(ticks[:: -(-len(ticks) // MOST_TICKS)]))


def _powers_of_two(low: float, high: float) -> list[float]:
    return [2.0**k for k in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]


def _ones_twos_fives(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [tick for k in decades for step in _STEPS if low <= (tick := step * 10.0**k) <= high]
