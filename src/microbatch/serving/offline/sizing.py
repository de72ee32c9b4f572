"""The size of the next piece of offline work: given, from a profile, or found while the data passes; and what memory
has allowed so far. No torch, no clock."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Literal

from microbatch.batch.size_limit import SizeLimit
from microbatch.serving.offline.growing import FIRST_ITEMS, Trial, best_size, next_size, rates_of

logger = logging.getLogger(__name__)

Unit = Literal["items", "tokens"]


@dataclass(slots=True)
class Sizing:
    """Sizes count items, or tokens where items differ in length.

    Attributes:
        wanted: the size to stay at; None until it is found.
        unit: what sizes count.
        source: who said so: you, a profile, or measured.
        piece_cost: of a budget, see `TokenBudget`; None for its default.
        trials: runs while looking for the size.
        largest: what memory allows as far as it is predicted.
        limit: what memory has allowed.
        failures: pieces that ran out of memory.
    """

    wanted: int | None
    unit: Unit
    source: str
    piece_cost: int | None = None
    trials: list[Trial] = field(default_factory=list)
    largest: int | None = None
    limit: SizeLimit = field(default_factory=SizeLimit)
    failures: int = 0
    _start: int = 1
    _smallest: int = 1
    _next: int | None = None

    @property
    def is_looking(self) -> bool:
        """Whether the size is still being found."""
        return self.wanted is None

    def begin(self, longest: int, items: int | None) -> None:
        """What the first items are like, for the first size to try.

        Args:
            longest: tokens of the longest item; 1 where items count.
            items: that there are; None where that is not known.
        """
        if self.wanted is None and self._next is None:
            few = FIRST_ITEMS if items is None else max(1, min(FIRST_ITEMS, items // (2 * FIRST_ITEMS)))
            self._smallest, self._start = longest, few * longest
            self._next = self._start

    def size(self) -> int:
        """Of the next piece."""
        if self.wanted is None:
            assert self._next is not None
            return self._next
        return self.limit.first_size(self.wanted)

    def done(self, size: int, cost: int, seconds: float, left: int | None) -> None:
        """A piece ran.

        Args:
            size: as `size` said.
            cost: items or tokens that ran.
            seconds: that it took.
            left: items or tokens that have not run.
        """
        if self.wanted is not None:
            before = self.limit.largest
            self.limit = self.limit.after_success(self.wanted)
            if before is not None and self.limit.largest != before:
                logger.info("No out-of-memory for a while: the next piece may have %d %s.", self.size(), self.unit)
            return
        if cost > size // 2:  # what is left over says little about its size
            self.trials.append(Trial(size, cost, seconds, counts=bool(self.trials)))
        self._look(left)

    def failed(self, size: int, ran: int) -> None:
        """A piece ran out of memory.

        Args:
            size: as `size` said.
            ran: items or tokens that the piece had.
        """
        self.failures += 1
        half = max(1, min(size, ran) // 2)
        if self.wanted is None:
            self.trials.append(Trial(size, ran, None))
            self._start = half
            self._look(None)
        else:
            self.limit = self.limit.after_failure(half)

    def _look(self, left: int | None) -> None:
        following = next_size(self.trials, start=self._start, largest=self.largest, left=left, smallest=self._smallest)
        if following is None:
            self.settle()
        else:
            self._next = following

    def settle(self) -> None:
        """Stay at the best size so far."""
        if self.wanted is None and rates_of(self.trials):
            self.wanted = best_size(self.trials)

    def reason(self, unit: Unit, scale: int) -> str:
        """Why the size is what it is, in one sentence; sizes divided by `scale`."""
        if self.source != "measured":
            text = f"{self.wanted} {unit} a piece: {self.source}"
        elif not (rates := rates_of(self.trials)):
            text = "everything went before there was a second size to compare"
        else:
            sizes, best = ", ".join(str(size // scale) for size in rates), best_size(self.trials) // scale
            text = f"{best} {unit} a piece: the fastest of {len(rates)} sizes that ran ({sizes})"
        if self.failures:
            text += f"; {self.failures} piece{'s' * (self.failures > 1)} ran out of memory and ran again, smaller"
        return text

    def bound(self, largest: int | None) -> None:
        """What memory allows, before anything has run."""
        self.largest = largest
        if largest is not None and self.wanted is None and self._next is not None:
            self._start = self._next = max(self._smallest, min(self._next, largest))
