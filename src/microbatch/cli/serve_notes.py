"""What the library warns of while a server starts, said once it serves, beside what else there is to know."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class Collected(logging.Handler):
    """Keeps warnings until `end`; from then on they go to standard error as they come."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def end(self) -> list[str]:
        """The warnings so far, each once."""
        logger = logging.getLogger("microbatch")
        logger.removeHandler(self)
        if not logger.handlers:
            told = logging.StreamHandler()
            told.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
            logger.addHandler(told)
        texts, self.texts = list(dict.fromkeys(self.texts)), []
        return texts


@contextmanager
def collected_warnings() -> Iterator[Collected]:
    """Inside, warnings of the library are kept."""
    logger = logging.getLogger("microbatch")
    before, propagates = list(logger.handlers), logger.propagate
    kept = Collected()
    logger.handlers, logger.propagate = [kept], False
    try:
        yield kept
    finally:
        logger.handlers, logger.propagate = before, propagates
