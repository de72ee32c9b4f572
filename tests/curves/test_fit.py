"""The smooth curve: exact on exact input, and the partition against trying every partition."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from microbatch.curves.fit import best_partition, fit_smooth, losses, make_grid, step_columns, template, whiten


@pytest.mark.parametrize("p", [1.0, 1.5, 3.0])
@pytest.mark.parametrize("ridge", [5.0, 40.0, 150.0])
def test_parameters_of_an_exact_curve_come_back(p: float, ridge: float) -> None:
    sizes = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512], dtype=float)
    log_seconds = np.log(2e-6) + template(sizes, ridge, p)
    smooth = fit_smooth(make_grid(sizes), log_seconds, whiten(np.full(len(sizes), 0.01)), ())
    assert smooth.ridge == pytest.approx(ridge, rel=0.03)
    assert smooth.p == pytest.approx(p)
    assert np.exp(smooth.log_slope) == pytest.approx(2e-6, rel=0.03)


def test_steps_are_fitted_beside_the_curve() -> None:
    sizes = np.array([1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256], dtype=float)
    step = 0.4 * (np.arange(len(sizes)) >= 7)
    log_seconds = template(sizes, 30.0, 1.0) + step
    smooth = fit_smooth(make_grid(sizes), log_seconds, whiten(np.full(len(sizes), 0.01)), (7,))
    assert smooth.ridge == pytest.approx(30.0, rel=0.04)
    assert smooth.loss < 1.0


def test_losses_equal_least_squares_row_by_row() -> None:
    rng = np.random.default_rng(0)
    sizes = np.array([1, 2, 4, 8, 16, 32, 64], dtype=float)
    grid, log_seconds = make_grid(sizes), rng.normal(size=7)
    white = whiten(rng.uniform(0.01, 0.05, 7), 0.1)
    got = losses(grid, log_seconds, white, (3,))
    columns = white @ step_columns(7, (3,))
    for row in (0, 100, len(got) - 1):
        target = white @ (log_seconds - grid.rows[row])
        heights, *_ = np.linalg.lstsq(columns, target, rcond=None)
        assert got[row] == pytest.approx(np.sum((target - columns @ heights) ** 2), rel=1e-6)


def test_best_partition_equals_the_best_of_all_partitions() -> None:
    rng = np.random.default_rng(4)
    for _ in range(20):
        residual = rng.normal(size=8) + 3 * (np.arange(8) >= rng.integers(1, 8))
        weights = rng.uniform(0.5, 2.0, 8)
        penalty = 1.5
        found = tuple(int(i) for i in best_partition(residual, weights, penalty))
        every = [jumps for k in range(8) for jumps in combinations(range(1, 8), k)]
        best = min(every, key=lambda jumps: _cost(residual, weights, penalty, jumps))
        assert _cost(residual, weights, penalty, found) == pytest.approx(_cost(residual, weights, penalty, best))


def _cost(residual: np.ndarray, weights: np.ndarray, penalty: float, jumps: tuple[int, ...]) -> float:
    total = penalty * len(jumps)
    for piece, w in zip(np.split(residual, jumps), np.split(weights, jumps), strict=True):
        total += float(np.sum(w * (piece - np.average(piece, weights=w)) ** 2))
    return total
