"""Polynomials through their own values."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from microbatch.capture.fit import agrees, grid, interpolation
from microbatch.work.polynomial import Polynomial

POWERS = [(i, j) for i in range(3) for j in range(3)]
COEFFICIENTS = st.fixed_dictionaries({power: st.integers(0, 10**6) for power in POWERS})


@given(COEFFICIENTS, st.sampled_from([(2, 3, 19), (1, 8, 9)]), st.sampled_from([(4, 32, 64), (512, 4096, 8192)]))
def test_a_polynomial_is_found_from_its_values(
    coefficients: dict[tuple[int, int], int], batches: tuple[int, ...], sequences: tuple[int, ...]
) -> None:
    truth = Polynomial(coefficients)
    values = [sum(c * b**i * s**j for (i, j), c in coefficients.items()) for b, s in grid(batches, sequences)]
    found = interpolation(batches, sequences)(values)
    assert found == truth
    assert agrees(found, (7, 100), sum(c * 7**i * 100**j for (i, j), c in coefficients.items()))


def test_halves_are_exact() -> None:
    pairs = [s * (s + 1) // 2 for s in (4, 32, 64)]
    assert interpolation((1,), (4, 32, 64))(pairs) == Polynomial({(0, 2): 0.5, (0, 1): 0.5})
    assert interpolation((2, 3), (1,))([Fraction(2, 3), 1]) == Polynomial({(1, 0): 1 / 3})


def test_a_wrong_value_is_seen() -> None:
    found = interpolation((2, 3), (1,))([20, 30])
    assert agrees(found, (19, 1), 190) and not agrees(found, (19, 1), 191)
