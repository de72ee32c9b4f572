"""Waiting items in their order of service, with an exact bound. Decides nothing and reads no clock."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from typing import Any

from microbatch.serving.decisions.view import NEVER, Waiting

PATIENCE = 10.0
"""An item without a deadline is ordered as if its answer were due after so many seconds."""
HEAD_START = 2 * PATIENCE
"""One step of priority goes before everything of lower priority that came less than `PATIENCE` seconds earlier."""


class Reply:
    """Where the answers of one request go; it is complete when all of its items have one.

    Attributes:
        future: of asyncio or of threads; None in a simulation.
        loop: the event loop that the future belongs to; None for threads.
        results: one for each item, an exception for an item that failed.
        left: items without an answer.
        mark: what whoever looks on remembers of the request; None where nobody does.
    """

    __slots__ = ("future", "left", "loop", "mark", "results")

    def __init__(self, count: int, future: Any = None, loop: Any = None) -> None:
        self.future, self.loop = future, loop
        self.results: list[Any] = [None] * count
        self.left = count
        self.mark: object = None


class Entry:
    """One item on its way: waiting, running, or answered. Exactly one answer is given, see `Entry.settle`.

    Attributes:
        item: what the user gave.
        facts: what policies see.
        reply: where the answer goes, and at which `place` in it.
        order: place in the order of service, smaller first.
        settled: has its answer, or nobody waits for one any more.
        retried: has lost a worker once.
    """

    __slots__ = ("facts", "item", "order", "place", "reply", "retried", "settled")

    def __init__(self, item: Any, facts: Waiting, number: int, reply: Reply, place: int = 0) -> None:
        self.item, self.facts, self.reply, self.place = item, facts, reply, place
        self.order = order_of(facts, number)
        self.settled = self.retried = False

    def settle(self, result: Any) -> bool:
        """Give the answer, unless one was given already; whether the whole request is answered with it."""
        if self.settled:
            return False
        self.settled = True
        self.reply.results[self.place] = result
        self.reply.left -= 1
        return self.reply.left == 0


def order_of(facts: Waiting, number: int) -> tuple[float, int]:
    """Priority, then earliest deadline, then arrival; but nothing waits for ever.

    Deadlines later than `PATIENCE`, and none at all, count as that. A lower priority that has waited long enough goes
    before a higher one: each step of priority is worth `HEAD_START` seconds.
    """
    due = min(facts.deadline, facts.arrived + PATIENCE)
    return due - HEAD_START * facts.priority, number


class RequestQueue:
    """Waiting entries, sorted. Entries that are settled while they wait must be taken out with `remove`."""

    def __init__(self, most: int) -> None:
        """
        Args:
            most: the bound; `room` tells how many more may come.
        """
        self.most = most
        self._sorted: list[tuple[tuple[float, int], Entry]] = []
        self._by_arrival: deque[Entry] = deque()
        self._special = 0

    def __len__(self) -> int:
        return len(self._sorted)

    @property
    def room(self) -> int:
        """Items that may still come."""
        return self.most - len(self._sorted)

    @property
    def uniform(self) -> bool:
        """Whether all that wait cost 1, have no deadline, and no key: most servers, most of the time."""
        return self._special == 0

    def add(self, entry: Entry) -> None:
        """Put an entry at its place; the caller has looked for room."""
        insort(self._sorted, (entry.order, entry), key=_order)
        self._by_arrival.append(entry)
        self._special += _is_special(entry)

    def remove(self, entry: Entry) -> bool:
        """Take an entry out; False when it does not wait."""
        if not self._waits(entry):
            return False
        del self._sorted[bisect_left(self._sorted, entry.order, key=_order)]
        self._special -= _is_special(entry)
        return True

    def take(self, places: Sequence[int]) -> list[Entry]:
        """Take the entries at some places of the order out; places ascend."""
        taken = [self._sorted[place][1] for place in places]
        if places and places[-1] == len(places) - 1:
            del self._sorted[: len(places)]
        else:
            chosen = set(places)
            self._sorted = [pair for place, pair in enumerate(self._sorted) if place not in chosen]
        self._special -= sum(map(_is_special, taken))
        return taken

    def first(self, count: int) -> list[Waiting]:
        """What policies see of the first so many entries."""
        return [entry.facts for _, entry in self._sorted[:count]]

    def oldest(self) -> float:
        """When the one that has waited longest came; infinite when nobody waits."""
        arrivals = self._by_arrival
        while arrivals and not self._waits(arrivals[0]):
            arrivals.popleft()
        return arrivals[0].facts.arrived if arrivals else NEVER

    def _waits(self, entry: Entry) -> bool:
        place = bisect_left(self._sorted, entry.order, key=_order)
        return place < len(self._sorted) and self._sorted[place][1] is entry


def _order(pair: tuple[tuple[float, int], Entry]) -> tuple[float, int]:
    return pair[0]


def _is_special(entry: Entry) -> bool:
    facts = entry.facts
    return facts.cost != 1 or facts.length != 1 or facts.deadline != NEVER or facts.key is not None
