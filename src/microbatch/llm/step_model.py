"""Seconds of one step by what it computes: fitted to measured steps, asked by the budget and the scheduler.

    t = f(tokens) + a * cached + b * sequences + c * pairs

f is a rising chain of straight lines through measured sizes, its first piece holding the fixed part (weights are read
once, whatever the batch). `cached` are tokens whose keys and values are read, once for each sequence; `pairs` count,
for chunks of prompts, new tokens times tokens cached before them, since there attention computes and does not only
read. No slope is negative: more work never takes less time, so that budgets can be found by search. No torch, no clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from microbatch.errors import NoAnswer

ENOUGH = 8
"""Fewer samples say nothing of slopes."""
OUTLIER = 1.6
"""Steps so many times slower than a first fit says are left out of the second: something else ran."""
MOST_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class StepSample:
    """One step as it was.

    Attributes:
        tokens: computed in it.
        cached: tokens computed before, of all sequences in it.
        sequences: that had a part in it.
        seconds: it took.
        pairs: of chunks, new tokens times those cached before; see `pairs_of`.
        prefill: of the tokens, those of prompts; None where nobody counted.
    """

    tokens: int
    cached: int
    sequences: int
    seconds: float
    pairs: int = 0
    prefill: int | None = None


def pairs_of(tokens: int, computed: int) -> int:
    """What a share of `tokens` after `computed` ones adds to `pairs`: a single token only reads."""
    return tokens * computed if tokens > 1 else 0


@dataclass(frozen=True, slots=True)
class StepModel:
    """Seconds of a step.

    Attributes:
        sizes: tokens in a step at which f bends, ascending.
        at: f there, in seconds.
        per_cached, per_sequence, per_pair: slopes, in seconds.
        error: median of the fit's relative errors, in percent.
    """

    sizes: tuple[int, ...]
    at: tuple[float, ...]
    per_cached: float = 0.0
    per_sequence: float = 0.0
    per_pair: float = 0.0
    error: float = 0.0

    def seconds(self, tokens: int, cached: int, sequences: int, pairs: int = 0) -> float:
        """Expected seconds of a step."""
        linear = self.per_cached * cached + self.per_sequence * sequences + self.per_pair * pairs
        return self._of_tokens(tokens) + linear

    def tokens_within(self, seconds: float, cached: int, sequences: int, depth: int = 0) -> int:
        """Most tokens of a step that takes no longer; 0 where not even one fits.

        Args:
            seconds: allowed.
            cached: tokens that are read.
            sequences: in the step.
            depth: each token meets so many cached ones, beyond the first of each sequence.
        """
        left = seconds - self.per_cached * cached - self.per_sequence * sequences
        pair = self.per_pair * depth
        low, high = 0, MOST_TOKENS
        while low < high:
            middle = (low + high + 1) // 2
            fits = self._of_tokens(middle) + pair * max(0, middle - sequences) <= left
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def scaled(self, factor: float) -> StepModel:
        """The same machine, so many times slower."""
        return replace(
            self,
            at=tuple([each * factor for each in self.at]),
            per_cached=self.per_cached * factor,
            per_sequence=self.per_sequence * factor,
            per_pair=self.per_pair * factor,
        )

    def _of_tokens(self, tokens: int) -> float:
        """Between sizes in a straight line; beyond the largest in proportion, for there nothing has been seen."""
        sizes, at = self.sizes, self.at
        place = bisect_left(sizes, tokens)
        if place == len(sizes):
            return at[-1] * tokens / sizes[-1]
        if place == 0:
            return at[0]
        low, high = sizes[place - 1], sizes[place]
        return at[place - 1] + (at[place] - at[place - 1]) * (tokens - low) / (high - low)

    def __str__(self) -> str:
        return (
            f"{1e3 * self.at[0]:.2f} ms at {self.sizes[0]} tokens, {1e3 * self.at[-1]:.2f} ms at {self.sizes[-1]}; "
            f"{1e9 * self.per_cached:.1f} ns per cached token, {1e6 * self.per_sequence:.1f} µs per sequence, "
            f"{1e9 * self.per_pair:.2f} ns per pair; {self.error:.1f} % off"
        )


def fit(samples: Sequence[StepSample]) -> StepModel:
    """The model nearest to measured steps, by relative error, with no slope below zero.

    Raises:
        NoAnswer: fewer than `ENOUGH` samples.
    """
    if len(samples) < ENOUGH:
        raise NoAnswer(
            f"{len(samples)} measured steps do not tell how a step's time rises.", f"Measure {ENOUGH} at least."
        )
    table = np.array([(s.tokens, s.cached, s.sequences, s.pairs, s.seconds) for s in samples], dtype=float)
    model = _fit(table)
    usual = table[:, 4] <= OUTLIER * _predicted(model, table)
    return _fit(table[usual]) if ENOUGH <= usual.sum() < len(table) else model


def _fit(table: NDArray[np.float64]) -> StepModel:
    tokens, seconds = table[:, 0], table[:, 4]
    sizes = _bends(tokens)
    pieces = [np.clip(tokens - low, 0, high - low) for low, high in pairwise(sizes)]
    columns = np.stack([np.ones_like(tokens), *pieces, table[:, 1], table[:, 2], table[:, 3]], axis=1)
    found = nonnegative(columns / seconds[:, None], np.ones_like(seconds))
    fixed, slopes = found[0], found[1 : len(sizes)]
    at = fixed + np.concatenate([[0.0], np.cumsum(slopes * np.diff(sizes))])
    cached, sequences, pairs = found[len(sizes) :].tolist()
    model = StepModel(tuple(sizes), tuple(at.tolist()), cached, sequences, pairs)
    return replace(model, error=100 * float(np.median(np.abs(_predicted(model, table) / seconds - 1))))


def _predicted(model: StepModel, table: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([model.seconds(*(int(each) for each in row[:4])) for row in table])


def _bends(tokens: NDArray[np.float64]) -> list[int]:
    """Powers of two from the smallest size to the largest, with both ends, where sizes lie between them."""
    low, high = int(tokens.min()), int(tokens.max())
    between = [1 << power for power in range(low.bit_length(), high.bit_length()) if low < 1 << power < high]
    kept = [low]
    for bend in [*between, high]:
        if ((tokens > kept[-1]) & (tokens <= bend)).any():
            kept.append(bend)
    return kept


def nonnegative(columns: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares with no coefficient below zero.

    The active set method of C. Lawson and R. Hanson, "Solving Least Squares Problems", chapter 23, on normal equations
    as in R. Bro and S. de Jong, J. Chemometrics 11 (1997): columns are few.
    """
    norms = np.linalg.norm(columns, axis=0)
    norms[norms == 0] = 1.0
    scaled = columns / norms
    gram, right = scaled.T @ scaled, scaled.T @ wanted
    found, free = np.zeros(len(right)), np.zeros(len(right), dtype=bool)
    for _ in range(3 * len(right)):
        gradient = np.where(free, -np.inf, right - gram @ found)
        best = int(np.argmax(gradient))
        if gradient[best] <= 1e-10 * len(wanted):
            break
        free[best] = True
        found = _within_bounds(gram, right, found, free)
    scaled_back: NDArray[np.float64] = found / norms
    return scaled_back


def _within_bounds(
    gram: NDArray[np.float64], right: NDArray[np.float64], found: NDArray[np.float64], free: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """The best of the free coefficients; those that would fall below zero are fixed there, the nearest first."""
    while free.any():
        trial = np.zeros_like(found)
        trial[free] = np.linalg.lstsq(gram[np.ix_(free, free)], right[free], rcond=None)[0]
        below = free & (trial <= 0)
        if not below.any():
            return trial
        step = np.min(found[below] / np.maximum(found[below] - trial[below], 1e-300))
        found = np.where(free, found + step * (trial - found), 0.0)
        free &= found > 1e-14
        found[~free] = 0.0
    return np.zeros_like(found)
