"""Calls back when deadlines pass, whatever the workers are doing."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable

from microbatch.serving.decisions.queue import Entry

COMPACT = 4096
"""Entries beyond which those that were answered long before their deadline are thrown out."""


class Alarm:
    """One thread that sleeps until the next deadline; there is none before the first deadline."""

    def __init__(self, expire: Callable[[list[Entry]], None]) -> None:
        """
        Args:
            expire: gets the entries whose deadline has passed; those already answered among them.
        """
        self._expire = expire
        self._heap: list[tuple[float, int, Entry]] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._added = 0
        self._compact_at = COMPACT

    def add(self, entry: Entry) -> None:
        """Watch an entry."""
        with self._changed:
            self._added += 1
            heapq.heappush(self._heap, (entry.facts.deadline, self._added, entry))
            if len(self._heap) > self._compact_at:
                self._heap = [row for row in self._heap if not row[2].settled]
                heapq.heapify(self._heap)
                self._compact_at = max(COMPACT, 2 * len(self._heap))
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="microbatch-deadlines", daemon=True)
                self._thread.start()
            elif self._heap[0][2] is entry:
                self._changed.notify()

    def stop(self) -> None:
        """End the thread; deadlines are no longer watched."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while True:
            with self._changed:
                while not (passed := self._passed()):
                    if self._stopped:
                        return
                    self._changed.wait(self._heap[0][0] - time.monotonic() if self._heap else None)
            self._expire(passed)

    def _passed(self) -> list[Entry]:
        """Takes out what has passed, and what has been answered as far as it is next."""
        now, passed = time.monotonic(), []
        while self._heap and (self._heap[0][0] <= now or self._heap[0][2].settled):
            passed.append(heapq.heappop(self._heap)[2])
        return [entry for entry in passed if not entry.settled]
