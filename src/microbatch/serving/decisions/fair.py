"""Whose item is next where several tenants wait: start-time fair queueing by cost. No torch, clock or thread.

Each tenant's items stand in a line of their own, in their order of service. A line has a start tag: the virtual time
at which its first item begins, if all tenants that wait share alike. The smallest tag goes first, and moves its line's
tag on by the cost of the item. A line that was empty begins at the tag of what was taken last, if that is later than
its own: nothing is saved up by staying away, and nothing owed is forgotten by going for a moment.

While two tenants wait, what they are served differs by at most one largest item of each, whatever they send
(P. Goyal, H. M. Vin and H. Cheng, "Start-time Fair Queueing", SIGCOMM 1996, theorem 1). That holds for items taken from
the front; a policy that passes over items of another key or length moves it by at most the batch it takes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from microbatch.serving.decisions.queue import Entry

FEW = 16
"""Lines up to which nothing is forgotten."""

_order = attrgetter("order")


class Line:
    """The waiting items of one tenant, in their order of service.

    Attributes:
        waiting: sorted by `Entry.order`.
        tag: virtual time at which the first of them begins.
    """

    __slots__ = ("tag", "waiting")

    def __init__(self, tag: int = 0) -> None:
        self.tag = tag
        self.waiting: list[Entry] = []

    def add(self, entry: Entry) -> None:
        """Put an entry at its place."""
        waiting = self.waiting
        if not waiting or entry.order > waiting[-1].order:  # nearly always
            waiting.append(entry)
        else:
            insort(waiting, entry, key=_order)

    def remove(self, entry: Entry) -> None:
        """Take an entry out that waits here."""
        del self.waiting[bisect_left(self.waiting, entry.order, key=_order)]

    def take(self, places: Sequence[int]) -> list[Entry]:
        """Take the entries at some places out; places ascend, and there is at least one."""
        taken = [self.waiting[place] for place in places]
        if places[-1] == len(places) - 1:
            del self.waiting[: len(places)]
        else:
            chosen = set(places)
            self.waiting = [entry for place, entry in enumerate(self.waiting) if place not in chosen]
        return taken


class Lines:
    """The lines of all tenants that wait, and of those that were served more than whoever waits.

    While there is one tenant nobody has to be compared, and nothing is: it is served as by a plain sorted list.
    """

    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}
        self._only: Line | None = None
        self._now = 0
        self._forget_at = FEW

    def of(self, tenant: str) -> Line | None:
        """The line of a tenant, if it has one."""
        return self._lines.get(tenant)

    def add(self, entry: Entry) -> None:
        """Put an entry into the line of its tenant."""
        line = self._lines.get(entry.facts.tenant)
        if line is None:
            line = self._new(entry.facts.tenant)
        elif not line.waiting and line.tag < self._now:
            line.tag = self._now
        line.add(entry)

    def remove(self, entry: Entry) -> None:
        """Take an entry out that will not be served: nobody is charged."""
        self._lines[entry.facts.tenant].remove(entry)

    def first(self, count: int) -> list[Entry]:
        """The first so many entries of all lines, in the order in which they are due."""
        if self._only is not None:
            return self._only.waiting[:count]
        heads = [(line.tag, line.waiting[0].order, 0, line) for line in self._lines.values() if line.waiting]
        heapify(heads)
        found: list[Entry] = []
        while heads and len(found) < count:
            tag, _, place, line = heads[0]
            found.append(line.waiting[place])
            if place + 1 < len(line.waiting):
                after = line.waiting[place + 1].order  # no two are equal, so that lines are never compared
                heapreplace(heads, (tag + line.waiting[place].facts.cost, after, place + 1, line))
            else:
                heappop(heads)
        return found

    def take(self, places: Sequence[int]) -> list[Entry]:
        """Serve the entries at some places of `first`, which ascend; each tenant is charged with its own."""
        if self._only is not None:
            return self._only.take(places)
        ordered = self.first(places[-1] + 1)
        taken = [ordered[place] for place in places]
        for entry in taken:
            line = self._lines[entry.facts.tenant]
            line.remove(entry)
            self._now = max(self._now, line.tag)
            line.tag += entry.facts.cost
        return taken

    def beyond(self, share: int) -> list[Entry]:
        """What stands beyond so many in its line: of the longest line first, and of a line the last first."""
        longest_first = sorted(self._lines.values(), key=lambda line: -len(line.waiting))
        return [entry for line in longest_first for entry in reversed(line.waiting[share:])]

    def lengths(self) -> dict[str, int]:
        """Waiting items of each tenant that waits."""
        return {tenant: len(line.waiting) for tenant, line in self._lines.items() if line.waiting}

    def rest(self) -> None:
        """Nobody waits and nothing runs: whoever comes next begins anew, side by side with all others."""
        if self._only is None:
            self._lines.clear()
            self._now, self._forget_at = 0, FEW

    def _new(self, tenant: str) -> Line:
        if len(self._lines) >= self._forget_at:
            self._forget()
        line = self._lines[tenant] = Line(self._now)
        self._only = line if len(self._lines) == 1 else None
        return line

    def _forget(self) -> None:
        """Tenants that neither wait nor owe anything; and, where new names never end, what the absent owe too."""
        kept = {tenant: line for tenant, line in self._lines.items() if line.waiting or line.tag > self._now}
        waiting = {tenant: line for tenant, line in kept.items() if line.waiting}
        self._lines = kept if len(kept) <= 2 * len(waiting) + FEW else waiting
        self._forget_at = 2 * len(self._lines) + FEW
