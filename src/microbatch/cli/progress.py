"""A bar on a terminal that says what is being measured; nothing in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from microbatch.batch.progress import Progress as Progress
from microbatch.batch.progress import progress_bar as progress_bar


@contextmanager
def measuring() -> Iterator[Progress | None]:
    """For the time of a measurement: `progress_bar`, and standard output kept free for the answer.

    What a model prints while it runs goes to standard error, so that ``--json`` stays one document.
    """
    with progress_bar() as progress, redirect_stdout(sys.stderr):
        yield progress
