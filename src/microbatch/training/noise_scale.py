"""The gradient noise scale: beyond which global batch more samples per step buy little. Plain arithmetic, no torch.

McCandlish et al. 2018, An Empirical Model of Large-Batch Training, section 2.2 and appendix A.1. With G the gradient
over all data and Σ the covariance of one sample's gradient, B_simple = tr(Σ) / |G|² is the batch at which the noise of
a step is as large as its signal. Training with batches of B samples takes 1 + B_simple/B times the fewest steps.

**Unequal pieces.** A batch of N samples is cut into independent pieces; piece p adds g_p to the gradient g = Σ_p g_p
and has the share f_p of the weight (samples, tokens), Σ_p f_p = 1. With E g_p = f_p·G and any covariance C_p,

    E |g_p|² = f_p²·|G|² + tr(C_p)      and      E |g|² = |G|² + Σ_p tr(C_p),

so with q = Σ_p |g_p|² and a = Σ_p f_p²

    S = (|g|² − q) / (1 − a)    is unbiased for |G|²: it is the mean of g_p·g_r / (f_p·f_r) over pairs of pieces, and
    V = q − a·S                 is unbiased for Σ_p tr(C_p), the variance of the batch's gradient; tr(Σ) = N·V.

No assumption is made about how a piece's noise depends on its size or weight. For equal pieces of N/P samples these are
the appendix's two estimates from the batch sizes N/P and N. Both are averaged over steps before they are divided, as
the appendix advises: a ratio of single estimates is biased and can be negative.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

WINDOW = 1000
"""Steps that the averages reach back. Before, they reach back about half of the run, so that its start is forgotten."""

FEWEST_STEPS = 10
"""Steps before an interval is given: it rests on the scatter of the steps' estimates."""

Z = 1.645
"""Normal quantile of a two-sided 90 % interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScale:
    """What a training run's gradients say about its batch size.

    Attributes:
        value: tr(Σ) / |G|² in samples; inf where the gradient cannot be told from noise.
        low: lower end of its 90 % interval (Fieller 1954); None in the first steps.
        high: upper end; inf where the steps so far do not bound it.
        squared_gradient: |G|², averaged.
        variance: tr(Σ) of one sample's gradient, averaged.
        steps: measured.
        batch_size: samples of the last one, on all ranks.
    """

    value: float
    low: float | None
    high: float | None
    squared_gradient: float
    variance: float
    steps: int
    batch_size: int

    def __str__(self) -> str:
        if math.isinf(self.value):
            return f"At {self.batch_size} samples per step the gradient cannot be told from noise: more help."
        interval = "" if self.low is None or self.high is None else f" (90 % interval {_range(self.low, self.high)})"
        return (
            f"Beyond a global batch of about {_rounded(self.value)}{interval} more samples per step buy little; "
            f"with {self.batch_size} training takes {1 + self.value / self.batch_size:.3g} times the fewest steps."
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one step: unbiased estimates of |G|² and of tr(Σ) of one sample."""

    squared_gradient: float
    variance: float


def measured(*, squares: float, shares: float, square_of_sum: float, samples: int) -> Measured | None:
    """One step's estimates.

    Args:
        squares: q, the sum of the pieces' squared norms.
        shares: a, the sum of the squares of their shares of the weight.
        square_of_sum: |g|² of the whole batch.
        samples: N.

    Returns:
        None for a single piece, or numbers that are not finite.

    >>> measured(squares=3.0, shares=0.5, square_of_sum=5.0, samples=8)
    Measured(squared_gradient=4.0, variance=8.0)
    """
    if not shares < 1 - 1e-9 or not math.isfinite(squares + square_of_sum):
        return None
    squared_gradient = (square_of_sum - squares) / (1 - shares)
    return Measured(squared_gradient, samples * (squares - shares * squared_gradient))


@dataclass(slots=True)
class RunningNoise:
    """Averages over the steps of a run; the newest step weighs 2/(t+1) in step t, at least 2/(WINDOW+1).

    Attributes:
        steps: measured so far.
        squared_gradient, variance: averages of the two estimates.
        gradient_scatter, variance_scatter, both_scatter: averages of their squares and of their product.
        spread: sum of the squared weights of the steps; its inverse is the number of steps that the averages rest on.
    """

    steps: int = 0
    squared_gradient: float = 0.0
    variance: float = 0.0
    gradient_scatter: float = 0.0
    variance_scatter: float = 0.0
    both_scatter: float = 0.0
    spread: float = 1.0

    def add(self, one: Measured) -> None:
        self.steps += 1
        weight = max(2 / (self.steps + 1), 2 / (WINDOW + 1))
        s, v = one.squared_gradient, one.variance
        self.squared_gradient += weight * (s - self.squared_gradient)
        self.variance += weight * (v - self.variance)
        self.gradient_scatter += weight * (s * s - self.gradient_scatter)
        self.variance_scatter += weight * (v * v - self.variance_scatter)
        self.both_scatter += weight * (s * v - self.both_scatter)
        self.spread = (1 - weight) ** 2 * self.spread + weight**2

    def noise_scale(self, batch_size: int) -> NoiseScale | None:
        """None before the first measured step."""
        if not self.steps:
            return None
        low, high = self._interval()
        return NoiseScale(
            value=max(self.variance / self.squared_gradient, 0.0) if self.squared_gradient > 0 else math.inf,
            low=low,
            high=high,
            squared_gradient=self.squared_gradient,
            variance=self.variance,
            steps=self.steps,
            batch_size=batch_size,
        )

    def _interval(self) -> tuple[float | None, float | None]:
        """Fieller's: every R for which the averages' V − R·S is within Z standard errors of 0."""
        if self.steps < FEWEST_STEPS:
            return None, None
        s, v = self.squared_gradient, self.variance
        squared_errors = Z**2 * self.spread / (1 - self.spread)  # of a mean, times the scatter below
        a = s * s - squared_errors * (self.gradient_scatter - s * s)
        b = s * v - squared_errors * (self.both_scatter - s * v)
        c = v * v - squared_errors * (self.variance_scatter - v * v)
        root = math.sqrt(max(b * b - a * c, 0.0))
        low = max((b - root) / a, 0.0) if a else 0.0
        return (low, max((b + root) / a, 0.0)) if a > 0 and s > 0 else (low, math.inf)


def share_of(weights: Mapping[str, float], totals: Mapping[str, float]) -> float:
    """f_p of one piece: its share of the weight, averaged over the terms of the loss.

    Args:
        weights: of the piece, by term.
        totals: of all pieces and ranks.
    """
    shares = [weights.get(name, 0.0) / total for name, total in totals.items() if total]
    return sum(shares) / len(shares) if shares else 0.0


def _rounded(value: float) -> str:
    return f"{float(f'{value:.2g}'):,.0f}" if value >= 10 else f"{value:.2g}"


def _range(low: float, high: float) -> str:
    return f"{_rounded(low)} to {_rounded(high)}" if math.isfinite(high) else f"from {_rounded(low)}"
