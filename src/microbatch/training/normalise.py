"""The one place that divides: sums over pieces by weights over pieces.

The loss of a batch is L = Σ_t S_t / W_t over its terms t, with S_t = Σ_p s_tp and W_t = Σ_p w_tp over its pieces p.
So its gradient is Σ_p Σ_t ∇s_tp / W_t: a sum over pieces, whatever the split. While W_t is unknown the pieces run
with a power of two in its place, which changes no bit of a gradient, and one multiplication at the end puts it right.

One multiplication cannot serve terms of different weights. Those need every W_t before the first backward: from
``weight(batch)`` where the user gives it, which costs nothing, else from a forward pass without gradients (a third more
time, no more memory; a gradient buffer and a backward pass for each term would take both). That terms differ is
noticed at the end of the first step that shows it, which is then done again with the weights that it has found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from microbatch.errors import InvalidLoss

Loss = Callable[[Any, Any], Any]
"""``loss(output, batch) -> (sum, weight)``, or a dict of such pairs; terms are named, a single pair is ``loss``."""

ONLY = "loss"
"""Name of the term of a loss that returns one pair."""

_EXAMPLE = (
    'Return the sum over the batch and what to divide it by, as in `return F.cross_entropy(output, batch["y"], '
    'reduction="sum"), batch["y"].numel()`, or a dict of such pairs.'
)


@dataclass(frozen=True, slots=True)
class Total:
    """One term over all pieces: Σ s and Σ w."""

    sum: float
    weight: float

    @property
    def loss(self) -> float:
        """Sum over weight; NaN without weight."""
        return self.sum / self.weight if self.weight else math.nan


@dataclass(frozen=True, slots=True)
class Pair:
    """One term of one piece: the sum with its graph, and its weight."""

    sum: Tensor
    weight: float


def pairs_of(result: object) -> dict[str, Pair]:
    """What the user's loss returned, checked.

    Raises:
        InvalidLoss: one number instead of a pair, a sum that is no scalar, a weight that is negative, not finite, or
            has a gradient.
    """
    named = result if isinstance(result, Mapping) else {ONLY: result}
    if not named:
        raise InvalidLoss("The loss returned an empty dict.", _EXAMPLE)
    return {str(name): _pair(str(name), value) for name, value in named.items()}


def _pair(name: str, value: Any) -> Pair:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        what = "one number" if isinstance(value, (Tensor, int, float)) else f"a {type(value).__name__}"
        where = "" if name == ONLY else f" for the term {name!r}"
        remedy = 'Make the step with joint="terms".' if what == "a JointTerm" else _EXAMPLE
        raise InvalidLoss(f"The loss returned {what}{where} instead of a sum and its weight.", remedy)
    total, weight = value
    _check_number("sum", total)
    if not isinstance(total, Tensor):
        total = torch.tensor(float(total))
    if total.numel() != 1:
        raise InvalidLoss(f"The loss's sum has shape {tuple(total.shape)}.", "Add it up: return losses.sum(), weight.")
    return Pair(total.reshape(()) if total.dim() else total, number_of(weight))


def _check_number(what: str, value: object) -> None:
    if not isinstance(value, (Tensor, Real)):
        raise InvalidLoss(f"The loss's {what} is {value!r}, no number.", _EXAMPLE)


def number_of(weight: Any) -> float:
    """A weight as a number, checked.

    Raises:
        InvalidLoss: it is none, negative, not finite, or has a gradient.
    """
    _check_number("weight", weight)
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise InvalidLoss(
                f"The loss's weight has shape {tuple(weight.shape)}.", "Add it up: return losses.sum(), mask.sum()."
            )
        if weight.requires_grad:
            raise InvalidLoss("The loss's weight has a gradient of its own.", "Return weight.detach().")
    number = float(weight)
    if not (math.isfinite(number) and number >= 0):
        raise InvalidLoss(f"The loss's weight is {number}.", "Weights are finite and not negative.")
    return number


class Tally:
    """Sums and weights of the pieces so far. Sums stay on their device until they are asked for."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor]] = {}
        self._weights: dict[str, list[float]] = {}

    def add(self, pairs: Mapping[str, Pair]) -> None:
        for name, pair in pairs.items():
            self._weights.setdefault(name, []).append(pair.weight)
            sums = self._sums.setdefault(name, [])
            if pair.weight:  # a mean over nothing times nothing is NaN and means nothing
                sums.append(pair.sum.detach())

    def totals(self) -> dict[str, Total]:
        """Per term; one wait for the device."""
        return {
            name: Total(math.fsum(_numbers(sums)), math.fsum(self._weights[name])) for name, sums in self._sums.items()
        }


def _numbers(sums: list[Tensor]) -> list[float]:
    numbers: list[float] = torch.stack([one.to(sums[0].device) for one in sums]).tolist() if sums else []
    return numbers


def power_of_two(weight: float) -> float:
    """The power of two nearest to a weight on a logarithmic scale; 1 for 0."""
    return 2.0 ** round(math.log2(weight)) if weight else 1.0


def common_weight(totals: Mapping[str, Total]) -> float | None:
    """The weight of every term when it is one; None when terms have different weights."""
    weights = {total.weight for total in totals.values()}
    return next(iter(weights)) if len(weights) == 1 else None


def loss_of(totals: Mapping[str, Total]) -> float:
    """Σ sum / weight over the terms that have a weight; NaN when none has."""
    losses = [total.loss for total in totals.values() if total.weight]
    return math.fsum(losses) if losses else math.nan


def check_weights(totals: Mapping[str, Total], weights: Mapping[str, float] | None) -> None:
    """The weights that the loss returned are those that its sums were divided by.

    Raises:
        InvalidLoss: they are not.
    """
    for name, total in totals.items():
        expected = total.weight if weights is None else weights.get(name, 0.0)
        if not math.isclose(total.weight, expected, rel_tol=1e-5):
            raise InvalidLoss(
                f"The weights of {name!r} add up to {total.weight:g}, but the sums were divided by {expected:g}.",
                "Make weight(batch) agree with the loss, and the loss return the same weights at each call.",
            )


def check_finite(totals: Mapping[str, Total]) -> None:
    """An update with such a loss would leave no weight a number.

    Raises:
        InvalidLoss: a loss is infinite or not a number.
    """
    for name, total in totals.items():
        if total.weight and not math.isfinite(total.sum):
            what = "The loss" if name == ONLY else f"The loss of the term {name!r}"
            raise InvalidLoss(
                f"{what} is {total.sum:g}; the weights were left as they are.",
                "Look at this batch, the learning rate and the dtype; catch this error to go on with the next batch.",
            )


def added_up(totals: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, Total]:
    """Sum and weight of each term over ranks, in their order."""
    parts: dict[str, list[Sequence[float]]] = {}
    for one in totals:
        for name, pair in one.items():
            parts.setdefault(name, []).append(pair)
    return {
        name: Total(math.fsum(pair[0] for pair in pairs), math.fsum(pair[1] for pair in pairs))
        for name, pairs in parts.items()
    }
