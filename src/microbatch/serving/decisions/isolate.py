"""A batch that fails is run again in halves, so that a bad item fails alone; out of memory makes batches smaller.

No thread and no clock: `run` is what runs the items of some entries, and may be anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from microbatch.errors import InvalidOutput, ModelFailed, WorkerDied
from microbatch.serving.decisions.queue import Entry

logger = logging.getLogger(__name__)

RAISE_AFTER = 64
"""Batches at the limit without running out of memory after which one is tried that is larger by an eighth."""

Run = Callable[[list[Entry]], Sequence[Any]]
Give = Callable[[Sequence[Entry], Sequence[Any]], None]
"""Gives each entry its answer; one that is an exception is a failure."""


class SizeLimit:
    """The largest batch that memory allows, as far as is known: halved when it runs out, raised slowly."""

    def __init__(self, most: int) -> None:
        self.most = self.now = most
        self._passed = 0

    def ran_out(self, size: int) -> None:
        """A batch of this size ran out of memory."""
        self.now = max(1, min(self.now, size // 2))
        self._passed = 0

    def passed(self, size: int) -> None:
        """A batch of this size ran."""
        if size < self.now or self.now == self.most:
            return
        self._passed += 1
        if self._passed >= RAISE_AFTER:
            self._passed = 0
            self.now = min(self.most, self.now + max(1, self.now // 8))


def run_isolated(
    entries: list[Entry],
    run: Run,
    give: Give,
    limit: SizeLimit,
    *,
    stateful: bool,
    out_of_memory: Callable[[BaseException], bool],
) -> int:
    """Run a batch and give every entry its answer; how many calls it took.

    A call that raises is repeated in halves: for one bad item of n at most 2 * ceil(log2 n) further calls, and only
    this item gets its error. Entries that were settled meanwhile (expired, cancelled) are left out of them. After
    a worker died its items are tried once more, each alone: whichever of them ends a process ends it alone.

    Args:
        entries: the batch.
        run: runs the items of some entries; a result for each.
        give: takes answers.
        limit: learns about memory.
        stateful: nothing is ever run twice: all items of a batch that fails get its error.
        out_of_memory: whether an error says so.
    """
    calls, left = 0, [entries]
    while left:
        batch = [entry for entry in left.pop() if not entry.settled]
        if len(batch) > limit.now:  # memory ran out meanwhile
            left.append(batch[limit.now :])
            batch = batch[: limit.now]
        if not batch:
            continue
        calls += 1
        error = _attempt(batch, run, give)
        if error is None:
            limit.passed(len(batch))
            continue
        if out_of_memory(error):
            limit.ran_out(len(batch))
            logger.warning("A batch of %d ran out of memory; batches are at most %d now.", len(batch), limit.now)
        left.extend(reversed(_again(batch, error, give, stateful=stateful)))
    return calls


def _attempt(batch: list[Entry], run: Run, give: Give) -> Exception | None:
    try:
        results = run(batch)
        check_count(len(batch), results)
    except Exception as error:
        return error
    except BaseException as error:  # sys.exit() in a model must not end the thread that serves
        return ModelFailed(f"{type(error).__name__}: {error}")
    give(batch, results)
    return None


def _again(batch: list[Entry], error: Exception, give: Give, *, stateful: bool) -> list[list[Entry]]:
    """What is still to be run after a failure, in order; whoever has no further try gets the error."""
    if stateful:
        give(batch, [error] * len(batch))
        return []
    if isinstance(error, WorkerDied):
        lost = [entry for entry in batch if entry.retried]
        give(lost, [error] * len(lost))
        fresh = [entry for entry in batch if not entry.retried]
        for entry in fresh:
            entry.retried = True
        return [[entry] for entry in fresh]
    if len(batch) == 1:
        give(batch, [error])
        return []
    half = (len(batch) + 1) // 2
    return [batch[:half], batch[half:]]


def check_count(items: int, results: object) -> None:
    """A list in must be a list out of the same length.

    Raises:
        InvalidOutput: it is not; with both numbers.
    """
    remedy = "Return a list with one result for each item, in the order of the items."
    try:
        count = len(results)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        raise InvalidOutput(f"{items} items went in and a {type(results).__name__} came out.", remedy) from None
    if isinstance(results, str | bytes | dict):
        raise InvalidOutput(f"{items} items went in and a {type(results).__name__} came out.", remedy)
    if count != items:
        raise InvalidOutput(f"{items} items went in and {count} results came out.", remedy)
