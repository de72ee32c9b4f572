"""Waiting items in their order of service, with an exact bound. Decides nothing and reads no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from microbatch.serving.decisions.fair import Lines
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
        waits: is in the queue.
        patient: would wait for room; it is never taken out to make some.
    """

    __slots__ = ("facts", "item", "order", "patient", "place", "reply", "retried", "settled", "waits")

    def __init__(self, item: Any, facts: Waiting, number: int, reply: Reply, place: int = 0) -> None:
        self.item, self.facts, self.reply, self.place = item, facts, reply, place
        self.order = order_of(facts, number)
        self.settled = self.retried = self.waits = self.patient = False

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
    """Waiting entries in their order of service. What is settled while it waits must be taken out with `remove`.

    Those of one tenant go by `order_of`; several tenants share alike, see `microbatch.serving.decisions.fair`.
    """

    def __init__(self, most: int, most_per_tenant: int | None = None) -> None:
        """
        Args:
            most: the bound; `room` tells how many more may come.
            most_per_tenant: how many of them may be of one tenant; None for no bound of its own.
        """
        self.most, self.most_per_tenant = most, most_per_tenant
        self._lines = Lines()
        self._by_arrival: deque[Entry] = deque()
        self._waiting = self._special = 0

    def __len__(self) -> int:
        return self._waiting

    @property
    def room(self) -> int:
        """Items that may still come."""
        return self.most - self._waiting

    def room_for(self, tenant: str) -> int:
        """Items that may still come from one tenant."""
        if self.most_per_tenant is None:
            return self.room
        return min(self.room, self.most_per_tenant - self.waiting_of(tenant))

    def waiting_of(self, tenant: str) -> int:
        """Items of one tenant that wait."""
        line = self._lines.of(tenant)
        return 0 if line is None else len(line.waiting)

    def waiting_by_tenant(self) -> dict[str, int]:
        """Items of each tenant that waits."""
        return self._lines.lengths()

    @property
    def uniform(self) -> bool:
        """Whether all that wait cost 1, have no deadline, and no key: most servers, most of the time."""
        return self._special == 0

    def add(self, entry: Entry) -> None:
        """Put an entry at its place; the caller has looked for room."""
        self._lines.add(entry)
        self._by_arrival.append(entry)
        self._waiting += 1
        self._special += _is_special(entry)
        entry.waits = True

    def remove(self, entry: Entry) -> bool:
        """Take an entry out; False when it does not wait."""
        if not entry.waits:
            return False
        self._lines.remove(entry)
        self._gone((entry,))
        return True

    def take(self, places: Sequence[int]) -> list[Entry]:
        """Take the entries at some places of the order out, to be served; places ascend."""
        if not places:
            return []
        taken = self._lines.take(places)
        self._gone(taken)
        return taken

    def make_room(self, tenant: str, count: int) -> list[Entry]:
        """Take out who must go so that a tenant within its share finds room in a full queue; nobody where it is not.

        A share is an equal part of the bound for each tenant that waits. Those go who stand beyond the share of their
        tenant, of the longest line first, and of a line what would be served last; a `patient` entry never does.
        """
        own, lacking = self.waiting_of(tenant), count - self.room
        share = self.most // (len(self._lines.lengths()) + (own == 0))
        if lacking <= 0 or own + count > min(share, self.most_per_tenant or share):
            return []
        gone = [entry for entry in self._lines.beyond(share) if not entry.patient][:lacking]
        if len(gone) < lacking:
            return []
        for entry in gone:
            self.remove(entry)
        return gone

    def first(self, count: int) -> list[Waiting]:
        """What policies see of the first so many entries."""
        return [entry.facts for entry in self._lines.first(count)]

    def rest(self) -> None:
        """Nobody waits and nothing runs: no tenant owes anything any more."""
        self._lines.rest()

    def oldest(self) -> float:
        """When the one that has waited longest came; infinite when nobody waits."""
        arrivals = self._by_arrival
        while arrivals and not arrivals[0].waits:
            arrivals.popleft()
        return arrivals[0].facts.arrived if arrivals else NEVER

    def _gone(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            entry.waits = False
        self._waiting -= len(entries)
        self._special -= sum(map(_is_special, entries))


def _is_special(entry: Entry) -> bool:
    facts = entry.facts
    return facts.cost != 1 or facts.length != 1 or facts.deadline != NEVER or facts.key is not None
