"""Which sizes a prediction computes: a close grid, and both sides of every step that the time model makes. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from itertools import pairwise
from math import log

from microbatch.profiling.grid import doublings, is_saturated

SecondsOf = Callable[[int], float]

LARGEST_BATCH = 1 << 17
LEAST_EXCESS = 1.05
"""A rise of the time per item by as much is a cliff."""
PROBED = 1.02
"""Rises this large get a size on both sides too: several of them between two sizes would look like one cliff."""
PER_DOUBLING = 8
MOST_STEPS = 100
"""The largest steps are kept, so that the staircase of a large model on many multiprocessors stays readable."""


def reach(seconds_of: SecondsOf, limit: int) -> tuple[int, str]:
    """The largest size worth a look, and what ends there: ``saturated`` or ``limit``.

    Doubles until two doublings gain less than 3 % of throughput, as a measurement does.
    """
    sizes: list[int] = []
    for size in doublings(min(limit, LARGEST_BATCH)):
        sizes.append(size)
        if is_saturated(sizes, [seconds_of(size) for size in sizes]):
            return size, "saturated"
    return sizes[-1], "limit"


def choose_sizes(seconds_of: SecondsOf, top: int, wanted: Iterable[int] = ()) -> tuple[int, ...]:
    """Sizes up to `top`: every size to 16, eight to a doubling above, `wanted`, and e, e + 1 around every step.

    Steps are looked for at multiples of 8 (of 16, 32, ... as sizes grow), where tiles end, and inside any interval
    whose time per item rises; there the edge is found by halving.
    """
    timed = cache(seconds_of)
    regular = {*_close_grid(top), *(size for size in wanted if 1 <= size <= top)}
    probes = sorted({*regular, *(size for edge in _tile_edges(top) for size in (edge, edge + 1) if size <= top)})
    steps = [found for low, high in pairwise(probes) for found in _narrowed(low, high, timed)]
    largest = sorted(steps, key=lambda pair: -_excess(pair[0], pair[1], timed))[:MOST_STEPS]
    return tuple(sorted({*regular, *(size for pair in largest for size in pair)}))


def rising_pairs(sizes: Iterable[int], seconds_of: SecondsOf) -> list[tuple[int, int]]:
    """Neighbours of which the larger takes at least 5 % more time per item."""
    return [(low, high) for low, high in pairwise(sizes) if _excess(low, high, seconds_of) >= LEAST_EXCESS]


def _close_grid(top: int) -> list[int]:
    sizes = list(range(1, min(top, 16) + 1))
    for power in doublings(top)[4:]:
        sizes += [power + part * power // PER_DOUBLING for part in range(PER_DOUBLING)]
    return [*(size for size in sizes if size <= top), top]


def _tile_edges(top: int) -> list[int]:
    """Multiples of 8 to 256, of 16 to 512, of 32 to 1024, ..."""
    edges, step, start = [], 8, 8
    while start < top:
        end = min(top, 32 * step)
        edges += list(range(start, end + 1, step))
        start, step = end + 2 * step, 2 * step
    return edges


def _excess(low: int, high: int, seconds_of: SecondsOf) -> float:
    return (seconds_of(high) / high) / (seconds_of(low) / low)


def _narrowed(low: int, high: int, seconds_of: SecondsOf) -> list[tuple[int, int]]:
    """The neighbours between which the time per item rises most, if it does within [low, high]."""
    if _excess(low, high, seconds_of) < PROBED:
        return []
    while high - low > 1:
        middle = (low + high) // 2
        # The half of which the time grows faster than in proportion holds the step.
        left = log(_excess(low, middle, seconds_of))
        low, high = (low, middle) if left >= log(_excess(middle, high, seconds_of)) else (middle, high)
    return [(low, high)] if _excess(low, high, seconds_of) >= PROBED else []
