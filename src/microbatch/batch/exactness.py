"""What a proof of exactness says: exact or not, by how much, and which module is to blame. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from microbatch.errors import InvalidModel
from microbatch.notebook import notebook_form

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}
"""Largest relative difference that counts as rounding, by the dtype that was computed in."""

FLOOR = 1e-4
"""Values are measured against the largest of their tensor, but never against less than this: what is left of a sum
that cancels is rounding, however small the sum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Culprit:
    """One place where a row's result depends on more than the row.

    Attributes:
        module: path of the module, as `named_modules` has it; the class of the model for the model's own code,
            "forward" and "loss" for the caller's functions.
        kind: batch_norm, batch_statistic, attention, pooling, top_k, capacity, mixing, shape, padding, packing, time,
            state, loss or gradient.
        difference: largest difference of its output, over the output's largest value; None where a piece did not run.
        remedy: what to do about it.
        evidence: what was seen.
        type: class of the module.
        mode: training or inference.
    """

    module: str
    kind: str
    difference: float | None
    remedy: str
    evidence: str = ""
    type: str = ""
    mode: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactnessReport:
    """Whether a batch in pieces gives what the whole batch gives.

    Attributes:
        exact: no difference above the tolerance, in any mode that was checked.
        largest_difference: of outputs and gradients, each over its tensor's largest value; None where no piece ran.
        culprits: the first module to blame first.
        modes: what was checked: training, inference or both.
        batch_size: items in the batch.
        splits: sizes of the pieces that were tried.
        dtype: what it was computed in.
        tolerance: what counts as rounding.
        notes: what a reader must know, one sentence each.
        parts: the report of each mode, where several were checked.
    """

    exact: bool
    largest_difference: float | None
    culprits: tuple[Culprit, ...] = ()
    modes: tuple[str, ...] = ()
    batch_size: int | None = None
    splits: tuple[tuple[int, ...], ...] = ()
    dtype: str = "fp64"
    tolerance: float = TOLERANCE["fp64"]
    notes: tuple[str, ...] = ()
    parts: tuple[ExactnessReport, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers; a difference that is no number is null."""
        document = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "parts"}
        document["largest_difference"] = _number(self.largest_difference)
        document["culprits"] = [_culprit_json(culprit) for culprit in self.culprits]
        document["modes"] = {part.modes[0]: _mode_json(part) for part in self.parts or (self,) if part.modes}
        for name in ("splits", "notes"):
            document[name] = [list(item) if isinstance(item, tuple) else item for item in document[name]]
        return document

    def _repr_html_(self) -> str | None:
        return notebook_form(self)


def joined(reports: Iterable[ExactnessReport]) -> ExactnessReport:
    """One report of several modes of one model: exact where all are; the culprits of the first mode first."""
    parts = tuple(reports)
    if len(parts) == 1:
        return parts[0]
    differences = [part.largest_difference for part in parts]
    known = [difference for difference in differences if difference is not None]
    loosest = max(parts, key=lambda part: part.tolerance)
    return ExactnessReport(
        exact=all(part.exact for part in parts),
        largest_difference=max(known) if known else None,
        culprits=tuple(culprit for part in parts for culprit in part.culprits),
        modes=tuple(mode for part in parts for mode in part.modes),
        batch_size=parts[0].batch_size,
        splits=parts[0].splits,
        dtype=loosest.dtype,
        tolerance=loosest.tolerance,
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
        parts=parts,
    )


def relative_difference(expected: Tensor, found: Tensor, scale: float | None = None) -> float:
    """Largest difference of two tensors of one shape over `scale`, by default the largest value expected.

    What is infinite or not a number in both at the same place agrees; in one only, the difference is infinite.
    The scale is never less than `FLOOR`.
    """
    return _gap(expected, found) / max(largest_value(expected) if scale is None else scale, FLOOR)


def largest_value(values: Tensor) -> float:
    """Largest finite absolute value; 0 of an empty tensor."""
    if values.numel() == 0:
        return 0.0
    wide = (values.detach().abs() if values.is_complex() else values.detach().double()).double().abs()
    return float(wide.masked_fill(~wide.isfinite(), 0.0).max())


def compare_gradients(
    full: Mapping[str, Tensor | None],
    split: Mapping[str, Tensor | None],
    *,
    tolerance: float = TOLERANCE["fp64"],
    batch_size: int | None = None,
    pieces: tuple[int, ...] = (),
    notes: tuple[str, ...] = (),
) -> ExactnessReport:
    """The gradients of one pass over the whole batch against those summed over its pieces, parameter by parameter.

    The measure is max|split - full| over the largest |full| of *all* parameters: a gradient that is zero but for
    rounding must not count. A parameter without a gradient (None) has one of zeros.

    Args:
        full: gradient by name of the parameter, of one pass.
        split: the same, from the pieces.
        tolerance: what counts as rounding.
        batch_size: items in the batch, for the report.
        pieces: sizes of the pieces, for the report.
        notes: sentences for the report.

    Raises:
        InvalidModel: the two do not hold the same parameters, or differ in a shape.
    """
    if unlike := sorted(set(full) ^ set(split)):
        raise InvalidModel(f"Only one of the two has a gradient named {unlike[0]}.", "Compare the same parameters.")
    scale = max((largest_value(gradient) for gradient in full.values() if gradient is not None), default=0.0) or FLOOR
    differences = {name: _gradient_gap(name, full[name], split[name]) / scale for name in full}
    culprits = tuple(
        Culprit(
            module=name.rpartition(".")[0] or name,
            kind="gradient",
            difference=difference,
            remedy="Run microbatch.check_independence on the model and its loss: it names what mixes the rows.",
            evidence=f"the gradient of {name} differs",
            mode="training",
        )
        for name, difference in differences.items()
        if difference > tolerance
    )
    return ExactnessReport(
        exact=not culprits,
        largest_difference=max(differences.values(), default=0.0),
        culprits=culprits,
        modes=("training",),
        batch_size=batch_size,
        splits=(pieces,) if pieces else (),
        tolerance=tolerance,
        notes=notes,
    )


def _gradient_gap(name: str, full: Tensor | None, split: Tensor | None) -> float:
    """Largest absolute difference; None stands for zeros."""
    if full is None or split is None:
        given = split if full is None else full
        return 0.0 if given is None else _gap(given, given.new_zeros(()).expand_as(given))
    if full.shape != split.shape:
        raise InvalidModel(
            f"The gradient of {name} has shape {tuple(full.shape)} and {tuple(split.shape)}.", "Compare one model."
        )
    return _gap(full, split)


def _gap(expected: Tensor, found: Tensor) -> float:
    """Largest absolute difference; 0 where both are infinite or not a number alike, infinite where one only is."""
    if expected.numel() == 0:
        return 0.0
    if expected.is_complex():
        return max(_gap(expected.real, found.real), _gap(expected.imag, found.imag))
    wide, other = expected.detach().double(), found.detach().double()
    same = (wide == other) | (wide.isnan() & other.isnan())
    gap = (wide - other).abs().masked_fill(same, 0.0)
    return float(gap.max()) if gap.isfinite().all() else math.inf


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _culprit_json(culprit: Culprit) -> dict[str, Any]:
    document = {field.name: getattr(culprit, field.name) for field in fields(culprit)}
    return document | {"difference": _number(culprit.difference)}


def _mode_json(part: ExactnessReport) -> dict[str, Any]:
    return {"exact": part.exact, "largest_difference": _number(part.largest_difference), "dtype": part.dtype}
