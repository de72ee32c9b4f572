"""Who may look on: told of each request as it comes and of each batch as it runs. Nobody does unless asked to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

from microbatch.serving.decisions.metrics import LaunchRecord
from microbatch.serving.decisions.queue import Entry

logger = logging.getLogger(__name__)

Told = Callable[[LaunchRecord], None]


class Watch(Protocol):
    """Looks on at an engine; see `DynamicBatcher.watch`. Called from the threads of the engine."""

    def mark(self) -> object:
        """What to remember of the request that is coming in; called where it comes in."""

    def batch(self, marks: Sequence[object], reason: str) -> AbstractContextManager[Told]:
        """Around a batch, in the thread of its worker, before any of its requests is answered.

        Args:
            marks: of the requests with an item in it, each once.
            reason: why it is launched.

        Returns:
            what is told the record of the batch when it has run.
        """


@contextmanager
def watched(watch: Watch, entries: Sequence[Entry], reason: str) -> Iterator[Told]:
    """Around a batch of these entries. A watch that fails is logged: nobody is denied an answer for it."""
    marks = list({entry.reply: entry.reply.mark for entry in entries}.values())
    with ExitStack() as stack:
        try:
            told = stack.enter_context(watch.batch(marks, reason))
        except Exception:
            logger.exception("a batch could not be watched")
            told = unwatched
        yield told


def unwatched(record: LaunchRecord) -> None:
    """Nobody looks on."""
