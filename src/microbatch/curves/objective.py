"""Which size is best for what. Sizes ascend; times are seconds of one call; every answer is a measured size."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np

from microbatch.curves.levels import Floats

NEAR_BEST = 0.98
"""The smallest size within 2 % of the best throughput is as good as the best, and answers sooner."""
STILL_RISING = 1.05
"""Gain of the last doubling above which a larger size is worth a try."""
PAD_TOLERANCE = 1.02
PAD_LEAST_GAIN = 0.97


def smallest_near_best(batch_sizes: Floats, seconds: Floats, avoid: Collection[int] = ()) -> int:
    """Index of the smallest size within 2 % of the best throughput, outside the sizes to avoid where possible."""
    throughput = batch_sizes / seconds
    near = np.flatnonzero(throughput >= NEAR_BEST * throughput.max())
    allowed = [i for i in near if int(batch_sizes[i]) not in avoid]
    return int((allowed or list(near))[0])


def most_balanced(batch_sizes: Floats, seconds: Floats) -> int:
    """Index of the largest throughput ÷ latency, b/t²; on t = (a^p + (c·b)^p)^(1/p) it lies at the ridge for any p."""
    return int(np.argmax(batch_sizes / seconds**2))


def first_at_share(batch_sizes: Floats, seconds: Floats, share: float = 0.9) -> int:
    """Index of the first size that reaches `share` of the best throughput."""
    throughput = batch_sizes / seconds
    return int(np.argmax(throughput >= share * throughput.max()))


def within_target(upper_seconds: Floats, target: float) -> list[int]:
    """Indices of the sizes whose upper interval stays under the target."""
    return [int(i) for i in np.flatnonzero(upper_seconds < target)]


def pad_target(batch_sizes: Floats, seconds: Floats, index: int) -> int | None:
    """Index of the size to pad to: the smallest larger one, at most twice the size, whose time is within 2 % of the
    least time among those and at least 3 % below the size's own; None when padding does not pay.
    """
    larger = np.flatnonzero((batch_sizes > batch_sizes[index]) & (batch_sizes <= 2 * batch_sizes[index]))
    if not len(larger):
        return None
    least = seconds[larger].min()
    pays = (seconds[larger] <= PAD_TOLERANCE * least) & (seconds[larger] <= PAD_LEAST_GAIN * seconds[index])
    return int(larger[np.argmax(pays)]) if pays.any() else None


def zone_end(batch_sizes: Floats, seconds: Floats, start: int, pad: int | None = None) -> int:
    """Index of the last size of the zone that a cliff at index `start` opens.

    It ends before the size that reaches the throughput from before the cliff again, or before index `pad`, the
    size that those in the zone had better be padded to.
    """
    throughput = batch_sizes / seconds
    recovered = np.flatnonzero(throughput[start:] >= throughput[start - 1])
    end = start + int(recovered[0]) if len(recovered) else len(seconds)
    return min(end, len(seconds) if pad is None else pad) - 1


def common_period(edges: Sequence[tuple[int, int]], sizes: Sequence[int]) -> int | None:
    """The period P of rises at k·P + 1.

    At least three multiples rise, no more than one in four of those that the grid could show is missing from the
    first on, and most rises belong to it. The period that explains most rises wins, then the one
    with the larger power of two in it, then the larger.

    Args:
        edges: (from, to] intervals that each hold a rise.
        sizes: every measured size; a multiple counts where its neighbours are at most half a period apart.
    """
    best, most = None, (0, 0, 0)
    for period in range(2, max(sizes) // 3 + 1):
        hits = {_multiple_from(low, period) for low, high in edges if _multiple_from(low, period) < high}
        explained = sum(_multiple_from(low, period) < high for low, high in edges)
        rank = (explained, period & -period, period)
        if len(hits) < 3 or explained < 0.6 * len(edges) or rank <= most:
            continue
        shown = {multiple for multiple in _shown(period, sizes) if multiple >= min(hits)}
        if len(hits & shown) >= max(3, 0.75 * len(shown)):
            best, most = period, rank
    return best


def _multiple_from(low: int, period: int) -> int:
    """The smallest multiple of the period that is at least `low`: the next size is the first of a new block."""
    return -(-low // period) * period


def _shown(period: int, sizes: Sequence[int]) -> set[int]:
    """Multiples whose rise the grid would show: neighbours around them at most half a period apart."""
    near = ((low, high) for low, high in pairwise(sizes) if high - low <= max(1, period // 2))
    return {m for low, high in near for m in [_multiple_from(low, period)] if m < high}
