"""The ridge: where the time that does not grow with the batch equals the time that does."""

from __future__ import annotations

import numpy as np

from microbatch.curves.cliffs import Shape
from microbatch.curves.explanation import Fit, Ridge
from microbatch.curves.fit import Smooth, bootstrap_ridges, fit_smooth, make_grid, whiten
from microbatch.curves.levels import Floats, Levels

SMALL_STEPS = 0.045
"""Standard deviation, over the whole curve, of steps too small to be found one by one. Without it the interval
covers the truth of planted curves less often than it says (benchmarks/planted_curves.py)."""
FEWEST_SIZES = 5
"""Two parameters and an exponent need more points than unknowns."""
ADDITIVE_BELOW = 1.05
SEED = 20240229


STAIRCASE_STEPS = 5
STAIRCASE_SHARE = 0.5


def smooth_part(levels: Levels, shape: Shape) -> tuple[Smooth, tuple[int, ...], float]:
    """The curve that the parameters are read from, the steps left out of it, and how far it may wander.

    On a staircase most of the growth is in the steps, whose treads are flat: tiles and waves, each step a part of
    the linear growth itself. Leaving those out would leave no growth, so there the curve runs through the steps.
    """
    rises = np.diff(levels.log_seconds)[[i - 1 for i in shape.steps]]
    growth = levels.log_seconds[-1] - levels.log_seconds[0]
    if np.sum(rises > 0) < STAIRCASE_STEPS or rises.sum() < STAIRCASE_SHARE * growth:
        return shape.smooth, shape.steps, SMALL_STEPS
    grid = make_grid(levels.batch_sizes)
    smooth = fit_smooth(grid, levels.log_seconds, whiten(np.ones(len(levels.batch_sizes))), ())
    return smooth, (), float(np.std(levels.log_seconds - smooth.base))


def find_fit(levels: Levels, shape: Shape) -> Fit | None:
    """The smooth curve's parameters; None with too few sizes."""
    sizes = levels.batch_sizes
    if len(sizes) < FEWEST_SIZES:
        return None
    smooth, _, _ = smooth_part(levels, shape)
    form = "flat" if smooth.ridge > 4 * sizes[-1] else "linear" if smooth.ridge < sizes[0] else "p-norm"
    if form == "p-norm" and smooth.p < ADDITIVE_BELOW:
        form = "additive"
    residual = levels.log_seconds - smooth.base
    offset = float(np.mean(residual))  # through the middle of the steps, not along the first tread
    residual -= offset
    per_item = float(np.exp(smooth.log_slope + offset))
    return Fit(
        form=form,
        p=smooth.p,
        fixed_seconds=per_item * smooth.ridge,
        seconds_per_item=per_item,
        rms=float(np.sqrt(np.mean(residual**2))),
    )


def find_ridge(levels: Levels, shape: Shape) -> Ridge:
    """The ridge with its 90 % bootstrap interval, or the reason why there is none."""
    sizes = levels.batch_sizes
    if len(sizes) < FEWEST_SIZES:
        return Ridge(reason=f"{len(sizes)} sizes are too few for a fit; measure at least {FEWEST_SIZES}.")
    smooth, steps, wander = smooth_part(levels, shape)
    if smooth.ridge > 4 * sizes[-1]:
        return Ridge(reason=f"The time is still flat at {sizes[-1]:.0f}, the largest size measured.")
    if smooth.ridge < sizes[0]:
        return Ridge(reason=f"The time grows in proportion to the batch from {sizes[0]:.0f} on.")
    if levels.sigma is None:
        return Ridge(value=smooth.ridge, reason="One time per size gives no interval.")
    grid, white = make_grid(sizes, smooth.period), whiten(shape.spread, wander)
    ridges = bootstrap_ridges(grid, levels.log_seconds, white, steps, np.random.default_rng(SEED))
    low, high = np.percentile(ridges, [5, 95])
    return Ridge(value=smooth.ridge, low=float(min(low, smooth.ridge)), high=float(max(high, smooth.ridge)))


def fitted_seconds(fit: Fit, batch_sizes: Floats) -> Floats:
    """The fit at any sizes: (fixed^p + (per_item·b)^p)^(1/p), without overflow at large p."""
    fixed, growing = np.log(fit.fixed_seconds), np.log(fit.seconds_per_item * batch_sizes)
    result: Floats = np.exp(np.logaddexp(fit.p * fixed, fit.p * growing) / fit.p)
    return result
