"""Operators from the records of several sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from microbatch.capture.fit import Number, Size, agrees, grid, interpolation
from microbatch.capture.moved import Moved
from microbatch.capture.record import Record
from microbatch.work.operators import Gemm, Operator, Routed, Work
from microbatch.work.polynomial import Polynomial

Records = Sequence[Record]


class Mismatch(Exception):
    """Records of different sizes that are not one list of operators with polynomials as sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """At which sizes a model runs for polynomials of which degree: one less than the number of batches, sequences."""

    batches: tuple[int, ...]
    sequences: tuple[int, ...]
    check: Size

    @property
    def sizes(self) -> list[Size]:
        """All sizes at which the model has to run."""
        return [*grid(self.batches, self.sequences), self.check]


def operators(seen: Mapping[Size, Records], claim: Claim, probabilities: tuple[float, ...] = ()) -> list[Operator]:
    """One operator for each record, with exact sizes.

    Raises:
        Mismatch: the records differ in more than their numbers between sizes, or the check fails.
    """
    runs = [seen[size] for size in claim.sizes]
    for size, run in zip(claim.sizes[1:], runs[1:], strict=True):
        _check_same(claim.sizes[0], runs[0], size, run)
    through = interpolation(claim.batches, claim.sequences)
    made = []
    for column in zip(*runs, strict=True):
        fitted = []
        for number in zip(*map(_numbers, column), strict=True):
            polynomial = through(number[:-1])
            if not agrees(polynomial, claim.check, number[-1]):
                raise Mismatch(f"{column[0].name} in {column[0].layer or 'the model'} is not a polynomial.")
            fitted.append(polynomial)
        made.append(_operator(column[0], fitted, probabilities))
    return made


def straight_lines(
    seen: Mapping[Size, Records], ends: tuple[Size, Size], probabilities: tuple[float, ...] = ()
) -> tuple[list[Operator], float]:
    """Operators with straight lines through two batches as sizes, and how far off they are at the others.

    Returns:
        the operators, and the largest error of the call's FLOPs or bytes at any size in `seen`, as a share.

    Raises:
        Mismatch: other operators run at other sizes.
    """
    (low, sequence), (high, _) = ends
    for size, run in seen.items():
        _check_same(ends[0], seen[ends[0]], size, run)
    through = interpolation((low, high), (sequence,))
    pairs = zip(seen[ends[0]], seen[ends[1]], strict=True)
    made = [
        _operator(one, [through(both) for both in zip(_numbers(one), _numbers(two), strict=True)], probabilities)
        for one, two in pairs
    ]
    drawn = Work(operators=tuple(made))
    off = [_error(drawn.flops(*size), sum(record.flops for record in run)) for size, run in seen.items()]
    off += [_error(drawn.moved_bytes(*size), sum(record.moved.total for record in run)) for size, run in seen.items()]
    return made, max(off)


def _error(guess: float, truth: float) -> float:
    return abs(guess - truth) / max(truth, 1.0)


def _check_same(size: Size, run: Records, other_size: Size, other: Records) -> None:
    for one, two in zip_longest(run, other):
        if one is None or two is None or _identity(one) != _identity(two):
            raise Mismatch(f"{_text(one)} runs at {_sizes(size)}, {_text(two)} at {_sizes(other_size)}.")


def _text(record: Record | None) -> str:
    return f"{record.name} in {record.layer or 'the model'}" if record else "nothing"


def _sizes(size: Size) -> str:
    return f"batch {size[0]}" + (f" and sequence {size[1]}" if size[1] > 1 else "")


def _identity(record: Record) -> tuple[object, ...]:
    routed = record.routed[:2] if record.routed else None
    shape = record.product is None, routed, record.uncounted
    return (
        record.name,
        record.kind,
        record.layer,
        record.dtype,
        record.weight_dtype,
        record.backward,
        _times(record),
        shape,
    )


def _times(record: Record) -> int:
    return record.run.repeat if record.run else 1


def _numbers(record: Record) -> tuple[Number, ...]:
    moved, product, routed = record.moved, record.product or (), record.routed or ()
    return record.flops, moved.weights, moved.read, moved.written, *product, *routed[2:]


def _operator(record: Record, sizes: Sequence[Polynomial], probabilities: tuple[float, ...]) -> Operator:
    flops, weights, read, written, *more = sizes
    gemm = Gemm(m=more[0], n=more[1], k=more[2], count=more[3]) if record.product else None
    routed = record.routed and Routed(
        experts=record.routed[0], top_k=record.routed[1], tokens=more[-1], probabilities=probabilities
    )
    return Operator(
        name=record.name,
        kind=record.kind,
        layer=record.layer,
        dtype=record.dtype,
        flops=flops,
        weight_bytes=weights,
        read_bytes=read,
        written_bytes=written,
        gemm=gemm,
        routed=routed,
        weight_dtype=record.weight_dtype,
        backward=record.backward,
        repeat=_times(record),
    )


def added_up(records: Records) -> list[Record]:
    """One record for all that one module does with one operator: a loop over the batch or the steps becomes one.

    Products of one shape are counted; of several shapes, the record says the work but no shape.
    """
    groups: dict[object, list[Record]] = {}
    for record in records:
        key = record.name, record.kind, record.layer, record.dtype, record.weight_dtype, record.backward
        groups.setdefault(key, []).append(record)
    return [_sum(group) for group in groups.values()]


def _sum(group: list[Record]) -> Record:
    shapes = {record.product[:3] if record.product else None for record in group}
    shape = shapes.pop() if len(shapes) == 1 else None
    count = sum(_times(record) * record.product[3] for record in group if record.product)
    first = group[0]
    return Record(
        name=first.name,
        kind=first.kind,
        layer=first.layer,
        dtype=first.dtype,
        flops=sum(_times(record) * record.flops for record in group),
        moved=_moved(group),
        product=(*shape, count) if shape else None,
        weight_dtype=first.weight_dtype,
        backward=first.backward,
        uncounted=first.uncounted,
    )


def _moved(group: Iterable[Record]) -> Moved:
    parts = [(_times(record), record.moved) for record in group]
    return Moved(
        sum(times * moved.weights for times, moved in parts),
        sum(times * moved.read for times, moved in parts),
        sum(times * moved.written for times, moved in parts),
    )
