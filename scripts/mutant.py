"""One break of the code, and how a table lists those of one file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """One break.

    Attributes:
        file: path from the root of the tree.
        old: text that occurs exactly once in it.
        new: what it is replaced by.
        test: what pytest runs; at least one test in it must fail.
        breaks: the rule that is broken, in a few words.
    """

    file: str
    old: str
    new: str
    test: str
    breaks: str


def rows_of(file: str, test: str, *breaks: tuple[str, str, str]) -> tuple[Mutant, ...]:
    """Breaks of one file of the library, all seen by one file of tests; each is (old, new, what is broken)."""
    return tuple(Mutant(f"src/microbatch/{file}", old, new, f"tests/{test}", why) for old, new, why in breaks)
