"""Constants of a time model that fit measured times best."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Predict = Callable[[Mapping[str, float]], Sequence[float]]

_ROUNDS = 30
_STEP = 1e-3
_FURTHEST = 1.0
"""A constant changes by this factor of e in one round at most."""


def fit_constants(start: Mapping[str, float], predict: Predict, measured: Sequence[float]) -> dict[str, float]:
    """The constants (all above zero) for which Σ |log(predicted / measured)| is least, near `start`.

    Relative errors, since a microsecond and a second count alike; absolute ones, since a disturbed time must not pull.
    Gauss–Newton on the logarithms, reweighted by 1/|error| (IRLS), with a little damping for what no time depends on.

    Args:
        start: first guess.
        predict: seconds of each operator with given constants.
        measured: seconds of each.
    """
    names, x, target = list(start), np.log(list(start.values())), np.log(measured)

    def errors(at: Floats) -> Floats:
        return np.log(predict(dict(zip(names, np.exp(at).tolist(), strict=True)))) - target

    best = float(np.abs(errors(x)).sum())
    for _ in range(_ROUNDS):
        now = errors(x)
        slope = np.stack([(errors(x + _STEP * unit) - now) / _STEP for unit in np.eye(len(x))], axis=1)
        weight = 1 / np.maximum(np.abs(now), 0.02)
        normal = slope.T * weight @ slope + 1e-3 * np.eye(len(x))
        step = np.clip(-np.linalg.solve(normal, slope.T @ (weight * now)), -_FURTHEST, _FURTHEST)
        step, found = _shortened(errors, x, step, best)
        if best - found < 1e-6:
            break
        x, best = x + step, found
    return dict(zip(names, np.exp(x).tolist(), strict=True))


def _shortened(errors: Callable[[Floats], Floats], x: Floats, step: Floats, best: float) -> tuple[Floats, float]:
    """The step, halved until it helps, and what it leads to."""
    for _ in range(12):
        found = float(np.abs(errors(x + step)).sum())
        if found < best:
            return step, found
        step = step / 2
    return np.zeros_like(x), best
