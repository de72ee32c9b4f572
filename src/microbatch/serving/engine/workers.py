"""What runs batches: this thread, or a process of its own that is started again when it dies."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from microbatch.errors import InvalidSettings, WorkerDied
from microbatch.serving.engine.carrier import Carrier
from microbatch.serving.engine.worker_process import ByName, main

logger = logging.getLogger(__name__)

Runner = Callable[[list[Any]], Any]

LONGEST_PAUSE = 5.0
"""Seconds between two starts of a process that cannot start, at most."""


class Worker(Protocol):
    """What a thread of the engine drives; its methods are called by that thread only, but for `alive`."""

    @property
    def alive(self) -> bool:
        """Whether it could run a batch now."""

    @property
    def restarts(self) -> int:
        """How often it had to be started again."""

    @property
    def device(self) -> str:
        """Whose memory this process gives back when a batch ran out of it."""

    def start(self) -> None:
        """Be able to run; does nothing where it is."""

    def run(self, items: list[Any]) -> Any:
        """The results of a batch."""

    def watch(self, died: Callable[[], None]) -> None:
        """Call back, from any thread, each time it dies."""

    def stop(self) -> None:
        """Give back what it holds."""


class InThread:
    """Runs in the thread that asks."""

    alive, restarts = True, 0

    def __init__(self, runner: Runner) -> None:
        self.run = runner
        self.device = getattr(runner, "device", "cpu")

    def start(self) -> None:
        """Nothing to do."""

    def watch(self, died: Callable[[], None]) -> None:
        """It lives as long as the server does."""

    def stop(self) -> None:
        """Nothing to do."""


class InProcess:
    """Runs in a process, spawned so that neither threads nor locks are copied into it."""

    def __init__(self, spec: Any) -> None:
        """
        Args:
            spec: a `ByName`, or what can be pickled and runs a list of items.
        """
        self._spec = spec
        self._process: BaseProcess | None = None
        self._carrier: Carrier | None = None
        self._failures = self._pid = 0
        self._told: Callable[[], None] = _nobody
        self.restarts = -1
        self.device = "cpu"  # memory elsewhere is the process's own, which gives it back itself

    @property
    def alive(self) -> bool:
        return self._carrier is not None and not _has_ended(self._pid, os.WNOHANG)

    @property
    def pid(self) -> int | None:
        """Of the process, for those who watch it."""
        return self._pid or None

    def start(self) -> None:
        """A process that is ready.

        Raises:
            WorkerDied: it ended before it was ready.
            Exception: what loading the function raised in it.
        """
        if self.alive:
            return
        self.stop()
        if self._failures:
            time.sleep(min(LONGEST_PAUSE, 0.1 * 2**self._failures))
        self._failures += 1
        self.restarts += 1
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(target=main, args=(theirs, os.getpid(), self._spec), daemon=True)
        self._process.start()
        self._pid = self._process.pid or 0
        theirs.close()
        carrier = Carrier(ours, self._pid)
        ready, value = self._answer(carrier)
        if not ready:
            raise value
        self._carrier = carrier
        self._failures = 0
        threading.Thread(target=self._wait_for_end, args=(self._pid,), daemon=True).start()

    def watch(self, died: Callable[[], None]) -> None:
        """Call back each time the process ends."""
        self._told = died

    def run(self, items: list[Any]) -> Any:
        """The results; what the function raised is raised.

        Raises:
            WorkerDied: the process ended meanwhile.
        """
        self.start()
        assert self._carrier is not None
        try:
            self._carrier.send(items)
        except OSError:
            raise self._died() from None
        done, value = self._answer(self._carrier)
        if not done:
            raise value
        return value

    def stop(self) -> None:
        """End the process: by closing its pipe, and by force where that does not help."""
        process, carrier, self._process, self._carrier = self._process, self._carrier, None, None
        if carrier is not None:
            carrier.close()
        if process is None:
            return
        process.join(1.0 if carrier is not None else 0.0)
        if process.is_alive():
            process.kill()
            process.join()
        with suppress(ValueError):  # another thread took its exit status and is about to note it
            process.close()

    def _wait_for_end(self, pid: int) -> None:
        _has_ended(pid)
        self._told()

    def _answer(self, carrier: Carrier) -> Any:
        assert self._process is not None
        wait([carrier.connection, self._process.sentinel])
        try:
            return carrier.receive()
        except (EOFError, OSError):
            raise self._died() from None

    def _died(self) -> WorkerDied:
        process, self._carrier = self._process, None
        code = None
        if process is not None:
            process.join(1.0)
            code = process.exitcode
        logger.warning("A worker process ended with %s; it is started again.", code)
        return WorkerDied(
            f"The worker process ended with exit status {code} while it ran the request.",
            "Send it again; if it ends the process each time, run the function on it by hand.",
        )


def _has_ended(pid: int, options: int = 0) -> bool:
    """Whether a child has ended, waiting for it unless told not to; its exit status is left for who owns the process.

    Two threads that both take an exit status see the process alive in turn, which `multiprocessing` does not expect.
    """
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | options) is not None
    except ChildProcessError:
        return True


def _nobody() -> None:
    """Who is told before anybody watches."""


def spec_of(function: Runner) -> ByName:
    """How a process finds the function.

    Raises:
        InvalidSettings: it cannot be imported by name.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not name or "<" in name:
        raise InvalidSettings(
            f"{name or function!r} cannot be imported by name, which worker processes need.",
            "Define it at the top of a module, or use workers in threads.",
        )
    return ByName(module, name)
