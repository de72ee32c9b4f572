"""Polynomials in batch and sequence, and what a list of operators adds up to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch.work.operators import Operator, Work
from microbatch.work.polynomial import ZERO, Polynomial, Power, constant

POWERS = st.tuples(st.integers(0, 2), st.integers(0, 2))
TERMS = st.dictionaries(POWERS, st.integers(-1000, 1000).map(float), max_size=6)


@given(TERMS, TERMS, st.integers(1, 50), st.integers(1, 50))
def test_sum_and_product_are_those_of_the_values(a: dict[Power, float], b: dict[Power, float], x: int, y: int) -> None:
    left, right = Polynomial(a), Polynomial(b)
    assert left(x, y) == sum(c * x**i * y**j for (i, j), c in a.items())
    assert (left + right)(x, y) == left(x, y) + right(x, y)
    assert (left * 3)(x, y) == 3 * left(x, y)


@given(TERMS)
def test_equal_terms_are_equal_whatever_their_order(terms: dict[Power, float]) -> None:
    assert Polynomial(terms) == Polynomial(dict(reversed(list(terms.items()))))
    assert all(c for _, c in Polynomial(terms).terms)


@pytest.mark.parametrize(
    ("terms", "text"),
    [
        ({}, "0"),
        ({(0, 0): 3}, "3"),
        ({(1, 0): 1}, "b"),
        ({(1, 1): 2, (0, 0): 3}, "2·b·s + 3"),
        ({(1, 2): 4, (0, 1): 1}, "4·b·s^2 + s"),
    ],
)
def test_text(terms: dict[Power, float], text: str) -> None:
    assert str(Polynomial(terms)) == text


def test_coefficient_names_one_term() -> None:
    assert Polynomial({(1, 1): 2.0}).coefficient(1, 1) == 2
    assert ZERO.coefficient(1) == 0


def test_work_counts_repeats() -> None:
    once = Operator(
        name="aten::mm",
        kind="matmul",
        flops=Polynomial({(1, 0): 10}),
        weight_bytes=constant(100),
        read_bytes=Polynomial({(1, 0): 2}),
        written_bytes=Polynomial({(1, 0): 3}),
        repeat=4,
    )
    work = Work(operators=(once,))
    assert work.flops(7) == 4 * 70
    assert work.moved_bytes(7) == 4 * (100 + 14 + 21)
    document = work.to_json()
    assert document["operators"][0]["flops"] == "10·b"
    assert document["operators"][0]["repeat"] == 4
