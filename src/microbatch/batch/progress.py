"""A bar on a terminal that says how far a long run is; nothing in a pipe. Loads no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[float, str], None]
"""Called with the share of the work that is done (0 to 1) and what is being done now."""


@contextmanager
def progress_bar() -> Iterator[Progress | None]:
    """A bar on standard error while the block runs, or None where that is no terminal.

    The bar is redrawn only when it is called, never by a thread of its own: a thread that wakes during a timed call
    would be measured with it.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(24), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    console = Console(stderr=True)
    with Bar(*columns, console=console, transient=True, auto_refresh=False, redirect_stdout=False) as bar:
        task = bar.add_task("starting", total=1.0)

        def show(fraction: float, text: str) -> None:
            bar.update(task, completed=fraction, description=text, refresh=True)

        yield show
