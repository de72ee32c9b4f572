"""Which batch sizes to measure. No torch, no clock: sizes and estimated seconds in, sizes out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np

SecondsOf = Callable[[int], float]
"""Estimated seconds of one call at a batch size."""

EXACT_GAP = 1.15
SMALLEST_GAIN = 1.03
FEWEST_DOUBLINGS = 7
"""Sizes up to 64: a flat start says little about what comes, and small sizes cost little."""


def doublings(top: int) -> list[int]:
    """1, 2, 4, … up to `top`, and `top` itself."""
    sizes = [1]
    while sizes[-1] * 2 <= top:
        sizes.append(sizes[-1] * 2)
    return sizes if sizes[-1] == top else [*sizes, top]


def is_saturated(sizes: Sequence[int], seconds: Sequence[float]) -> bool:
    """Did the last two doublings together gain less than 3 % of throughput over the best before them?"""
    throughput = [size / t for size, t in zip(sizes, seconds, strict=True)]
    if len(throughput) < FEWEST_DOUBLINGS:
        return False
    return max(throughput[-2:]) < SMALLEST_GAIN * max(throughput[:-2])


def estimate(sizes: Sequence[int], seconds: Sequence[float]) -> SecondsOf:
    """Seconds between measured sizes, on straight lines in logarithms; beyond them in proportion to the size."""
    x, y = np.log(sizes), np.log(seconds)

    def seconds_of(size: int) -> float:
        beyond = max(np.log(size) - x[-1], 0.0)
        return float(np.exp(np.interp(np.log(size), x, y) + beyond))

    return seconds_of


def levels_of_detail(top: int, edges: Iterable[int] = (), wanted: Iterable[int] = ()) -> list[list[int]]:
    """Sizes up to `top` in groups, the most telling first.

    Powers of two; those that are wanted; every size to 16 and the sizes between; predicted wave edges; both sides of
    the tile edges where kernels change; then ever finer multiples. Each later group makes gaps smaller.
    """
    powers = doublings(top)
    groups = [
        powers,
        list(wanted),
        [*range(1, 17), *(3 * size // 2 for size in powers if size >= 8)],
        [size for edge in edges for size in (edge, edge + 1)],
        [size + 1 for size in powers if size >= 16],
        [quarters * size // 4 for size in powers if size >= 8 for quarters in (5, 7)],
        [size - 1 for size in powers if size >= 8],
        *([multiple + shift for multiple in range(step, top, step) for shift in (0, 1)] for step in (64, 32)),
        list(range(16, top, 16)),
        list(range(8, top, 8)),
    ]
    return [[size for size in group if 1 <= size <= top] for group in groups]


def choose_sizes(
    groups: Sequence[Sequence[int]], seconds_of: SecondsOf, *, allowance: float, rounds: int, largest_items: int
) -> list[int]:
    """As many groups of sizes as `rounds` rounds can measure within `allowance` seconds and `largest_items` items.

    A group that does not fit as a whole gives its smaller sizes. The first group is always measured.
    """
    chosen = set(groups[0])
    cost = sum(2 * rounds * seconds_of(size) for size in chosen)
    items = rounds * sum(chosen)
    for group in groups[1:]:
        for size in sorted(set(group) - chosen):
            cost += 2 * rounds * seconds_of(size)
            items += rounds * size
            if cost > allowance or items > largest_items:
                return sorted(chosen)
            chosen.add(size)
    return sorted(chosen)


def within(costs: Iterable[tuple[float, int]], allowance: float) -> list[int]:
    """The sizes of (cost, size) pairs, cheapest first, whose costs add up to no more than the allowance."""
    total, chosen = 0.0, []
    for cost, size in sorted(costs):
        total += cost
        if total > allowance:
            break
        chosen.append(size)
    return chosen


def next_bisection(sizes: Sequence[int], suspects: Iterable[tuple[int, int]]) -> list[int]:
    """One size inside each suspected (from, to] interval that is not yet narrow; a tile edge where there is one.

    Halving the interval finds an edge in log2 steps; edges of tiles lie just above multiples of 8, so those go first.
    """
    found = []
    for low, high in suspects:
        inside = [size for size in sizes if low < size < high]
        if high - low <= 1 or inside:
            continue
        middle = (low + high) // 2
        aligned = middle - middle % 8
        found.append(aligned if low < aligned < high else middle)
    return found


def wide_gaps(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours more than 15 % apart with a size between them."""
    return [(low, high) for low, high in pairwise(sizes) if high > EXACT_GAP * low and high - low > 1]
