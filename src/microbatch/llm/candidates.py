"""Which tokens may be chosen, with which weights, and the one that a random number points at. One row at a time.

A row of logits fits the processor's inner cache, a batch of them does not: row by row each pass costs what it computes,
and no row can change another's last bit. Nothing sorts the vocabulary where `top_k` is set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from microbatch.llm.sampling_params import SamplingParams

Ids = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float32]

COLDEST = 1e-30
"""Least temperature that logits are divided by: below, fp32 has 0."""
BLOCK = 64
"""Logits per block when the largest are looked for."""
STRIDE = 256
"""Weights that are summed before one of them is looked for."""


def draw(logits: Tensor, params: SamplingParams, number: float) -> int:
    """The token that `number` points at on the line of all weights, laid end to end by token id.

    Args:
        logits: ``[vocabulary]``, fp32, on the CPU, the largest finite.
        number: from 0 to below 1.
    """
    ids: Ids | None = None
    if 0 < params.top_k < len(logits):
        ids = largest(logits, params.top_k)
        logits = logits[torch.from_numpy(ids)]
    weights: Weights = torch.softmax((logits - logits.max()) / max(params.temperature, COLDEST), -1).numpy()
    if params.min_p > 0:
        weights = np.where(weights >= np.float32(params.min_p) * weights.max(), weights, np.float32(0))
    if params.top_p < 1:
        weights = np.where(weights >= least_kept(weights, params.top_p), weights, np.float32(0))
    place = pick(weights, number)
    return place if ids is None else int(ids[place])


def largest(row: Tensor, count: int) -> Ids:
    """Ids of the `count` largest logits, and of those that equal the last of them, by rising id.

    The `count`-th largest of the blocks' maxima is no larger than the `count`-th largest logit: only blocks that reach
    it are looked into.
    """
    blocks = len(row) // BLOCK
    values: Weights = row.numpy()
    if 4 * count >= blocks:
        return np.flatnonzero(values >= _from_top(values, count))
    maxima = row[: blocks * BLOCK].view(blocks, BLOCK).amax(-1).numpy()
    reaching = np.flatnonzero(maxima >= _from_top(maxima, count))
    inside = (reaching[:, None] * BLOCK + np.arange(BLOCK)).ravel()
    ids = np.concatenate((inside, np.arange(blocks * BLOCK, len(row))))
    found = values[ids]
    return ids[found >= _from_top(found, count)]


def least_kept(weights: Weights, top_p: float) -> np.float32:
    """The smallest weight among the fewest largest ones that hold `top_p` of the sum.

    All weights up to ``(1 − top_p) × sum / number`` hold at most ``(1 − top_p) × sum`` together: they are not sorted.
    """
    total = float(weights.sum())
    floor = min((1 - top_p) * total / len(weights), float(weights.max()))
    heavy = weights[np.flatnonzero(weights >= floor)]
    falling = np.sort(heavy)[::-1]
    enough = np.searchsorted(np.cumsum(falling, dtype=np.float64), top_p * total)
    return np.float32(falling[min(int(enough), len(falling) - 1)])


def pick(weights: Weights, number: float) -> int:
    """The first place where the sum of the weights up to it exceeds ``number × sum``; never one without weight."""
    whole = len(weights) // STRIDE * STRIDE
    sums = np.append(weights[:whole].reshape(-1, STRIDE).sum(1), weights[whole:].sum())
    ends = np.cumsum(sums, dtype=np.float64)
    target = number * ends[-1]
    block = int(np.searchsorted(ends, target, side="right"))
    start = block * STRIDE
    inside = np.cumsum(weights[start : start + STRIDE], dtype=np.float64)
    place = int(np.searchsorted(inside, target - (ends[block - 1] if block else 0), side="right"))
    # A block's sum is rounded to fp32: beyond its last weight means at its last weight.
    return start + min(place, int(np.searchsorted(inside, inside[-1])))


def _from_top(values: Weights, count: int) -> np.float32:
    """The `count`-th largest."""
    return np.float32(np.partition(values, len(values) - count)[len(values) - count])
