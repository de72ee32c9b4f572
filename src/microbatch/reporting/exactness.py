"""An ExactnessReport as text to read in ten seconds, and as a table for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from microbatch.batch.exactness import Culprit, ExactnessReport
from microbatch.batch.remedies import WHAT
from microbatch.reporting.wording import clean

MOST_NAMES = 4
"""Modules of one kind that are named; the JSON has all of them."""


def lines(report: ExactnessReport) -> Iterable[str]:
    """The answer, then what is to blame and what to do, then what to know."""
    parts = report.parts or (report,)
    for part in parts:
        yield _answer(part)
        for group in _groups(part.culprits):
            yield from _blame(group)
    yield _how(report)
    for note in report.notes:
        yield f"Note: {clean(note)}"


def _answer(report: ExactnessReport) -> str:
    where = " and ".join(report.modes).capitalize() or "The gradients"
    largest = "" if report.largest_difference is None else f" (largest difference {_short(report.largest_difference)})"
    if report.exact:
        return f"{where}: exact. A batch in pieces gives the whole batch's result{largest}."
    return f"{where}: not exact. A batch in pieces gives another result{largest}."


def _groups(culprits: Sequence[Culprit]) -> list[list[Culprit]]:
    """By kind and class, in the order of the first of each."""
    groups: dict[tuple[str, str], list[Culprit]] = {}
    for culprit in culprits:
        groups.setdefault((culprit.kind, culprit.type), []).append(culprit)
    return list(groups.values())


def _blame(group: Sequence[Culprit]) -> Iterable[str]:
    first = group[0]
    kind = f" ({first.type})" if first.type and first.type != first.module else ""
    size = "" if first.difference is None else f"; difference {_short(first.difference)}"
    yield f"  {clean(first.module)}{kind} {WHAT.get(first.kind, 'is to blame')}{size}."
    if len(group) > 1:
        names = ", ".join(clean(culprit.module) for culprit in group[1:MOST_NAMES])
        more = f" and {len(group) - MOST_NAMES} more" if len(group) > MOST_NAMES else ""
        yield f"    So {'does' if len(group) == 2 else 'do'} {names}{more}."
    told = f"{first.evidence[0].upper()}{first.evidence[1:]}. " if first.kind == "state" and first.evidence else ""
    yield f"    {clean(told)}{' ' if told else ''}{first.remedy}"


def _how(report: ExactnessReport) -> str:
    cuts = "; ".join(_cut(sizes) for sizes in report.splits)
    size = "" if report.batch_size is None else f"{report.batch_size} rows"
    done = " cut into ".join(part for part in (size, cuts) if part)
    dtype = {"fp64": "float64", "fp32": "float32"}.get(report.dtype, report.dtype)
    return f"Compared in {dtype}{f': {done}' if done else ''}; up to {_short(report.tolerance)} counts as rounding."


def _cut(sizes: Sequence[int]) -> str:
    return f"{len(sizes)} × {sizes[0]}" if len(set(sizes)) == 1 else " + ".join(map(str, sizes))


def _short(value: float) -> str:
    return f"{value:.2g}"


def to_notebook(report: ExactnessReport) -> str:
    """The same as a small piece of HTML."""
    first, *rest = lines(report)
    body = "".join(f"<div>{escape(line.strip())}</div>" for line in rest)
    return f"<div><strong>{escape(first)}</strong>{body}</div>"
