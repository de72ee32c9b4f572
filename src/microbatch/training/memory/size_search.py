"""Which micro-batch size to try next, and which one is the fastest that fits. No torch, no clock.

What a step takes is in `microbatch.curves.micro_batches`. Sizes that even out the pieces, ⌈N/k⌉, are tried: from a
sixteenth of the batch upwards, to what memory allows; downwards where smaller pieces turn out to be the faster ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from microbatch.curves.micro_batches import even_sizes, step_seconds

FIRST_PIECES = 16
MOST_PASSES = 8
"""Where memory ends the search, or may do so. Otherwise see `ITEMS_IN_BATCHES`."""
ITEMS_IN_BATCHES = 5
"""Passes of a search take no more items than this many global batches, unless they take less than `QUICK` together."""
QUICK = 1.0
"""Seconds that a search may take however many items that is: then times of small models can be told apart."""
RACE = ((1.12, 3),)
"""Sizes whose step takes up to so many times the best one's are timed so often: one pass varies by several percent."""
QUICK_RACE = ((3.0, 2), (1.25, 4), (1.12, 8), (1.06, 16))
"""The same while the search is quick. In turn, since a machine's speed drifts from second to second."""
STRETCH = 0.05
"""Seconds of pieces, one after the other, that a repeated pass is to take: a single short piece finds its weights and
items where the last one left them, and what a step does between pieces is left out."""
CLOSE = 1.05
"""Smaller sizes are tried while the smallest so far takes at most this many times the best one's time."""
SHORT = 0.1
"""Seconds below which the first pass at a size tells nothing: kernels and memory are prepared in it."""
STILL_PAYS, STILL_PAYS_QUICKLY = 1.12, 1.5
"""Larger pieces are tried while the largest so far takes up to this many times the best one's time."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One pass over a piece, or over several one after the other.

    Attributes:
        micro_batch_size: items in a piece.
        seconds: of forward and backward of one piece; None where it did not fit.
        peak_bytes: predicted or measured; None where not known.
        counts: whether the time means anything, see `is_telling`.
        pieces: how many ran.
    """

    micro_batch_size: int
    seconds: float | None
    peak_bytes: int | None = None
    counts: bool = True
    pieces: int = 1


