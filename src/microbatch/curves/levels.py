"""From raw samples to one time per batch size: robust against slow outliers and slow drift.

Times are worked on as logarithms, since noise is relative. A sample is either near its size's level or, once in
a while, slower: never faster. So the level is the mean of the smallest samples, as many of them as a mixture of
a normal distribution and a one-sided flat tail calls likely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from microbatch.curves.profile import Point

Floats = NDArray[np.float64]

OUTLIER_SHARE = 0.05
OUTLIER_SPAN = float(np.log(4))
"""An outlier is taken to be up to four times slower than its size's level."""
MEDIAN_PAIR_DISTANCE = 0.9539
"""Median of |x - y| for two draws of a normal distribution with standard deviation 1."""
SMALLEST_SIGMA = 1e-4
LARGEST_DRIFT = 0.35
"""Log units. A time slower than that was disturbed, not drifting: sizes suffer unequally, so its samples are left to
count as slow outliers."""
NEIGHBOURS = 4
"""Samples on each side in time that tell the machine's speed at a moment. On a shared machine with two cores,
residuals of neighbouring samples correlate by 0.6 without this and by 0.05 with it."""
FEWEST_IN_ROUND = 8
"""With fewer samples, and with fewer than three times as many sizes as neighbours, a size would correct itself."""
LEAST_REPEATED = 1 / 3
"""With fewer sizes measured more than once the noise is not known: each size counts as one time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Levels:
    """One level per batch size.

    Attributes:
        batch_sizes: ascending, shape (n,).
        log_seconds: the level, shape (n,).
        standard_error: of each level, in log units, shape (n,); zeros where sigma is None.
        sigma: spread of one sample around its level; None when too few sizes have more than one sample.
        samples: log samples with the drift between rounds taken out, one array per size.
    """

    batch_sizes: Floats
    log_seconds: Floats
    standard_error: Floats
    sigma: float | None
    samples: tuple[Floats, ...]

    @property
    def seconds(self) -> Floats:
        return np.exp(self.log_seconds)


def find_levels(points: Sequence[Point]) -> Levels:
    """Levels of points in ascending order of size, each with at least one sample."""
    batch_sizes = np.array([point.batch_size for point in points], dtype=float)
    samples = tuple(np.log(np.asarray(point.samples, dtype=float)) for point in points)
    if sum(len(x) > 1 for x in samples) < LEAST_REPEATED * len(samples):
        levels = np.log([median(point.samples) for point in points])
        return Levels(batch_sizes=batch_sizes, log_seconds=levels, standard_error=np.zeros_like(levels),
                      sigma=None, samples=samples)  # fmt: skip
    samples = _without_drift(samples, points)
    sigma = _pair_sigma(samples)
    for _ in range(3):
        levels, kept = _trimmed(samples, sigma)
        sigma = _inlier_sigma(samples, levels, kept, sigma)
    return Levels(batch_sizes=batch_sizes, log_seconds=levels, standard_error=sigma / np.sqrt(kept),
                  sigma=sigma, samples=samples)  # fmt: skip


def _pair_sigma(samples: Sequence[Floats]) -> float:
    """Spread of one sample from the median distance of pairs within a size; outliers hardly move it."""
    distances = [np.abs(x[:, None] - x[None, :])[np.triu_indices(len(x), 1)] for x in samples if len(x) > 1]
    return max(float(np.median(np.concatenate(distances))) / MEDIAN_PAIR_DISTANCE, SMALLEST_SIGMA)


def _trimmed(samples: Sequence[Floats], sigma: float) -> tuple[Floats, Floats]:
    """The mean of the k smallest samples of each size, and k, for the k with the highest likelihood."""
    inlier = np.log((1 - OUTLIER_SHARE) / (sigma * np.sqrt(2 * np.pi)))
    outlier = np.log(OUTLIER_SHARE / OUTLIER_SPAN)
    levels, kept = np.empty(len(samples)), np.empty(len(samples))
    for i, x in enumerate(samples):
        ordered, k = np.sort(x), np.arange(1, len(x) + 1)
        means = np.cumsum(ordered) / k
        scatter = np.maximum(np.cumsum(ordered**2) - k * means**2, 0.0)
        likelihood = k * inlier - scatter / (2 * sigma**2) + (len(x) - k) * outlier
        best = int(np.argmax(likelihood))
        levels[i], kept[i] = means[best], k[best]
    return levels, kept


def _inlier_sigma(samples: Sequence[Floats], levels: Floats, kept: Floats, before: float) -> float:
    freedom = float(np.sum(kept - 1))
    if freedom < 1:
        return before
    scatter = sum(float(np.sum((np.sort(x)[: int(k)] - level) ** 2)) for x, level, k in zip(samples, levels, kept))
    return max(math.sqrt(scatter / freedom), SMALLEST_SIGMA)


def _without_drift(samples: tuple[Floats, ...], points: Sequence[Point]) -> tuple[Floats, ...]:
    """Samples less what the whole machine did at their moment, as far as the order of the samples is known."""
    times, rounds = [point.times for point in points], [point.rounds for point in points]
    for keys, shifts, fewest in ((times, _local_shifts, 3 * NEIGHBOURS), (rounds, _round_shifts, 1)):
        if len(points) < fewest or not all(len(key) == len(x) for key, x in zip(keys, samples, strict=True)):
            continue
        flat, key = np.concatenate(samples), np.concatenate([np.asarray(k, dtype=float) for k in keys])
        size_of = np.repeat(np.arange(len(samples)), [len(x) for x in samples])
        repeated = np.bincount(size_of)[size_of] > 1
        shift = np.zeros_like(flat)
        for _ in range(3):
            centred = flat - shift
            medians = np.array([np.median(centred[size_of == i]) for i in range(len(samples))])
            shift = shifts(np.where(repeated, flat - medians[size_of], 0.0), key)
            shift -= np.median(shift)
        return tuple(np.split(flat - shift, np.cumsum([len(x) for x in samples])[:-1]))
    return samples


def _local_shifts(residual: Floats, times: Floats) -> Floats:
    """The median of the samples taken just before and after each: a machine's speed changes within seconds."""
    order = np.argsort(times, kind="stable")
    ordered = residual[order]
    padded = np.concatenate([np.full(NEIGHBOURS, np.nan), ordered, np.full(NEIGHBOURS, np.nan)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * NEIGHBOURS + 1)
    others = np.delete(windows, NEIGHBOURS, axis=1)
    shift = np.empty_like(residual)
    shift[order] = _limited(np.nanmedian(others, axis=1)) if len(residual) > 1 else 0.0
    return shift


def _round_shifts(residual: Floats, rounds: Floats) -> Floats:
    """The median of each round that holds enough samples to tell it."""
    shift = np.zeros_like(residual)
    for number in np.unique(rounds):
        members = rounds == number
        if members.sum() >= FEWEST_IN_ROUND:
            shift[members] = _limited(np.median(residual[members]))
    return shift


def _limited(shift: Floats) -> Floats:
    """No shift where it is too large for drift."""
    result: Floats = np.where(np.abs(shift) < LARGEST_DRIFT, shift, 0.0)
    return result
