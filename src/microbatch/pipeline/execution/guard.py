"""Failures, told once and on every rank, while ranks wait for each other.

A rank that waits for a message of one that failed would wait for ever, or see a closed socket. So a rank that fails
says so in the store at which the ranks met, and then closes its connections; the others, whose calls end by that, look
there for the reason. A thread on each rank listens as well, for those that wait for somebody else: it ends their
waiting.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from microbatch.errors import RankFailed
from microbatch.pipeline.execution.listening import FAILED, Listener
from microbatch.pipeline.execution.telling import Doing, Failure, is_of_a_connection, lost, own_error, told

GRACE = 2.0
"""Seconds in which the reason of a broken connection must be known."""
_UNUSED_TAG = 2**30


class Guard:
    """All ranks of a run, each hearing of the others' failures.

    Attributes:
        rank: of this process.
        size: number of ranks.
        store: where ranks leave word for each other.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """
        Args:
            store: of these ranks alone; for the calling thread only.
            rank: of this process.
            size: number of ranks.
        """
        self.store, self.rank, self.size = store, rank, size
        self._inside = False
        self._lock = threading.Lock()
        self._listener = Listener(store.clone(), rank, size, _alarm_of(weakref.ref(self)))
        self._listener.start()
        self.close = weakref.finalize(self, self._listener.stop)
        """Stop listening; at the latest when the interpreter ends."""

    @property
    def failure(self) -> Failure | None:
        """The first failure of a rank; None while all is well."""
        return self._listener.failure

    @contextmanager
    def guarding(self, doing: Callable[[], Doing]) -> Iterator[None]:
        """Around all that waits for other ranks; inside of another it does nothing.

        Args:
            doing: what is being done now, asked when something fails.

        Raises:
            RankFailed: another rank failed, or is gone. An error of this rank's own is raised as it is.
        """
        if self._inside:
            yield
            return
        self._enter()
        try:
            yield
        except BaseException as raised:
            error = own_error(raised)
            now = doing()
            if isinstance(error, now.alike) and not is_of_a_connection(error):
                raise
            judged = self._judged(error, now.words)
            if judged is raised:
                raise
            raise judged from (error.__cause__ if judged is error else None)
        finally:
            with self._lock:
                self._inside = False
        if self.failure is not None:  # as of an accelerator whose calls return before they are done
            raise self.failure.error(self.size)

    def _enter(self) -> None:
        with self._lock:
            if self.failure is not None:
                raise self.failure.error(self.size)
            self._inside = True

    def _judged(self, error: BaseException, where: str) -> BaseException:
        """What this rank raises: its own error, which it tells, or that of the rank that failed first."""
        if is_of_a_connection(error):
            failure = self._reason()
            cut_off()  # so that those that wait for this rank hear of it as well
            return lost(error, self.rank, self.size) if failure is None else failure.error(self.size)
        if isinstance(error, RankFailed):
            return error
        self.tell(error, where)
        cut_off()
        place = f"In the {where}, on" if where else "On"
        error.add_note(f"{place} rank {self.rank} of {self.size}.")
        return error

    def tell(self, error: BaseException, where: str) -> None:
        """This rank failed; the first that says so is heard."""
        with suppress(RuntimeError):
            self.store.compare_set(FAILED, "", told(error, self.rank, where).to_bytes())

    def _reason(self) -> Failure | None:
        """Why a connection broke: what the listener hears in the next moments, else who has ended."""
        until = time.monotonic() + GRACE
        while self.failure is None and time.monotonic() < until:
            time.sleep(0.01)
        return self.failure or next(iter(self._listener.ended), None)

    def alarmed(self) -> None:
        """Another rank failed: end what this one waits in."""
        with self._lock:
            if self._inside:
                cut_off()


def _alarm_of(guard: weakref.ref[Guard]) -> Callable[[], None]:
    """The thread does not keep the guard alive."""

    def alarm() -> None:
        alive = guard()
        if alive is not None:
            alive.alarmed()

    return alarm


def cut_off() -> None:
    """Close every connection of this process to other ranks, so that all calls that wait on one end with an error.

    Process groups cannot be used any more. Gloo has no call for it, but a receive that times out closes all
    connections of its group.
    """
    for group in list(distributed_c10d._world.pg_map):
        size = dist.get_world_size(group)
        if size < 2:
            continue
        with suppress(Exception):
            if dist.get_backend(group) != dist.Backend.GLOO:
                group.abort()
        with suppress(Exception):
            peer = (dist.get_rank(group) + 1) % size
            work = dist.irecv(torch.empty(1, device="cpu"), group=group, group_src=peer, tag=_UNUSED_TAG)
            if work is not None:
                work.wait(timedelta(milliseconds=1))


_of_all: tuple[weakref.ref[Any], Guard] | None = None


def guard() -> Guard:
    """The guard over all ranks of the default process group; each rank opens it when it first asks."""
    global _of_all
    world = dist.group.WORLD
    if _of_all is None or _of_all[0]() is not world:
        if _of_all is not None:
            _of_all[1].close()
        default: Any = distributed_c10d._get_default_store()
        store = distributed_c10d.PrefixStore("microbatch", default.clone())
        _of_all = weakref.ref(world), Guard(store, dist.get_rank(), dist.get_world_size())
    return _of_all[1]
