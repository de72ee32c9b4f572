"""Does the loss depend on padding? Shown on a few items before pieces are trimmed: with it and without.

A mean over all columns, or a sum that padded positions take part in, is another number without them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from microbatch.batch.exactness import FLOOR, TOLERANCE
from microbatch.batch.lengths import trimmed
from microbatch.batch.oom import drop_frames, is_out_of_memory
from microbatch.batch.running import device_of
from microbatch.batch.split import take, to_device
from microbatch.batch.token_budget import TokenBudget, longest_first
from microbatch.training.normalise import Pair
from microbatch.training.passes import Passes
from microbatch.training.ranks.one_process import Ranks

logger = logging.getLogger(__name__)

SHOWN_ON = 4
"""Items, from the shortest on: one alone may hold the same token as its padding."""

_NAMES = {torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}


def can_show(model: nn.Module, ranks: Ranks, *, joint: bool) -> bool:
    """Whether a few items can show it.

    Padding stays, unless ``trim=True``, where ranks go through every layer together, since one cannot run a few items
    by itself; where a batch norm counts padding too; and where the loss lays the outputs of all pieces side by side.
    """
    return ranks.retries_alone and not joint and not any(isinstance(m, _BatchNorm) for m in model.modules())


def trimming_is_exact(passes: Passes, batch: Any, lengths: Sequence[int], budget: TokenBudget) -> bool | None:
    """Whether loss and weight of a few items, each alone, are the same without its padding.

    The model runs in evaluation mode without gradients; buffers and random state are the caller's to put back.

    Returns:
        None where these items tell nothing: they have no padding, or no weight.
    """
    ascending = longest_first(lengths)[::-1]
    exact = None
    for place in sorted({ascending[len(lengths) * part // SHOWN_ON] for part in range(SHOWN_ON)}):
        item = take(batch, range(place, place + 1), list_of_samples=passes.list_of_samples)
        short = trimmed(item, budget.length)
        found = None if short is item else _compared(passes, item, short)
        if found is not None and any(pair.weight for pair in found[0].values()):
            exact = _judged(*found, passes.autocast)
            if not exact:
                break
    return exact


def _judged(whole: dict[str, Pair], less: dict[str, Pair], autocast: torch.dtype | None) -> bool:
    exact = whole.keys() == less.keys() and all(_same(whole[name], less[name], autocast) for name in whole)
    if not exact:
        logger.warning(
            "The loss depends on padding: pieces keep all columns of the batch, and short items save no work. "
            "Leave padding out of the loss; TokenBudget(..., trim=True) trims nevertheless."
        )
    return exact


def _compared(passes: Passes, piece: Any, short: Any) -> tuple[dict[str, Pair], dict[str, Pair]] | None:
    """The loss of both; None where memory does not suffice for that."""
    flags = [(module, module.training) for module in passes.model.modules()]
    try:
        passes.model.eval()
        with torch.no_grad():
            return _pairs(passes, piece), _pairs(passes, short)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        drop_frames(error)
    finally:
        for module, training in flags:
            module.training = training
    return None


def _pairs(passes: Passes, piece: Any) -> dict[str, Pair]:
    with passes.ranks.piece(0, 2):
        return passes.pairs(to_device(piece, device_of(passes.model)))


def _same(one: Pair, other: Pair, autocast: torch.dtype | None) -> bool:
    tolerance = TOLERANCE[_NAMES.get(autocast or one.sum.dtype, "fp32")]
    return one.weight == other.weight and _close(one.sum, other.sum, tolerance)


def _close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    scale = max(abs(float(one)), abs(float(other)), FLOOR)
    return abs(float(one) - float(other)) <= tolerance * scale
