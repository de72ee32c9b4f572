"""A thread that hears of failures while its rank waits for a message: from the store, and from processes that end."""

from __future__ import annotations

import json
import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from microbatch.pipeline.execution.telling import Failure

INTERVAL = 0.25
"""Seconds between two looks into the store. A process that ends on this machine is seen at once."""

FAILED = "failed"
"""The key under which the first rank that fails says so."""


@lru_cache(maxsize=1)
def this_machine() -> str:
    """Equal for processes that see each other's numbers: the running kernel and the space of process numbers."""
    with suppress(OSError):
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{kernel} {os.readlink('/proc/self/ns/pid')}"
    return ""


class Listener(threading.Thread):
    """Listens until it is stopped, or has heard of a failure.

    Attributes:
        failure: the first that was heard of; None while all is well.
        ended: ranks whose processes ended, which is no failure by itself.
    """

    def __init__(self, store: Any, rank: int, size: int, alarm: Callable[[], None]) -> None:
        """
        Args:
            store: a clone that only this thread uses.
            rank: of this process.
            size: number of ranks.
            alarm: called once, as soon as a failure is known.
        """
        super().__init__(name="microbatch-guard", daemon=True)
        self.failure: Failure | None = None
        self.ended: list[Failure] = []
        self._store, self._rank, self._alarm = store, rank, alarm
        self._strangers = [other for other in range(size) if other != rank]
        self._processes: dict[int, Failure] = {}
        self._new: list[Failure] = []
        self._poll = select.poll()
        self._stop_read, self._stop_write = os.pipe()
        self._poll.register(self._stop_read, select.POLLIN)
        store.set(f"process/{rank}", json.dumps([this_machine(), os.getpid()]))

    def run(self) -> None:
        """Until `stop`, or the first failure."""
        while self.failure is None:
            self._strangers = [rank for rank in self._strangers if not self._meet(rank)]
            seen = [handle for handle, _ in self._poll.poll(0 if self._new else INTERVAL * 1000)]
            if self._stop_read in seen:
                return
            ended = [*self._new, *map(self._ended, seen)]
            self._new = []
            killed = [one for one in ended if self._was_killed(one)]
            self.failure = self._said() or (killed[0] if killed else None)
        self._alarm()

    def stop(self) -> None:
        """End the thread, which must not outlive the interpreter, and say that this rank leaves in good order."""
        with suppress(OSError):
            os.write(self._stop_write, b"\0")
        if self.is_alive() and threading.current_thread() is not self:
            self.join()
        with suppress(RuntimeError):
            self._store.set(f"left/{self._rank}", "1")
        for handle in (*self._processes, self._stop_read, self._stop_write):
            with suppress(OSError):
                os.close(handle)
        self._processes = {}

    def _said(self) -> Failure | None:
        """What a rank said before it ended; None where nobody said anything, or the store's own process is gone."""
        with suppress(RuntimeError):
            if self._store.check([FAILED]):
                return Failure.from_bytes(self._store.get(FAILED))
        return None

    def _ended(self, handle: int) -> Failure:
        """The process behind a handle, which is of no more use."""
        self._poll.unregister(handle)
        return self._processes[handle]

    def _was_killed(self, one: Failure) -> bool:
        """Whether a process that ended had no time to say that it leaves; it is only noted where nobody can know."""
        self.ended.append(one)
        with suppress(RuntimeError):
            return not self._store.check([f"left/{one.rank}"])
        return False

    def _meet(self, rank: int) -> bool:
        """Get a handle on the process of a rank of this machine; whether nothing more is to be learned of it."""
        key = f"process/{rank}"
        try:
            if not self._store.check([key]):
                return False  # it has not come yet
            machine, process = json.loads(self._store.get(key))
        except RuntimeError:
            return False
        if machine and machine == this_machine():
            self._hold(Failure(rank, process=process), process)
        return True

    def _hold(self, one: Failure, process: int) -> None:
        try:
            handle = os.pidfd_open(process)
        except ProcessLookupError:  # it came, and ended before this rank had looked
            self._new.append(one)
        except OSError:  # the kernel offers no handles: the store and broken connections are left
            return
        else:
            self._processes[handle] = one
            self._poll.register(handle, select.POLLIN)
