"""What a model carries from one piece to the next: outputs that depend on what ran before, and buffers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from microbatch.batch.exactness import Culprit, relative_difference
from microbatch.batch.naming import Comparison
from microbatch.batch.remedies import REMEDY
from microbatch.batch.rows import Rows, largest, leaves, match_all
from microbatch.batch.subject import Subject

SAME = Rows(1, 0, 1)


@dataclass(frozen=True, slots=True)
class Carried:
    """A piece that answers otherwise after other pieces; `difference` is None where it does not even run."""

    comparison: Comparison
    difference: float | None


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer that ends otherwise after the pieces than after the whole batch."""

    module: str
    name: str
    type: str
    difference: float

    def culprit(self, mode: str) -> Culprit:
        """As a report has it."""
        kind = "batch_norm" if "BatchNorm" in self.type else "state"
        return Culprit(
            module=self.module,
            kind=kind,
            difference=self.difference,
            remedy=REMEDY[kind],
            evidence=f"its buffer {self.name} is updated once for each piece",
            type=self.type,
            mode=mode,
        )


def check_state(
    subject: Subject, pieces: Sequence[tuple[Any, Sequence[Tensor]]], model: nn.Module, tolerance: float
) -> Carried | None:
    """Runs the pieces one after the other, and the first once more; each must answer as it does on a fresh copy.

    Args:
        pieces: with their outputs on a fresh copy.
        model: a fresh copy; it has run the pieces once when this returns, unless one was found.
    """
    before: list[Any] = []
    for piece, alone in pieces:
        found = _carried(subject, piece, alone, model, before, tolerance)
        if found is not None:
            return found
        before.append(piece)
    again = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    return _carried(subject, *pieces[0], again, before, tolerance)


def _carried(
    subject: Subject, piece: Any, alone: Sequence[Tensor], model: nn.Module, before: list[Any], tolerance: float
) -> Carried | None:
    comparison = Comparison(piece, piece, SAME, tuple(before))
    try:
        after = subject.outputs(piece, model)
    except Exception:
        return Carried(comparison, None)
    difference = _difference(alone, after)
    return Carried(comparison, difference) if difference > tolerance else None


def kept_by(subject: Subject, comparison: Comparison, path: str) -> list[str]:
    """Attributes of a module that earlier pieces have changed; nothing for state outside modules."""
    used, unused = subject.fresh(), subject.fresh()
    if path not in dict(used.named_modules()):
        return []
    for earlier in comparison.before or (comparison.piece,):
        subject.run(earlier, used)
    own, other = (dict(vars(m.get_submodule(path))) | dict(m.get_submodule(path)._buffers) for m in (used, unused))
    return [name for name, value in own.items() if not name.startswith("_") and _is_changed(value, other.get(name))]


def _is_changed(value: object, before: object) -> bool:
    tensors, earlier = list(leaves(value)), list(leaves(before))
    if tensors or earlier:
        alike = len(tensors) == len(earlier) and all(map(torch.equal, tensors, earlier))
        return not alike
    return isinstance(value, bool | int | float | str | list | tuple | dict | None) and value != before


def buffers_apart(subject: Subject, batch: Any, parts: nn.Module, tolerance: float) -> list[Buffer]:
    """Floating-point buffers that the whole batch and its pieces leave different. Counters of calls do no harm.

    Args:
        parts: a copy that has run the pieces.
    """
    theirs = dict(parts.named_buffers())
    if not any(buffer.is_floating_point() for buffer in theirs.values()):
        return []
    whole, found = subject.fresh(), []
    subject.run(batch, whole)
    for name, buffer in whole.named_buffers():
        other = theirs.get(name)
        if other is None or other.shape != buffer.shape or not buffer.is_floating_point():
            continue
        difference = relative_difference(buffer, other)
        if difference > tolerance:
            path, _, own = name.rpartition(".")
            found.append(Buffer(path or type(whole).__name__, own, _type(whole, path), difference))
    return found


def _type(model: nn.Module, path: str) -> str:
    return type(model.get_submodule(path)).__name__


def _difference(alone: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    matches = match_all(alone, after, SAME)
    if any(match.difference is None for match in matches):
        return float("inf")
    return largest(matches, whole_numbers=True) or 0.0
