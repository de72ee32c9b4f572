"""Cliffs: sizes at which the time per item rises suddenly, told apart from noise and from the smooth curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from microbatch.curves.fit import (
    Grid,
    Smooth,
    best_partition,
    fit_smooth,
    make_coarse_grid,
    make_grid,
    whiten,
    without_steps,
)
from microbatch.curves.levels import Floats, Levels

LEAST_EXCESS = 1.05
ONE_SIDED_90 = 1.645
"""Standard errors on each side of a 90 % interval."""
LUCK = 0.5
"""Standard errors by which an excess must pass 1.05: of the many rises just below, some look larger by chance."""
EXACT_GAP = 1.15
"""A gap b/b⁻ above this leaves the exact edge unknown."""
MODEL_ERROR = 0.004
"""Real curves leave the fit by about this much between neighbours without meaning anything."""
PERIODS = (2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512)
MOST_PERIODS = 2
STAIRCASE_PRICE = 2
"""A staircase must explain as much as two steps: ten periods are tried, and one fits noise best."""
LONE_EDGE_SIGMAS = 3.3
DRIFT_PER_LOG_SIZE = 0.15
"""How fast, per factor e in the size, a level may leave the fit: far points say less about a step than near ones."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A curve taken apart: the smooth fit, and the steps that are not smooth.

    Attributes:
        smooth: the fit with the steps taken out.
        steps: indices at which the level leaves the fit, up or down.
        edges: the steps, and the indices at which the fit's own staircase rises.
        log_excess: per index, log of the ratio of times per item to the next smaller size; 0 at index 0.
        standard_error: of log_excess; zeros when every size has one sample.
        spread: standard deviation that each point was taken to have.
    """

    smooth: Smooth
    steps: tuple[int, ...]
    edges: tuple[int, ...]
    log_excess: Floats
    standard_error: Floats
    spread: Floats

    @property
    def cliffs(self) -> tuple[int, ...]:
        """Indices of the edges whose excess is at least 1.05, not by luck, with its 90 % interval above 1."""
        low = self.log_excess - ONE_SIDED_90 * self.standard_error
        likely = self.log_excess - LUCK * self.standard_error >= np.log(LEAST_EXCESS)
        return tuple(i for i in self.edges if likely[i] and low[i] > 0)


def find_shape(levels: Levels) -> Shape:
    """Fits the smooth curve, its period and the steps together, from several starts, and keeps the likeliest."""
    spread = _spread(levels)
    search = _Search(levels.log_seconds, whiten(spread), 1 / spread**2, 2 * np.log(len(spread)) + 6)
    raw = _raw_jumps(levels, spread)
    candidates: list[tuple[float, int, Smooth, tuple[int, ...]]] = []
    for grid, start in _promising(levels, search):
        for steps in {start, raw, ()}:
            smooth, found = search.alternate(grid, steps)
            candidates.append((search.cost(smooth, found), len(candidates), smooth, found))
    _, _, smooth, steps = min(candidates)
    smooth = fit_smooth(make_grid(levels.batch_sizes, smooth.period), levels.log_seconds, search.white, steps)
    edges = tuple(sorted({*steps, *_staircase_edges(levels, smooth), *_lone_edges(levels, spread)}))
    log_excess, error = _excess(levels, smooth, edges, spread)
    return Shape(smooth, steps, edges, log_excess, error, spread)


@dataclass(frozen=True, slots=True)
class _Search:
    """What every start of the search shares."""

    log_seconds: Floats
    white: Floats
    weights: Floats
    penalty: float

    def steps_of(self, base: Floats) -> tuple[int, ...]:
        """Where the curve leaves a given smooth part."""
        return tuple(int(i) for i in best_partition(self.log_seconds - base, self.weights, self.penalty))

    def cost(self, smooth: Smooth, steps: tuple[int, ...]) -> float:
        """Squared error in units of the noise, and a price for every step and for a staircase."""
        return smooth.loss + self.penalty * (len(steps) + STAIRCASE_PRICE * (smooth.period > 1))

    def alternate(self, grid: Grid, steps: tuple[int, ...]) -> tuple[Smooth, tuple[int, ...]]:
        """Smooth part and steps in turn, until the steps stay."""
        smooth = fit_smooth(grid, self.log_seconds, self.white, steps)
        for _ in range(8):
            found = self.steps_of(smooth.base)
            if found == steps:
                break
            steps = found
            smooth = fit_smooth(grid, self.log_seconds, self.white, steps)
        return smooth, steps


def _promising(levels: Levels, search: _Search) -> list[tuple[Grid, tuple[int, ...]]]:
    """The grid without a period and those of the likeliest periods, each with the steps that a robust fit leaves."""
    sizes = levels.batch_sizes
    tried = []
    for period in (1, *(p for p in PERIODS if sizes[0] < p < sizes[-1])):
        grid = make_coarse_grid(sizes, period)
        base = _robust_base(grid, levels.log_seconds)
        steps = search.steps_of(base)
        left = levels.log_seconds - base - _means(levels.log_seconds - base, steps)
        cost = float(np.sum(search.weights * left**2)) + search.penalty * (len(steps) + STAIRCASE_PRICE * (period > 1))
        tried.append((cost, period, grid, steps))
    smooth, *staircases = tried
    return [(grid, steps) for _, _, grid, steps in (smooth, *sorted(staircases)[:MOST_PERIODS])]


def _robust_base(grid: Grid, log_seconds: Floats) -> Floats:
    """The row with the least mean absolute error: a few steps hardly move it."""
    residual = log_seconds - grid.rows
    offset = np.median(residual, axis=1)
    best = int(np.argmin(np.mean(np.abs(residual - offset[:, None]), axis=1)))
    result: Floats = grid.rows[best] + offset[best]
    return result


def _means(residual: Floats, steps: tuple[int, ...]) -> Floats:
    """The mean of each piece between steps, at every index."""
    return residual - without_steps(residual, steps)


def _staircase_edges(levels: Levels, smooth: Smooth) -> tuple[int, ...]:
    """Where the fitted staircase itself rises by as much as a cliff."""
    if smooth.period == 1:
        return ()
    excess = np.diff(smooth.base) - np.diff(np.log(levels.batch_sizes))
    return tuple(int(i) + 1 for i in np.flatnonzero(excess >= np.log(LEAST_EXCESS)))


def _spread(levels: Levels) -> Floats:
    if levels.sigma is None:
        return np.full(len(levels.batch_sizes), max(_neighbour_sigma(levels), MODEL_ERROR))
    return np.hypot(levels.standard_error, MODEL_ERROR)


def _neighbour_sigma(levels: Levels) -> float:
    """Noise of a curve with one sample per size, from second differences: robust against steps and slopes."""
    y, x = levels.log_seconds, np.log(levels.batch_sizes)
    if len(y) < 4:
        return 0.0
    share = (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
    bend = (y[1:-1] - (1 - share) * y[:-2] - share * y[2:]) / np.sqrt(1 + share**2 + (1 - share) ** 2)
    return float(np.median(np.abs(bend))) * 1.4826


def _raw_jumps(levels: Levels, spread: Floats) -> tuple[int, ...]:
    """A start for the search: neighbours whose times differ by more than noise and any smooth curve allow."""
    rise = np.diff(levels.log_seconds)
    noise = np.hypot(spread[1:], spread[:-1])
    widest = np.diff(np.log(levels.batch_sizes))
    odd = (rise > widest + 3 * noise + 0.02) | (rise < -3 * noise - 0.02)
    return tuple(int(i) + 1 for i in np.flatnonzero(odd))


def _lone_edges(levels: Levels, spread: Floats) -> tuple[int, ...]:
    """With one sample per size: rises of the time per item that noise gives once in twenty whole curves."""
    if levels.sigma is not None:
        return ()
    excess = np.diff(levels.log_seconds) - np.diff(np.log(levels.batch_sizes))
    return tuple(int(i) + 1 for i in np.flatnonzero(excess > LONE_EDGE_SIGMAS * np.hypot(spread[1:], spread[:-1])))


def _excess(levels: Levels, smooth: Smooth, steps: Sequence[int], spread: Floats) -> tuple[Floats, Floats]:
    """Log excess at every index: raw between neighbours, and at steps from the levels on both sides."""
    slope = np.diff(smooth.base) - np.diff(np.log(levels.batch_sizes))
    residual = levels.log_seconds - smooth.base
    excess = np.concatenate([[0.0], slope + np.diff(residual)])
    error = np.concatenate([[0.0], np.hypot(levels.standard_error[1:], levels.standard_error[:-1])])
    if levels.sigma is None:
        return excess, error
    edges = [0, *steps, len(residual)]
    for before, step, after in zip(edges, edges[1:], edges[2:], strict=False):
        left, left_variance = _side(levels, residual, spread, range(before, step), step - 1)
        right, right_variance = _side(levels, residual, spread, range(step, after), step)
        excess[step] = slope[step - 1] + right - left
        error[step] = (left_variance + right_variance) ** 0.5
    return excess, error


def _side(levels: Levels, residual: Floats, spread: Floats, members: range, nearest: int) -> tuple[float, float]:
    """Mean level of one side of a step, near points weighing more, and its variance."""
    index = np.asarray(members)
    distance = np.abs(np.log(levels.batch_sizes[index] / levels.batch_sizes[nearest]))
    variance = spread[index] ** 2 + (DRIFT_PER_LOG_SIZE * distance) ** 2
    weight = 1 / variance
    return float(np.sum(weight * residual[index]) / weight.sum()), float(1 / weight.sum())
