"""Exact polynomials in the batch and the sequence through numbers seen at a few sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product

from microbatch.work.polynomial import Polynomial

Size = tuple[int, int]
"""(batch, sequence)"""
Number = int | float | Fraction


def grid(batches: Sequence[int], sequences: Sequence[int]) -> list[Size]:
    """Every batch with every sequence."""
    return list(product(batches, sequences))


def interpolation(batches: Sequence[int], sequences: Sequence[int]) -> Callable[[Sequence[Number]], Polynomial]:
    """A function from the numbers at `grid(batches, sequences)` to the polynomial through them.

    Its degree in the batch is one less than the number of batches, and so for the sequence. The arithmetic is exact.
    """
    in_batch, in_sequence = _basis(batches), _basis(sequences)

    def through(numbers: Sequence[Number]) -> Polynomial:
        if all(number == numbers[0] for number in numbers):
            return Polynomial({(0, 0): float(numbers[0])})
        terms: dict[tuple[int, int], Fraction] = {}
        for number, (p, q) in zip(numbers, product(in_batch, in_sequence), strict=True):
            value = Fraction(number)
            for (i, a), (j, c) in product(enumerate(p), enumerate(q)):
                terms[i, j] = terms.get((i, j), Fraction(0)) + value * a * c
        return Polynomial((power, float(c)) for power, c in terms.items())

    return through


def _basis(points: Sequence[int]) -> list[list[Fraction]]:
    """Coefficients of Lagrange's polynomials: the i-th is 1 at the i-th point and 0 at the others."""
    return [_lagrange(point, [other for other in points if other != point]) for point in points]


def _lagrange(point: int, others: Sequence[int]) -> list[Fraction]:
    coefficients = [Fraction(1)]
    for other in others:
        step = point - other
        shifted = [Fraction(0), *coefficients]
        coefficients = [(up - other * c) / step for up, c in zip(shifted, [*coefficients, Fraction(0)], strict=True)]
    return coefficients


def agrees(polynomial: Polynomial, size: Size, number: Number) -> bool:
    """Whether the polynomial gives the number at a size, to the last digit that a float holds."""
    guess = polynomial(*size)
    return abs(guess - float(number)) <= 1e-12 * max(abs(float(number)), 1.0)
