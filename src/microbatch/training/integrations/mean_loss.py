"""A loss that a model has divided already, read back as a sum and its weight; and the proof that it was read rightly.

Hugging Face models return one number. Some divide their sum by ``num_items_in_batch`` where they are given it, some
take a mean over their labels whatever they are given, some over the items; their signatures do not tell which. So the
number is taken on trial: a loss L read with weight w is the sum L·w, and sums of two pieces add up to the sum of both
together. A reading under which they do not is wrong, and when none is right the loss is no mean of its items at all
(a balancing term, a loss between the items of a batch), which no accumulation of pieces can give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from microbatch.batch.oom import drop_frames, is_out_of_memory
from microbatch.batch.split import batch_size_of
from microbatch.errors import InvalidLoss

IGNORED = -100
"""The label that losses leave out, in torch as in transformers."""

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Of sums relative to their size."""
NARROW_TOLERANCE = 2e-2
"""The same of losses that are computed in bf16 or fp16, of which one is off by up to 1 in 2^8."""

Number = Callable[[nn.Module, Any, int], Tensor]
"""``number(model, piece, divisor)``: what the model returns as its loss when it is told to divide by `divisor`."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How the number is read.

    Attributes:
        weight: of a piece: its labels, or its items.
        is_sum: whether the model divides by what it is told, so that told 1 it returns the sum.
        proved: whether sums were seen to add up.
    """

    weight: Callable[[Any], Any]
    is_sum: bool = False
    proved: bool = False

    def pair(self, number: Tensor, piece: Any) -> tuple[Tensor, Any]:
        """Sum and weight of a piece whose number is given."""
        weight = self.weight(piece)
        return (number if self.is_sum else number * weight), weight


def read(number: Number, model: nn.Module, batch: Any, *, shifted: bool, known: Reading | None = None) -> Reading:
    """The reading under which sums add up; the likeliest, unproved, where the batch cannot tell.

    Args:
        number: see `Number`; called without gradients, the model in evaluation mode.
        model: on its device.
        batch: of which the items with the fewest and the most labels are tried.
        shifted: whether the loss is known to predict each label from those before it, so that the first is none.
        known: an unproved reading from earlier batches; kept where this one cannot tell either.

    Raises:
        InvalidLoss: there is none.
    """
    pieces = _trial(batch)
    whole = pieces[-1]
    candidates = list(_readings(whole, shifted=shifted))
    telling = len(pieces) == 3 and not _same_shares(candidates, pieces)
    if known is not None and not telling:
        return known
    numbers = _numbers(number, model, pieces)
    if numbers is None:
        return candidates[0]
    (*alone, once, halved), tolerance = numbers
    if math.isclose(once, 2 * halved, rel_tol=tolerance):
        candidates = [replace(candidates[0], is_sum=True)]
    if len(pieces) < 3 or not math.isfinite(once) or once == 0.0:
        return candidates[0]
    for reading in candidates:
        *parts, total = (_sum(reading, n, piece) for n, piece in zip((*alone, once), pieces, strict=True))
        if abs(sum(parts) - total) <= tolerance * max(abs(part) for part in [*parts, total]):
            return replace(reading, proved=telling or reading.is_sum)
    raise InvalidLoss(
        f"The model's loss is no mean: two items alone give {alone[0]:.6g} and {alone[1]:.6g}, both together "
        f"{once:.6g}, which fits neither a mean of labels nor one of items.",
        "Give loss=, which returns sums and weights of an output and its batch, or leave out the term that depends on "
        "the whole batch.",
    )


def _numbers(number: Number, model: nn.Module, pieces: Sequence[Any]) -> tuple[list[float], float] | None:
    """Of each piece, and of the last told to divide by 2; and what they may be off by. None where memory ends."""
    try:
        with _quiet(model):
            told = [number(model, piece, 1) for piece in pieces]
            told.append(number(model, pieces[-1], 2))
            return [float(value) for value in told], TOLERANCE.get(told[-1].dtype, NARROW_TOLERANCE)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        drop_frames(error)
    return None


def _readings(piece: Any, *, shifted: bool) -> Iterator[Reading]:
    """How a number can be read, the likeliest first."""
    labels = _labels(piece)
    if labels is not None:
        for first in ((1, 0) if shifted else (0, 1)) if labels.dim() > 1 else (0,):
            yield Reading(partial(_count, first))
    yield Reading(batch_size_of)


def _labels(piece: Any) -> Tensor | None:
    labels = piece.get("labels") if isinstance(piece, Mapping) else None
    return labels if isinstance(labels, Tensor) and labels.dim() else None


def _count(first: int, piece: Any) -> Any:
    """Labels that are not ignored, from a position in each sequence on."""
    labels = piece["labels"]
    return (labels[..., first:] if first else labels).ne(IGNORED).sum()


def _trial(batch: Any) -> tuple[Any, ...]:
    """The item with the fewest labels, that with the most, and both together; one item where there is no other."""
    labels, number = _labels(batch), batch_size_of(batch)
    counts = [1] * number if labels is None else labels.ne(IGNORED).reshape(number, -1).sum(1).tolist()
    order = sorted((row for row in range(number) if counts[row]), key=counts.__getitem__) or [0]
    fewest, most = order[0], order[-1]
    if fewest == most:
        return (_items(batch, [fewest], number),)
    return tuple(_items(batch, rows, number) for rows in ([fewest], [most], [fewest, most]))


def _items(batch: Any, rows: list[int], number: int) -> Any:
    if isinstance(batch, Mapping):
        return {name: _items(value, rows, number) for name, value in batch.items()}
    if isinstance(batch, Tensor):
        return batch[rows] if batch.dim() and len(batch) == number else batch
    return [batch[row] for row in rows] if isinstance(batch, list) and len(batch) == number else batch


def _same_shares(candidates: Sequence[Reading], pieces: Sequence[Any]) -> bool:
    """Whether all weigh the pieces alike, so that it makes no difference which one is right."""
    shares = [float(reading.weight(pieces[0])) / (float(reading.weight(pieces[2])) or 1.0) for reading in candidates]
    return max(shares) - min(shares) < 1e-9


def _sum(reading: Reading, number: float, piece: Any) -> float:
    total, weight = reading.pair(torch.tensor(number, dtype=torch.float64), piece)
    return float(total) if float(weight) else 0.0


@contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """No gradients and no dropout; each module's mode as before afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
