"""From "the pieces differ" to the modules that make them differ, the first in the order of execution first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from microbatch.batch.blame import (
    Operator,
    Suspect,
    between,
    first_operator,
    is_known,
    kind_of,
    name_of,
    suspects,
)
from microbatch.batch.exactness import Culprit
from microbatch.batch.remedies import REMEDY
from microbatch.batch.rows import Rows, largest, match_all
from microbatch.batch.subject import Subject
from microbatch.batch.trace import Call, Tracer

ROUNDS = 8
"""Different sorts of culprits that are looked for in one model."""

UNKNOWN = Operator("", has_rows=True)

Outputs = dict[tuple[str, int], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A whole batch and one piece whose rows should be the same.

    Attributes:
        before: batches that run first on the same copy before the piece does, to see what they leave behind.
    """

    whole: Any
    piece: Any
    rows: Rows
    before: tuple[Any, ...] = ()


def name_culprits(
    subject: Subject, comparison: Comparison, tolerance: float, *, kind: str | None, mode: str
) -> list[Culprit]:
    """Every module that is to blame, in the order of execution.

    Round by round: what is found is given the whole batch's outputs, so that what comes after it is seen with inputs
    that agree. Where several classes are found, each is repaired alone: one that changes nothing at the end is no
    cause, as a meter that nobody reads.

    Args:
        kind: of every culprit, where the comparison alone says it; None to tell by module and operators.
    """
    full = _traced(subject, comparison.whole, None).root
    whole = {(c.name, c.turn): c.outputs for c in _every(full) if c.outputs is not None and c.module is not None}
    given: Outputs = {}
    found: dict[str, Suspect] = {}
    ends: list[float | None] = []
    for _ in range(ROUNDS):
        part = _traced(subject, comparison, given).root
        ends.append(_end(full, part, comparison.rows))
        if ends[-1] is not None and ends[-1] <= tolerance:
            break
        fresh = [s for s in suspects(full, part, comparison.rows, tolerance) if s.call.name not in found]
        if not fresh:
            break
        found |= {s.call.name: s for s in reversed(fresh)}
        given |= _of_class(full, fresh, whole)
    repair = _Repair(subject, comparison, full, whole, ends[0])
    hidden = [s for s in between(full, part, comparison.rows, tolerance) if s.call.name not in found]
    sure = {type(s.call.module) for s in found.values()}
    found |= {s.call.name: s for s in hidden if type(s.call.module) in sure or repair.changes([s])}
    order = {call.name: place for place, call in enumerate(_every(full))}
    guilty = _without_innocent(repair, list(found.values()))
    operators: dict[type, Operator] = {}
    for s in (chosen := sorted(guilty, key=lambda s: order[s.call.name])):
        own = type(s.call.module)
        if own not in operators:  # two more runs: once for each class
            operators[own] = UNKNOWN if is_known(s.call.module) else _operator(subject, comparison, s, given, tolerance)
    return [_culprit(subject, s, operators[type(s.call.module)], kind, mode) for s in chosen]


@dataclass(frozen=True, slots=True)
class _Repair:
    """One run of the piece with the whole batch's outputs in place of some modules' own; `end` without any."""

    subject: Subject
    comparison: Comparison
    full: Call
    whole: Outputs
    end: float | None

    def changes(self, group: Sequence[Suspect]) -> bool | None:
        """Whether the outputs come closer or move away; None where that cannot be told."""
        tracer = _traced(self.subject, self.comparison, _of_class(self.full, group, self.whole))
        if not tracer.replaced or self.end is None or tracer.root.outputs is None:
            return None
        return _end(self.full, tracer.root, self.comparison.rows) != self.end


def _without_innocent(repair: _Repair, found: list[Suspect]) -> list[Suspect]:
    """Those whose repair alone changes the end; all where that cannot be told."""
    classes = {type(s.call.module) for s in found}
    if len(classes) < 2:
        return found
    groups = [[s for s in found if type(s.call.module) is own] for own in classes]
    kept = [s for group in groups if repair.changes(group) is not False for s in group]
    return kept or found


def _of_class(full: Call, fresh: Sequence[Suspect], whole: Outputs) -> Outputs:
    """The whole batch's outputs of the modules that were found and of all others of their classes."""
    classes = {type(s.call.module) for s in fresh if s.call.module is not None and s.call.name}
    return {
        (call.name, call.turn): whole[call.name, call.turn]
        for call in _every(full)
        if type(call.module) in classes and call.name and (call.name, call.turn) in whole
    }


def _traced(subject: Subject, batch: Any, given: Outputs | None, operators_of: str | None = None) -> Tracer:
    """The trace of one run; of the piece where `batch` is a comparison. A run that raises is a tree with a torn end."""
    model = subject.fresh()
    rows = None
    if isinstance(batch, Comparison):
        for earlier in batch.before:
            subject.run(earlier, model)
        rows, batch = batch.rows, batch.piece
    tracer = Tracer(model, given=given, rows=rows, operators_of=operators_of)
    try:
        subject.run(batch, model, tracer=tracer)
    except Exception:
        if rows is None:
            raise
    return tracer


def _every(call: Call) -> Iterator[Call]:
    """A call and all calls inside it, in the order in which they began."""
    yield call
    for inner in call.calls:
        yield from _every(inner)


def _end(full: Call, part: Call, rows: Rows) -> float | None:
    """Difference of the outputs; None where the piece raised."""
    if part.outputs is None:
        return None
    return largest(match_all(full.outputs or (), part.outputs or (), rows), whole_numbers=True)


def _culprit(subject: Subject, suspect: Suspect, operator: Operator, kind: str | None, mode: str) -> Culprit:
    own = kind or kind_of(suspect, operator)
    return Culprit(
        module=name_of(suspect.call, subject.model),
        kind=own,
        difference=suspect.difference,
        remedy=REMEDY[own],
        evidence=_evidence(operator, suspect),
        type="function" if suspect.call.module is None else type(suspect.call.module).__name__,
        mode=mode,
    )


def _evidence(operator: Operator, suspect: Suspect) -> str:
    if operator.name:
        return f"{operator.name} is the first operator whose {'rows differ' if operator.has_rows else 'result differs'}"
    return "a piece does not run" if suspect.raised else "its inputs agree, its outputs do not"


def _operator(subject: Subject, comparison: Comparison, suspect: Suspect, given: Outputs, tolerance: float) -> Operator:
    """The first operator in the suspect's own code that differs, from one more run of each."""
    name, turn = suspect.call.name, suspect.call.turn
    trees = [_traced(subject, batch, given, name).root for batch in (comparison.whole, comparison)]
    full, part = (next((c for c in _every(t) if (c.name, c.turn) == (name, turn)), None) for t in trees)
    if full is None or part is None:
        return UNKNOWN
    return first_operator(full, part, comparison.rows, tolerance)
