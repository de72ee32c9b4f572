"""Which piece size to run next while data passes through, and which one to stay at. No torch, no clock.

Sizes double from a start while they pay. Every run is real work, so what is lost while looking is only the difference
between the size that runs and the best one; sizes near the best are run a few times more, since one run varies by
several percent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RUNS = 2
"""Runs of each size before it is judged; the faster one counts, since disturbances only add."""
MOST_RUNS = 4
"""Runs of each size that is near the best."""
NEAR_BEST = 1.02
"""The smallest size that takes at most this many times the best one's time per token is as good."""
NEAR = 1.06
"""Sizes this near are run more often."""
HOPELESS = 1.15
"""A size that takes this many times the best one's time per token ends the growth."""
BEYOND = 2
"""Sizes above the best one that are run before it counts as the best."""
WORTH = 4
"""A larger size is run where as many such pieces are left: fewer could not make up for looking."""
FIRST_ITEMS = 8


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of one piece.

    Attributes:
        size: tokens (or items, where all are alike) that the piece might have.
        cost: what it had, padding included.
        seconds: None where it ran out of memory.
        counts: whether the time means anything; the first run of all also loads kernels.
    """

    size: int
    cost: int
    seconds: float | None
    counts: bool = True


def next_size(
    trials: Sequence[Trial], *, start: int, largest: int | None = None, left: int | None = None, smallest: int = 1
) -> int | None:
    """The size to run next; None where the search is over.

    Args:
        trials: so far, in order.
        start: the first size.
        largest: what memory allows; None where that is not known.
        left: what has not run yet, in the unit of sizes; None where that is not known.
        smallest: no piece can be smaller: its longest item.
    """
    failed = [trial.size for trial in trials if trial.seconds is None]
    limit = min([*(size - 1 for size in failed), *([largest] if largest else [])], default=None)
    rates, first = rates_of(trials), start if limit is None else max(1, min(start, limit))
    if not rates:
        return first
    latest = trials[-1]
    if latest.seconds is not None and latest.counts and _runs(trials, latest.size) < RUNS:
        return latest.size
    best, top, bottom = best_size(trials), max(rates), min(rates)
    beyond = sum(size > best for size in rates)
    if not failed and beyond < BEYOND and rates[top] <= HOPELESS * min(rates.values()):
        following = 2 * top if limit is None else min(2 * top, limit)
        if following > top and (left is None or WORTH * following <= left):
            return following
    if bottom > smallest and bottom == best:
        return max(smallest, bottom // 2)
    return _unsure(trials, rates)


def best_size(trials: Sequence[Trial]) -> int:
    """The smallest size as good as the best."""
    rates = rates_of(trials)
    least = min(rates.values())
    return min(size for size, rate in rates.items() if rate <= NEAR_BEST * least)


def rates_of(trials: Sequence[Trial]) -> dict[int, float]:
    """Seconds per token by size, ascending: the least of its runs. A size that has run out of memory has none, nor has
    a larger one: memory that sufficed once may be taken by others now."""
    rates: dict[int, float] = {}
    failed = min((trial.size for trial in trials if trial.seconds is None), default=None)
    for trial in trials:
        if trial.seconds is not None and trial.counts and (failed is None or trial.size < failed):
            rate = trial.seconds / trial.cost
            rates[trial.size] = min(rate, rates.get(trial.size, rate))
    return dict(sorted(rates.items()))


def _runs(trials: Sequence[Trial], size: int) -> int:
    return sum(trial.size == size and trial.counts for trial in trials)


def _unsure(trials: Sequence[Trial], rates: dict[int, float]) -> int | None:
    """A size near the best that ran least often."""
    near = [size for size, rate in rates.items() if rate <= NEAR * min(rates.values())]
    if len(near) < 2:
        return None
    least = min(near, key=lambda size: (_runs(trials, size), size))
    return least if _runs(trials, least) < MOST_RUNS else None
