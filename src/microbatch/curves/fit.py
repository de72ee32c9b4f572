"""The smooth part of a curve: t(b) = (a^p + (c·b)^p)^(1/p), fitted together with steps.

In logarithms log t = log c + T(b; r, p) + steps, where r = a/c is the ridge and
T = log((r^p + b^p)^(1/p)). Only r and p are not linear, so both are searched on a grid: every combination is one
row of a matrix, and the linear part (log c and the heights of given steps) is projected out of all rows at once.
p = 1 is no overlap between moving weights and computing, p → ∞ is the roofline's maximum. Kernels that work in
tiles do the work of the next full tile, so b may be rounded up to a multiple of a period first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from microbatch.curves.levels import Floats

EXPONENTS = np.array([1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0, 20.0])
RIDGES_PER_E = 24
"""Grid points per factor e in the ridge: about 4 % apart."""
COARSE_EXPONENTS = np.array([1.0, 1.2, 1.5, 2.0, 4.0, 20.0])
COARSE_RIDGES_PER_E = 8
"""Enough to find the steps with."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Every combination of exponent and ridge at given batch sizes; `rows` has shape (combinations, n)."""

    exponents: Floats
    ridges: Floats
    rows: Floats
    period: int = 1


@dataclass(frozen=True, slots=True)
class Smooth:
    """A fitted curve: `log_fixed` = log a, `log_slope` = log c, `base` = its log seconds at the batch sizes."""

    p: float
    ridge: float
    log_slope: float
    base: Floats
    loss: float
    period: int = 1

    def log_seconds(self, batch_sizes: Floats) -> Floats:
        """The fit at any sizes, without the staircase of its period."""
        return self.log_slope + template(batch_sizes, self.ridge, self.p)


def template(batch_sizes: Floats, ridge: float | Floats, p: float | Floats) -> Floats:
    """log((ridge^p + b^p)^(1/p)), without overflow at large p."""
    fixed, growing = np.log(ridge), np.log(batch_sizes)
    with np.errstate(under="ignore"):
        beside = np.log1p(np.exp(-p * np.abs(fixed - growing))) / p
    result: Floats = np.maximum(fixed, growing) + beside
    return result


def make_grid(batch_sizes: Floats, period: int = 1) -> Grid:
    """Ridges from an eighth of the smallest size to eight times the largest, for every exponent."""
    return _last_grid(tuple(batch_sizes.tolist()), period)


@lru_cache(maxsize=2)
def _last_grid(batch_sizes: tuple[float, ...], period: int) -> Grid:
    """One curve is fitted several times on the same grid, which takes longer to make than to search."""
    return _grid(np.array(batch_sizes), period, EXPONENTS, RIDGES_PER_E)


def _grid(batch_sizes: Floats, period: int, exponents: Floats, density: int) -> Grid:
    low, high = np.log(batch_sizes[0] / 8), np.log(batch_sizes[-1] * 8)
    ridges = np.exp(np.linspace(low, high, int((high - low) * density) + 2))
    p, r = (axis.ravel() for axis in np.meshgrid(exponents, ridges, indexing="ij"))
    return Grid(p, r, template(round_up(batch_sizes, period)[None, :], r[:, None], p[:, None]), period)


def make_coarse_grid(batch_sizes: Floats, period: int = 1) -> Grid:
    """As `make_grid`, a seventh of its rows."""
    return _grid(batch_sizes, period, COARSE_EXPONENTS, COARSE_RIDGES_PER_E)


def round_up(batch_sizes: Floats, period: int) -> Floats:
    """Each size rounded up to a multiple of `period`."""
    return np.ceil(batch_sizes / period) * period


def step_columns(n: int, steps: Sequence[int]) -> Floats:
    """One column of ones for the level, then one per step: 0 before its index, 1 from it on."""
    return np.stack([np.ones(n)] + [(np.arange(n) >= step).astype(float) for step in steps], axis=1)


def without_steps(residual: Floats, steps: Sequence[int]) -> Floats:
    """`residual` (n,) less its mean between each step and the next."""
    pieces = np.split(residual, list(steps))
    return np.concatenate([piece - piece.mean() for piece in pieces])


def whiten(spread: Floats, wander: float = 0.0) -> Floats:
    """What makes independent unit noise of a curve's noise: a matrix (n, n), or its diagonal (n,) without wander.

    Each point has its own standard deviation `spread`; besides, the whole curve may leave the model by a random
    walk whose standard deviation from end to end is `wander`: steps too small to be found one by one.
    """
    if not wander:
        return 1 / spread
    n = len(spread)
    walk = (1 + np.arange(n)) * wander**2 / n
    covariance = np.diag(spread**2) + np.minimum.outer(walk, walk)
    result: Floats = np.linalg.inv(np.linalg.cholesky(covariance))
    return result


