"""Whether the gradients of the pieces add up to those of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from microbatch.batch.exactness import FLOOR, ExactnessReport, compare_gradients
from microbatch.batch.example import tensors_in
from microbatch.batch.subject import Subject
from microbatch.errors import InvalidLoss

Loss = Callable[[Any, Any], Any]
"""``loss(output, batch) -> (sum, weight)``, or a dict of such pairs."""

Totals = dict[str, tuple[float, float]]
"""Sum and weight by term."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """What was found.

    Attributes:
        report: gradients of the whole batch against those of the pieces.
        sums: largest relative difference of the loss's sums and weights; 0 without a loss of the caller's.
    """

    report: ExactnessReport
    sums: float


def check_gradients(
    subject: Subject, batch: Any, pieces: Sequence[Any], loss: Loss | None, has_rows: Sequence[bool], tolerance: float
) -> Gradients | None:
    """Gradients of Σ_t S_t/W_t, each term's sum S and weight W over the whole batch; None where nothing is trained.

    Args:
        loss: None for the sum of the squares of every output that has rows.
        has_rows: for each tensor of the output.

    Raises:
        InvalidLoss: the loss returned no pairs.
    """
    names = [name for name, parameter in subject.model.named_parameters() if parameter.requires_grad]
    if not names:
        return None
    weights = (
        {} if loss is None else {n: w for n, (_, w) in _gradients(subject, [batch], loss, has_rows, {})[1].items()}
    )
    full, whole = _gradients(subject, [batch], loss, has_rows, weights)
    split, parts = _gradients(subject, pieces, loss, has_rows, weights)
    if not any(gradient is not None for gradient in full.values()):
        return None
    report = compare_gradients(full, split, tolerance=tolerance)
    return Gradients(report, _apart(whole, parts) if loss is not None else 0.0)


def _gradients(
    subject: Subject,
    pieces: Sequence[Any],
    loss: Loss | None,
    has_rows: Sequence[bool],
    weights: Mapping[str, float],
) -> tuple[dict[str, Tensor | None], Totals]:
    """Gradient by parameter, and sum and weight by term, both over all pieces.

    Args:
        weights: what each term is divided by; nothing where it is not known yet.
    """
    totals: Totals = {}

    def total(output: Any, batch: Any) -> Tensor | None:
        pairs = _pairs(output, batch, loss, has_rows)
        for name, (value, weight) in pairs.items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = before[0] + (float(value.detach()) if weight else 0.0), before[1] + weight
        terms = [value / (weights.get(name) or 1.0) for name, (value, weight) in pairs.items() if weight]
        return torch.stack(terms).sum() if terms else None

    parameters = {name: p for name, p in subject.model.named_parameters() if p.requires_grad}
    for piece in pieces:
        subject.differentiate(piece, total)
    found = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    return found, totals


def _pairs(output: Any, batch: Any, loss: Loss | None, has_rows: Sequence[bool]) -> dict[str, tuple[Tensor, float]]:
    """Each term's sum with its graph, and its weight."""
    if loss is None:
        return {"loss": (_squares(output, has_rows), 1.0)}
    result = loss(output, batch)
    named = result if isinstance(result, Mapping) else {"loss": result}
    return {str(name): _pair(value) for name, value in named.items()}


def _squares(output: Any, has_rows: Sequence[bool]) -> Tensor:
    trained = [
        tensor
        for tensor, rows in zip(tensors_in(output), has_rows, strict=False)
        if rows and tensor.is_floating_point() and tensor.requires_grad
    ]
    return torch.stack([tensor.square().sum() for tensor in trained]).sum() if trained else torch.zeros(())


def _pair(value: Any) -> tuple[Tensor, float]:
    if not (isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[0], Tensor)):
        raise InvalidLoss(
            f"The loss returned a {type(value).__name__} instead of a sum and its weight.",
            "Return the sum over the rows and what to divide it by: return losses.sum(), losses.numel().",
        )
    return value[0].reshape(()), float(value[1])


def _apart(whole: Totals, parts: Totals) -> float:
    """Largest relative difference of a sum or a weight."""
    return max(
        (
            abs(one - other) / max(abs(one), FLOOR)
            for name in whole.keys() | parts.keys()
            for one, other in zip(whole.get(name, (0.0, 0.0)), parts.get(name, (0.0, 0.0)), strict=True)
        ),
        default=0.0,
    )
