"""Which module first made a piece's rows differ, by comparing two trees of calls."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from microbatch.batch.rows import Rows, largest, match_all
from microbatch.batch.trace import FORWARD, Call


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator by name ("" when unknown), and whether its result still has rows."""

    name: str
    has_rows: bool


@dataclass(frozen=True, slots=True)
class Suspect:
    """A call whose inputs agree and whose outputs do not, where no call inside it is such a one.

    Attributes:
        call: in the whole batch's run.
        difference: of its outputs; None where the piece raised in it or its outputs cannot be laid side by side.
        raised: the piece did not come through it.
        path: classes of the modules around it, outermost first, then its own.
    """

    call: Call
    difference: float | None
    raised: bool
    path: tuple[nn.Module, ...]


def suspects(full: Call, part: Call, rows: Rows, tolerance: float, path: tuple[nn.Module, ...] = ()) -> list[Suspect]:
    """Every such call below two calls of one module that got the same and gave something else.

    Args:
        full, part: one module in the run of the whole batch and of a piece.
    """
    path = (*path, *_own(full))
    found = [
        suspect
        for one, other in pairs(full, part)
        if _agree(one.inputs, other.inputs, rows, tolerance) and _differs(one, other, rows, tolerance)
        for suspect in suspects(one, other, rows, tolerance, path)
    ]
    if found:
        return found
    difference = None if part.outputs is None else _difference(full, part, rows)
    return [Suspect(full, difference, part.outputs is None, path)]


def _own(call: Call) -> tuple[nn.Module, ...]:
    return () if call.module is None else (call.module,)


def between(full: Call, part: Call, rows: Rows, tolerance: float, path: tuple[nn.Module, ...] = ()) -> list[Suspect]:
    """Every innermost call that got the same and gave something else, also where the calls around it agree."""
    path = (*path, *_own(full))
    found = []
    for one, other in pairs(full, part):
        inside = between(one, other, rows, tolerance, path)
        found += inside
        if not inside and _agree(one.inputs, other.inputs, rows, tolerance) and _differs(one, other, rows, tolerance):
            found.append(Suspect(one, _difference(one, other, rows), other.outputs is None, (*path, *_own(one))))
    return found


def pairs(full: Call, part: Call) -> Iterator[tuple[Call, Call]]:
    """Calls of one module in both runs: the n-th with the n-th."""
    seen: dict[str, int] = {}
    theirs: dict[tuple[str, int], Call] = {}
    for call in full.calls:
        seen[call.name] = seen.get(call.name, -1) + 1
        theirs[call.name, seen[call.name]] = call
    seen.clear()
    for call in part.calls:
        seen[call.name] = seen.get(call.name, -1) + 1
        if (other := theirs.get((call.name, seen[call.name]))) is not None:
            yield other, call


def first_operator(full: Call, part: Call, rows: Rows, tolerance: float) -> Operator:
    """The first operator of a call whose result differs; one without a name where the operators do not tell."""
    for (name, results), (other, others) in zip(full.operators, part.operators, strict=False):
        if name != other:
            break
        matches = match_all(results, others, rows)
        found = largest(matches, whole_numbers=bool(_CHOOSES.search(name)))
        if found is not None and found > tolerance:
            return Operator(name, any(m.has_rows for m in matches))
    return Operator("", has_rows=True)


def _agree(full: tuple[Tensor, ...], part: tuple[Tensor, ...], rows: Rows, tolerance: float) -> bool:
    matches = [m for m in match_all(full, part, rows) if m.is_floating or not m.is_alike]
    return all(m.difference is not None and m.difference <= tolerance for m in matches)


def _difference(full: Call, part: Call, rows: Rows) -> float | None:
    return largest(match_all(full.outputs or (), part.outputs or (), rows), whole_numbers=False)


def _differs(full: Call, part: Call, rows: Rows, tolerance: float) -> bool:
    if part.outputs is None:
        return True
    matches = match_all(full.outputs or (), part.outputs, rows)
    found = largest(matches, whole_numbers=False)
    if found is not None:
        return found > tolerance
    # Who goes to which expert cannot be laid side by side, but a limit is told.
    return limited(full.module) or not all(m.is_alike for m in matches)


def limited(module: nn.Module | None) -> bool:
    """Whether a module has room for so many rows only."""
    return any("capacity" in name and value is not None for name, value in vars(module or object).items())


def kind_of(suspect: Suspect, operator: Operator) -> str:
    """What sort of dependence it is: by the module's class, else by the first operator that differs."""
    module = suspect.call.module
    if is_known(module) or "batch_norm" in operator.name:
        return "batch_norm"
    if isinstance(module, nn.RNNBase) and not module.batch_first:
        return "time"
    if any(limited(m) for m in suspect.path[-2:]) or (_ROUTES.search(operator.name) and _is_moe(suspect)):
        return "capacity"
    if suspect.raised or suspect.difference is None:
        return "shape"
    if isinstance(module, nn.MultiheadAttention):
        return "attention"
    found = next((kind for pattern, kind in _OPERATORS if re.search(pattern, operator.name)), "mixing")
    # A product that has lost the rows, as a covariance, is a sum over them.
    return "batch_statistic" if found == "attention" and not operator.has_rows else found


def is_known(module: nn.Module | None) -> bool:
    """Whether the class alone says what a module does across the batch."""
    return isinstance(module, _BatchNorm) or "BatchNorm" in type(module).__name__


def _is_moe(suspect: Suspect) -> bool:
    names = [suspect.call.name, *(type(module).__name__ for module in suspect.path)]
    return any(re.search(r"expert|moe|router", name, re.IGNORECASE) for name in names)


_CHOOSES = re.compile(r"topk|sort|kthvalue|^arg|unique|searchsorted|nonzero")
"""Operators whose result is a choice of rows, told by whole numbers."""

_ROUTES = re.compile(r"topk|sort|cumsum|bincount|scatter|nonzero|index")

_OPERATORS = (
    (r"^cum|roll|flip", "mixing"),
    (r"softmax|attention|logsumexp|^b?mm$|baddbmm|addmm", "attention"),
    (r"topk|sort|kthvalue|unique|searchsorted|argmax|argmin", "top_k"),
    (r"^a?max|^a?min|median|mode|pool", "pooling"),
    (r"mean|var|std|sum|norm|prod|quantile|aminmax|bincount|histc", "batch_statistic"),
)
"""Kinds by the name of the first operator that differs, the first pattern that fits."""


def name_of(call: Call, model: nn.Module) -> str:
    """The path of the module; the model's class for the model itself."""
    return FORWARD if call.module is None else call.name or type(model).__name__
