"""Does an item get the same answer alone and in a batch? Asked once, when a server starts."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from microbatch.batch.exactness import FLOOR, TOLERANCE, Culprit, ExactnessReport
from microbatch.errors import InvalidModel

logger = logging.getLogger(__name__)

Run = Callable[[list[Any]], Sequence[Any]]
Explain = Callable[[list[Any]], ExactnessReport]
"""Names the modules that mix the items of a batch."""


def check_same_answer(run: Run, examples: Sequence[Any], *, explain: Explain | None, strict: bool) -> ExactnessReport:
    """Runs the first example alone, and among the others at the start and at the end of a batch.

    Args:
        run: a list of items to a list of results.
        examples: two or more, different from each other.
        explain: looks for the cause, where there is one to look into.
        strict: raise rather than warn.

    Raises:
        InvalidModel: the answers differ by more than rounding; with the cause as far as it can be told.
    """
    first, *others = examples
    alone = run([first])[0]
    kind, tolerance = _tolerance(alone)
    tried = {
        "time": run([first])[0],
        "mixing": run([first, *others])[0],
        "position": run([*others, first])[-1],
    }
    differences = {name: difference(alone, answer) for name, answer in tried.items()}
    largest = max(differences.values())
    report = ExactnessReport(
        exact=largest <= tolerance,
        largest_difference=largest,
        modes=("inference",),
        batch_size=len(examples),
        splits=((1,) * len(examples),),
        dtype=kind,
        tolerance=tolerance,
    )
    if report.exact:
        return report
    if differences["time"] > tolerance:
        culprit = _culprit("state", largest, "The same item alone gets another answer the second time.")
        report = replace(report, culprits=(culprit,))
    elif explain is not None:
        report = _explained(report, explain, list(examples))
    return _told(report, strict)


def difference(expected: Any, found: Any) -> float:
    """Largest difference of two results over the largest number expected; infinite where they differ in form."""
    mine, other = list(_leaves(expected)), list(_leaves(found))
    if len(mine) != len(other):
        return math.inf
    return max((_leaf_difference(one, two) for one, two in zip(mine, other)), default=0.0)


def _leaf_difference(expected: Any, found: Any) -> float:
    if not isinstance(expected, np.ndarray) or not isinstance(found, np.ndarray):
        same = type(expected) is type(found) and expected == found
        return 0.0 if same else math.inf
    if expected.shape != found.shape:
        return math.inf
    same = (expected == found) | (np.isnan(expected) & np.isnan(found))
    if same.all():
        return 0.0
    gap = np.abs(expected - found)[~same].max()
    finite = np.abs(expected[np.isfinite(expected)])
    return float(gap) / max(float(finite.max()) if finite.size else 0.0, FLOOR) if math.isfinite(gap) else math.inf


def _leaves(value: Any) -> Iterator[Any]:
    """Arrays of numbers, and whatever else a result holds."""
    if hasattr(value, "detach"):
        yield value.detach().cpu().double().numpy()
    elif isinstance(value, np.ndarray | np.generic) and np.issubdtype(value.dtype, np.number):
        yield np.asarray(value, dtype=np.float64)
    elif isinstance(value, bool | str | bytes) or value is None:
        yield value
    elif isinstance(value, int | float):
        yield np.asarray(value, dtype=np.float64)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        yield from _leaves_of_sequence(value)
    else:
        yield value


def _leaves_of_sequence(value: Sequence[Any]) -> Iterator[Any]:
    if value and all(isinstance(item, int | float) and not isinstance(item, bool) for item in value):
        yield np.asarray(value, dtype=np.float64)  # one scale for a vector, as for a tensor
        return
    for item in value:
        yield from _leaves(item)


def _tolerance(result: Any) -> tuple[str, float]:
    """What counts as rounding: by the coarsest dtype in the result, float32 where it does not tell."""
    names = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float64": "fp64", "float64": "fp64"}
    found = {names.get(str(getattr(leaf, "dtype", "")), "fp32") for leaf in _raw(result)} or {"fp32"}
    kind = max(found, key=lambda name: TOLERANCE[name])
    return kind, TOLERANCE[kind]


def _raw(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _raw(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _raw(item)
    else:
        yield value


def _culprit(kind: str, gap: float, evidence: str) -> Culprit:
    remedy = "Seed or switch off what is random (dropout: call .eval()), and keep no state between calls."
    return Culprit(module="function", kind=kind, difference=gap, remedy=remedy, evidence=evidence, mode="inference")


def _explained(report: ExactnessReport, explain: Explain, examples: list[Any]) -> ExactnessReport:
    try:
        found = explain(examples)
    except Exception as error:  # the search for the cause must not hide that there is one
        return replace(report, notes=(f"The cause was not found: {type(error).__name__}: {error}",))
    return replace(report, culprits=found.culprits, notes=found.notes)


def _told(report: ExactnessReport, strict: bool) -> ExactnessReport:
    gap = report.largest_difference
    shown = "in its form" if gap is None or not math.isfinite(gap) else f"by {gap:.2g} of its largest value"
    causes = "; ".join(
        f"{each.module} ({each.kind}{': ' + each.evidence if each.evidence else ''})" for each in report.culprits
    )
    message = f"An item gets another answer in a batch of {report.batch_size} than alone: it differs {shown}."
    message += f" Cause: {causes}." if causes else " Cause: unknown."
    remedy = (
        report.culprits[0].remedy
        if report.culprits
        else ("Make each result depend on its own item only (a mask for padding), or accept it with check='warn'.")
    )
    if strict:
        raise InvalidModel(message, remedy)
    logger.warning("%s %s", message, remedy)
    return report


def mates_of(example: Any, count: int = 3) -> list[Any]:
    """Items like an example that differ from it: tensors and arrays with their numbers in another order."""
    generator = np.random.default_rng(0)
    return [_shuffled(example, generator) for _ in range(count)]


def _shuffled(value: Any, generator: np.random.Generator) -> Any:
    if hasattr(value, "detach"):
        order = generator.permutation(value.numel())
        return value.reshape(-1)[order.tolist()].reshape(value.shape) if value.numel() else value
    if isinstance(value, np.ndarray):
        return generator.permutation(value.reshape(-1)).reshape(value.shape)
    if isinstance(value, Mapping):
        return {key: _shuffled(item, generator) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_shuffled(item, generator) for item in value)
    if isinstance(value, list) and all(isinstance(item, int | float) for item in value):
        return generator.permutation(value).tolist()
    return value