def sizes_of(batch_size: int, largest: int | None) -> tuple[int, ...]:
    """Sizes to consider, ascending: the batch in 1, 2, 4, ... even pieces, and the largest that memory allows.

    >>> sizes_of(128, 20)
    (1, 2, 4, 8, 16, 19)
    """
    limit = batch_size if largest is None else max(1, min(largest, batch_size))
    halved = even_sizes(batch_size)
    fewest = -(-batch_size // limit)
    return tuple(sorted({size for size in halved if size <= limit} | {-(-batch_size // fewest)}))


def is_telling(probes: Sequence[Probe], micro_batch_size: int, seconds: float | None) -> bool:
    """Whether a pass counts: not the first of all, which also loads libraries, nor a short one that is the first of its
    size. A failure always does."""
    again = any(probe.micro_batch_size == micro_batch_size for probe in probes)
    return seconds is None or again or (bool(probes) and seconds >= SHORT)


def next_size(
    batch_size: int, probes: Sequence[Probe], largest: int | None, *, smallest: int = 1, passes_before: int = 0
) -> int | None:
    """The size of the next pass; None where the search is over.

    Args:
        batch_size: items in the global batch.
        probes: the passes so far, in order.
        largest: what the memory model allows; None where there is none.
        smallest: no smaller size runs: batch norm needs two items.
        passes_before: passes that the memory model took.
    """
    failed = [probe.micro_batch_size for probe in probes if probe.seconds is None]
    sizes = [s for s in sizes_of(batch_size, largest) if s >= smallest and (not failed or s < min(failed))]
    if not sizes or _is_spent(batch_size, probes, largest, passes_before):
        return None
    start = max((size for size in sizes if size <= -(-batch_size // FIRST_PIECES)), default=sizes[0])
    times = times_of(probes)
    if start not in times:
        return start
    upwards = [size for size in sizes if size > max(times)]
    quick = _is_free(batch_size, largest) and _is_quick(probes)
    slower = STILL_PAYS_QUICKLY if quick else STILL_PAYS
    if upwards and not failed:
        if step_seconds(batch_size, max(times), times) <= slower * _best(batch_size, times):
            return upwards[0]
        if quick and _counts(probes, times)[max(times)] < 2:  # a disturbed pass must not end the search
            return max(times)
    below = [size for size in sizes if size < min(times)]
    if below and step_seconds(batch_size, min(times), times) <= CLOSE * _best(batch_size, times):
        return below[-1]
    return _unsure(batch_size, probes, times, QUICK_RACE if quick else RACE)


def pieces_in_pass(batch_size: int, probes: Sequence[Probe], size: int, largest: int | None) -> int:
    """How many pieces the next pass at a size takes: one at first, and where memory ends the search."""
    seconds = [probe.seconds for probe in probes if probe.micro_batch_size == size and probe.seconds]
    if not seconds or not _is_free(batch_size, largest):
        return 1
    return max(1, min(batch_size // size, math.ceil(STRETCH / min(seconds))))


def best_size(batch_size: int, probes: Sequence[Probe]) -> int:
    """The size with the fastest step among those that ran; half of what failed where none did."""
    times = times_of(probes)
    unknown = max(1, min((probe.micro_batch_size for probe in probes), default=1) // 2)
    return min(times, key=lambda size: (step_seconds(batch_size, size, times), size), default=unknown)


def times_of(probes: Sequence[Probe]) -> dict[int, float]:
    """Seconds by size, ascending: the median of three passes and more, the least of fewer."""
    times: dict[int, list[float]] = {}
    for probe in probes:
        if probe.seconds is not None and probe.counts:
            times.setdefault(probe.micro_batch_size, []).append(probe.seconds)
    return {size: median(found) if len(found) > 2 else min(found) for size, found in sorted(times.items())}


def _is_spent(batch_size: int, probes: Sequence[Probe], largest: int | None, passes_before: int) -> bool:
    if any(probe.seconds is None for probe in probes):
        return True  # what is known of memory is wrong: no second failure
    if not _is_free(batch_size, largest):
        return len(probes) + passes_before >= MOST_PASSES
    items = sum(probe.micro_batch_size * probe.pieces for probe in probes)
    return items >= ITEMS_IN_BATCHES * batch_size and not _is_quick(probes)


def _is_free(batch_size: int, largest: int | None) -> bool:
    """Whether the whole batch fits in one piece: then memory does not end the search."""
    return largest is not None and largest >= batch_size


def _is_quick(probes: Sequence[Probe]) -> bool:
    return sum(probe.pieces * (probe.seconds or 0.0) for probe in probes) < QUICK


def _best(batch_size: int, times: dict[int, float]) -> float:
    return min(step_seconds(batch_size, size, times) for size in times)


def _unsure(
    batch_size: int, probes: Sequence[Probe], times: dict[int, float], race: tuple[tuple[float, int], ...]
) -> int | None:
    """A size near the best that was timed least often."""
    count = _counts(probes, times)
    for nearness, repeats in race:
        near = [size for size in times if step_seconds(batch_size, size, times) <= nearness * _best(batch_size, times)]
        least = min(near, key=lambda size: (count[size], size))
        if len(near) > 1 and count[least] < repeats:
            return least
    return None


def _counts(probes: Sequence[Probe], times: dict[int, float]) -> dict[int, int]:
    """How often each size was timed."""
    return {size: sum(probe.micro_batch_size == size and probe.counts for probe in probes) for size in times}


def first_predictions(batch_size: int) -> tuple[int, ...]:
    """Two sizes at which the peak is predicted first; one where the batch has one item."""
    size = -(-batch_size // FIRST_PIECES)
    return tuple(sorted({size, min(batch_size, 2 * size)}))


def next_prediction(known: dict[int, int], batch_size: int, budget: float) -> int | None:
    """The size whose peak is to be predicted next, to find the largest that fits; None where it is found.

    The peak is a maximum of straight lines (forward and backward; the update), so the line through the two largest
    sizes known never lies above it further on: what it allows is checked, and the line drawn again where it bent.
    """
    if len(known) < 2:
        return None
    small, large = sorted(known)[-2:]
    slope = (known[large] - known[small]) / (large - small)
    room = budget - known[large]
    size = batch_size if slope <= 0 else max(1, min(batch_size, large + int(room // slope)))
    if room < 0 and slope <= 0:
        return 1 if 1 not in known else None
    return None if size in known or _is_bracketed(known, size, budget) else size


def largest_fitting(known: dict[int, int], budget: float) -> int:
    """The largest size whose predicted peak fits; 1 where none does, since one item has to be tried."""
    return max((size for size, peak in known.items() if peak <= budget), default=1)


def _is_bracketed(known: dict[int, int], size: int, budget: float) -> bool:
    """Whether a size just below the one asked for is known to fit already."""
    fits = largest_fitting(known, budget)
    return fits <= size <= fits + max(1, fits // 50) and known.get(fits, budget + 1) <= budget
