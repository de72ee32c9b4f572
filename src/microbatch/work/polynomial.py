"""A quantity that grows with the batch and the sequence: a short polynomial with exact coefficients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Power = tuple[int, int]
"""(power of the batch b, power of the sequence s)."""


@dataclass(frozen=True, slots=True)
class Polynomial:
    """Σ c · b^i · s^j. Written ``Polynomial({(1, 0): 3.0, (0, 0): 2.0})`` for 3·b + 2.

    Attributes:
        terms: coefficient by (power of b, power of s), none of them zero.
    """

    terms: tuple[tuple[Power, float], ...] = ()

    def __init__(self, terms: Mapping[Power, float] | Iterable[tuple[Power, float]] = ()) -> None:
        pairs = dict(terms)
        object.__setattr__(self, "terms", tuple(sorted((power, float(c)) for power, c in pairs.items() if c)))

    def __call__(self, batch: float, sequence: float = 1.0) -> float:
        return sum((c * batch**i * sequence**j for (i, j), c in self.terms), 0.0)

    def __add__(self, other: Polynomial) -> Polynomial:
        total = dict(self.terms)
        for power, c in other.terms:
            total[power] = total.get(power, 0.0) + c
        return Polynomial(total)

    def __mul__(self, factor: float) -> Polynomial:
        return Polynomial((power, c * factor) for power, c in self.terms)

    def coefficient(self, batch_power: int, sequence_power: int = 0) -> float:
        """The factor of b^i · s^j."""
        return dict(self.terms).get((batch_power, sequence_power), 0.0)

    def __str__(self) -> str:
        """``2·b·s + 3``: the powers in descending order."""
        written = [_term(power, c) for power, c in sorted(self.terms, reverse=True)]
        return " + ".join(written) or "0"


ZERO = Polynomial()


def constant(value: float) -> Polynomial:
    """A quantity that does not depend on the batch."""
    return Polynomial({(0, 0): value})


def _term(power: Power, c: float) -> str:
    letters = [_letter(letter, exponent) for letter, exponent in zip("bs", power) if exponent]
    return "·".join([f"{c:g}", *letters] if c != 1 or not letters else letters)


def _letter(letter: str, exponent: int) -> str:
    return letter if exponent == 1 else f"{letter}^{exponent}"