def _whitened(white: Floats, columns: Floats) -> Floats:
    """`columns` (n,) or (n, k) in units of the noise."""
    scale = white if white.ndim == 2 or columns.ndim == 1 else white[:, None]
    result: Floats = scale @ columns if white.ndim == 2 else scale * columns
    return result


def losses(grid: Grid, log_seconds: Floats, white: Floats, steps: Sequence[int]) -> Floats:
    """Squared error of every row in units of the noise, the linear part fitted out.

    Shape (combinations,), or (combinations, k) for k curves in the columns of `log_seconds` (n, k).
    """
    basis, _ = np.linalg.qr(_whitened(white, step_columns(len(white), steps)))
    rows = _whitened(white, grid.rows.T).T
    rows = rows - (rows @ basis) @ basis.T
    target = _whitened(white, log_seconds)
    target = target - basis @ (basis.T @ target)
    squared: Floats = np.einsum("ij,ij->i", rows, rows)
    products: Floats = rows @ target
    errors: Floats = (squared if log_seconds.ndim == 1 else squared[:, None]) - 2 * products
    errors += np.sum(target**2, axis=0)
    return errors


def fit_smooth(grid: Grid, log_seconds: Floats, white: Floats, steps: Sequence[int]) -> Smooth:
    """The best row of the grid, with the level and the heights of the steps that belong to it."""
    loss = losses(grid, log_seconds, white, steps)
    best = int(np.argmin(loss))
    heights = _heights(log_seconds - grid.rows[best], white, steps)
    return Smooth(
        p=float(grid.exponents[best]), ridge=float(grid.ridges[best]), log_slope=float(heights[0]),
        base=grid.rows[best] + heights[0], loss=float(loss[best]), period=grid.period,
    )  # fmt: skip


def _heights(residual: Floats, white: Floats, steps: Sequence[int]) -> Floats:
    columns = _whitened(white, step_columns(len(white), steps))
    heights = np.linalg.lstsq(columns, _whitened(white, residual), rcond=None)[0]
    return np.asarray(heights, dtype=np.float64)


def bootstrap_ridges(
    grid: Grid, log_seconds: Floats, white: Floats, steps: Sequence[int], rng: np.random.Generator, draws: int = 200
) -> Floats:
    """Ridges of curves drawn around the fit with the noise that `white` stands for; shape (draws,)."""
    smooth = fit_smooth(grid, log_seconds, white, steps)
    columns = step_columns(len(white), steps)[:, 1:]
    mean = smooth.base + columns @ _heights(log_seconds - smooth.base, white, steps)[1:]
    unit = rng.standard_normal((len(mean), draws))
    noise = np.linalg.solve(white, unit) if white.ndim == 2 else unit / white[:, None]
    ridges: Floats = grid.ridges[np.argmin(losses(grid, mean[:, None] + noise, white, steps), axis=0)]
    return ridges


def best_partition(residual: Floats, weights: Floats, penalty: float) -> NDArray[np.intp]:
    """Indices at which a piecewise constant curve through `residual` jumps.

    Minimises the weighted squared error plus `penalty` for every jump, exactly, by dynamic programming over the
    last jump (optimal partitioning; Jackson et al., IEEE Signal Processing Letters 12(2), 2005).
    """
    n = len(residual)
    w = np.concatenate([[0.0], np.cumsum(weights)])
    wx = np.concatenate([[0.0], np.cumsum(weights * residual)])
    wxx = np.concatenate([[0.0], np.cumsum(weights * residual**2)])
    total = w[None, :] - w[:, None]
    total[total <= 0] = 1.0  # no segment ends before it starts; these entries are never read
    segment = (wxx[None, :] - wxx[:, None]) - (wx[None, :] - wx[:, None]) ** 2 / total + penalty
    cost = np.full(n + 1, np.inf)
    cost[0], last = -penalty, np.zeros(n + 1, dtype=np.intp)
    for end in range(1, n + 1):
        candidates = cost[:end] + segment[:end, end]
        last[end] = candidates.argmin()
        cost[end] = candidates[last[end]]
    jumps: list[int] = []
    end = n
    while end > 0:
        end = int(last[end])
        jumps.append(end)
    return np.array(jumps[::-1][1:], dtype=np.intp)
