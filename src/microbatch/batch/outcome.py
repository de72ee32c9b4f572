"""What came of a piece, and outputs that have no rows but add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from microbatch.batch.exactness import relative_difference
from microbatch.batch.rows import Match, Rows


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece that was run.

    Attributes:
        batch: the piece.
        rows: which of the batch's.
        outputs: every tensor of the output; None where the piece raised.
        matches: each of them against the whole batch's.
    """

    batch: Any
    rows: Rows
    outputs: tuple[Tensor, ...] | None
    matches: list[Match]


def additive(full: Sequence[Tensor], tried: Sequence[Sequence[Piece]], tolerance: float) -> dict[int, float]:
    """Outputs without rows whose pieces add up to the whole, or whose mean over rows is the whole.

    Args:
        full: outputs of the whole batch.
        tried: the pieces of each cut; cuts that were not run whole do not count.

    Returns:
        by place in the output, how far they are from adding up.
    """
    cuts = [pieces for pieces in tried if _is_whole(pieces, len(full))]
    found = {}
    for place, whole in enumerate(full):
        matches = [piece.matches[place] for pieces in cuts for piece in pieces]
        if any(m.has_rows for m in matches) or all((m.difference or 0.0) <= tolerance for m in matches):
            continue
        apart = min(max(_apart(whole, place, pieces, is_mean=mean) for pieces in cuts) for mean in (False, True))
        if apart <= tolerance:
            found[place] = apart
    return found


def _is_whole(pieces: Sequence[Piece], outputs: int) -> bool:
    ran = all(piece.outputs is not None and len(piece.outputs) == outputs == len(piece.matches) for piece in pieces)
    return ran and sum(piece.rows.count for piece in pieces) == pieces[0].rows.whole


def _apart(full: Tensor, place: int, pieces: Sequence[Piece], *, is_mean: bool) -> float:
    parts = [
        piece.outputs[place] * (piece.rows.count / piece.rows.whole if is_mean else 1)
        for piece in pieces
        if piece.outputs is not None
    ]
    return relative_difference(full, torch.stack(parts).sum(0))
