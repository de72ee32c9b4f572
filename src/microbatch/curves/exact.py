"""The shape of a curve without noise, as a time model computes it: every rise counts, nothing is left to statistics."""

from __future__ import annotations

import numpy as np

from microbatch.curves.cliffs import LEAST_EXCESS, Shape
from microbatch.curves.fit import fit_smooth, make_grid, whiten
from microbatch.curves.levels import Levels

FALL = 0.03
"""A size that takes at least so much less time than the next smaller one is an edge too."""


def exact_shape(levels: Levels) -> Shape:
    """The smooth fit through all sizes, and the rises of 5 % per item or more between neighbours."""
    sizes, seconds = levels.batch_sizes, levels.log_seconds
    growth = np.diff(seconds)
    excess = np.concatenate([[0.0], growth - np.diff(np.log(sizes))])
    edges = np.flatnonzero((excess >= np.log(LEAST_EXCESS)) | (np.concatenate([[0.0], growth]) < np.log1p(-FALL)))
    none = np.zeros_like(excess)
    smooth = fit_smooth(make_grid(sizes), seconds, whiten(np.ones(len(sizes))), ())
    return Shape(smooth, (), tuple(int(edge) for edge in edges), excess, none, none)
