"""Several calls in lock step: each runs until it waits for the others, and goes on when all have come so far.

Each call has a thread of its own, since a model's forward cannot be left and entered again in any other way; but only
one runs at a time, in order. Threads do not share gradient mode and the like, so each task sets its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

Wait = Callable[[Any], Any]
"""Called by a task with what it has to say; returns what it is answered."""

Task = Callable[[Wait], None]


class OutOfStep(Exception):
    """Some tasks have ended while others wait for them."""


class _Abandoned(BaseException):
    """Ends a task whose fellows have failed."""


class _Runner:
    """One task in its thread.

    Attributes:
        said: what it waits with.
        error: what it raised.
        ended: whether it has returned or raised.
    """

    def __init__(self, task: Task) -> None:
        self.said: Any = None
        self.error: BaseException | None = None
        self.ended = False
        self._answer: Any = None
        self._abandoned = False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=[task], daemon=True)
        self._thread.start()

    def turn(self, answer: Any = None) -> None:
        """Let it run until it waits or ends; only the caller or the task runs at any time."""
        self._answer = answer
        self._go.release()
        self._stopped.acquire()
        if self.ended:
            self._thread.join()

    def abandon(self) -> None:
        if not self.ended:
            self._abandoned = True
            self.turn()

    def _run(self, task: Task) -> None:
        try:
            self._go.acquire()
            if not self._abandoned:
                task(self._wait)
        except _Abandoned:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.ended = True
            self._stopped.release()

    def _wait(self, said: Any) -> Any:
        self.said = said
        self._stopped.release()
        self._go.acquire()
        if self._abandoned:
            raise _Abandoned
        answer, self._answer = self._answer, None
        return answer


def run_in_lockstep(
    tasks: Sequence[Task], answer: Callable[[list[Any]], Any], turn: Callable[[int], AbstractContextManager[object]]
) -> None:
    """Run all tasks to their ends.

    Args:
        tasks: what runs.
        answer: of what all of them said; each is answered the same.
        turn: entered around each turn of a task, given its number.

    Raises:
        OutOfStep: some ended while others waited.
        Exception: the first that a task, or `answer`, raised; no task goes on.
    """
    runners = [_Runner(task) for task in tasks]
    try:
        answered: Any = None
        while runners and not all(runner.ended for runner in runners):
            for number, runner in enumerate(runners):
                with turn(number):
                    runner.turn(answered)
                if runner.error is not None:
                    raise runner.error
            if any(runner.ended for runner in runners) and not all(runner.ended for runner in runners):
                raise OutOfStep
            if not runners[0].ended:
                answered = answer([runner.said for runner in runners])
    finally:
        for runner in runners:
            runner.abandon()
            runner.error = None
