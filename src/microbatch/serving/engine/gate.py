"""Several engines on one CPU: so many batches at once as there are cores for, in the order of asking.

A batch on the CPU uses as many threads as torch is told, as a rule all cores. Two of them at once do not take twice as
long but many times: each operation ends in a barrier at which threads wait for those that have no core. Dividing the
threads instead would make a lone request slower while the other model has nothing to do. So engines that share a CPU
take turns; what comes meanwhile joins the batch that is formed when the turn comes.

A model that hangs must not stop the others: who has been inside for longer than `PATIENCE` no longer counts.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

PATIENCE = 5.0
"""Seconds for which a batch keeps those of other engines waiting, at most."""


class Ticket:
    """One batch that is inside a gate, or wants to be."""

    __slots__ = ("_gate",)

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def leave(self) -> None:
        """Its turn is over."""
        self._gate.leave(self)


class Gate:
    """Lets so many in at once, first come first served; every method may be called from any thread."""

    def __init__(
        self, slots: Callable[[], int], patience: float = PATIENCE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            slots: how many may be inside, asked each time.
            patience: seconds after which one that is inside does not count any more.
            clock: what tells seconds.
        """
        self._slots, self._patience, self._clock = slots, patience, clock
        self._changed = threading.Condition()
        self._line: deque[Ticket] = deque()
        self._inside: dict[Ticket, float] = {}

    def enter(self) -> Ticket:
        """Wait for a turn, which lasts until `Ticket.leave`."""
        ticket = Ticket(self)
        with self._changed:
            self._line.append(ticket)
            while (until := self._until(ticket)) > 0:
                self._changed.wait(until)
            self._line.popleft()
            self._inside[ticket] = self._clock()
            self._changed.notify_all()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """The turn is over."""
        with self._changed:
            del self._inside[ticket]
            self._changed.notify_all()

    def _until(self, ticket: Ticket) -> float:
        """Seconds until this one may enter if nobody leaves or enters meanwhile; 0 for now."""
        now = self._clock()
        left = sorted(entered + self._patience - now for entered in self._inside.values())
        counted = [seconds for seconds in left if seconds > 0]
        over = len(counted) - self._slots()
        if over >= 0:
            return counted[over]
        return 0.0 if self._line[0] is ticket else self._patience


def share_cpu(engines: Iterable[Any]) -> None:
    """Engines that serve on the CPU of one machine take turns from now on; a single one has nobody to wait for.

    Those take part that have ``on_cpu`` and ``share``, as `DynamicBatcher` does. Functions count as work for the CPU,
    since what they do cannot be seen; leave out those that only wait for something.
    """
    sharing = [engine for engine in engines if getattr(engine, "on_cpu", False)]
    if len(sharing) > 1:
        gate = Gate(batches_at_once)
        for engine in sharing:
            engine.share(gate)


def batches_at_once() -> int:
    """Batches that have a core for each of their threads."""
    torch = sys.modules.get("torch")
    threads = 1 if torch is None else int(torch.get_num_threads())
    return max(1, len(os.sched_getaffinity(0)) // threads)
