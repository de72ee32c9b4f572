"""Which size of pieces to start with, after pieces that ran out of memory and pieces that did not. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

QUIET_STEPS = 10
"""Steps without out-of-memory before a larger size is tried again."""

MOST_QUIET_STEPS = 640
"""Each larger size that fails doubles the wait, up to this: a lasting limit then costs a failed try in 640 steps."""


@dataclass(frozen=True, slots=True)
class SizeLimit:
    """What memory has allowed so far.

    Attributes:
        largest: no step starts with more items per piece; None while nothing failed.
        quiet: steps since the last failure or growth.
        patience: quiet steps after which the limit doubles.
        grown: whether the last change was a growth that no step has confirmed yet.
    """

    largest: int | None = None
    quiet: int = 0
    patience: int = QUIET_STEPS
    grown: bool = False

    def first_size(self, wanted: int) -> int:
        """The size to start with where `wanted` would be used if memory allowed."""
        return wanted if self.largest is None else min(wanted, self.largest)

    def after_failure(self, succeeded: int) -> SizeLimit:
        """The step ran out of memory and went through at size `succeeded`."""
        patience = min(2 * self.patience, MOST_QUIET_STEPS) if self.grown else self.patience
        return SizeLimit(largest=succeeded, patience=patience)

    def after_success(self, wanted: int) -> SizeLimit:
        """The step went through at its first size; `wanted` is what it would be without a limit."""
        if self.largest is None:
            return self
        if self.largest >= wanted:
            return SizeLimit(patience=self.patience, grown=self.grown)
        if self.quiet + 1 < self.patience:
            return replace(self, quiet=self.quiet + 1)
        return SizeLimit(largest=2 * self.largest, patience=self.patience, grown=True)


@dataclass(frozen=True, slots=True)
class Ladder:
    """Sizes at which a batch can be cut, for one that runs out of memory.

    Attributes:
        whole: the size at which it is one piece.
        following: the next smaller size; None when pieces cannot be smaller.
        said: a size in words.
    """

    whole: int
    following: Callable[[int], int | None]
    said: Callable[[int], str]

    @classmethod
    def of_items(cls, batch_size: int) -> Ladder:
        """Sizes that count items."""
        return cls(batch_size, partial(smaller, batch_size), partial(_items_said, batch_size))


def smaller(batch_size: int, micro_batch_size: int) -> int | None:
    """The size that makes twice as many pieces, evened out; None when pieces cannot be smaller.

    >>> smaller(128, 128), smaller(100, 25), smaller(7, 1)
    (64, 13, None)
    """
    size = min(batch_size, micro_batch_size)
    if size == 1:
        return None
    pieces = -(-batch_size // size)
    return min(size - 1, -(-batch_size // (2 * pieces)))


def _items_said(batch_size: int, size: int) -> str:
    return f"{'one item alone' if size == 1 else f'micro-batch size {size}'} of {batch_size}"
