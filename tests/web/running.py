"""Real servers on loopback, for tests: in a thread of this process, or in a process of their own."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from microbatch.web.application import application
from microbatch.web.server import bind, url_of, uvicorn_server

PATIENCE = 60.0
"""Seconds that a server may take to start or to end on a loaded machine."""


@contextmanager
def running(engine: Any, *, server: Mapping[str, Any] | None = None, **options: Any) -> Iterator[str]:
    """The URL of a server in a thread, on a free port of 127.0.0.1; it drains at the end.

    Args:
        engine: one, served as ``model``, or several by name. Started and closed here.
        server: settings of `microbatch.web.server.serve`.
        options: settings of `microbatch.web.application.application`.
    """
    engines = engine if isinstance(engine, Mapping) else {"model": engine}
    with running_application(application(engines, **options), **(server or {})) as url:
        yield url


@contextmanager
def running_application(app: Any, *, drain_timeout: float = 5.0, max_connections: int = 10_000) -> Iterator[str]:
    """The same for an application that was made already."""
    app.start()
    began = threading.Event()
    listener = bind("127.0.0.1", 0)
    server = uvicorn_server(app, drain_timeout, None, None, began.set, max_connections)
    failed: queue.Queue[BaseException] = queue.Queue()

    def run() -> None:
        try:
            server.run(sockets=[listener])
        except BaseException as error:
            failed.put(error)
            began.set()

    thread = threading.Thread(target=run, name="server")
    thread.start()
    try:
        assert began.wait(PATIENCE)
        if not failed.empty():
            raise failed.get()
        yield url_of(listener)
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the server did not end"


@dataclass(frozen=True)
class Process:
    """A server in a process of its own.

    Attributes:
        process: to send signals to.
        url: where it answers.
    """

    process: subprocess.Popen[str]
    url: str

    def wait(self) -> int:
        """Its exit status."""
        return self.process.wait(PATIENCE)


@contextmanager
def process(code: str | Sequence[str], *, cwd: Path | None = None, timeout: float = PATIENCE) -> Iterator[Process]:
    """A server in a process of its own, killed at the end if it still runs.

    Args:
        code: of Python, or a command line; it prints the URL on a line of its standard output once it serves, as
            ``started=print`` of `microbatch.web.server.serve` does.
        cwd: the folder that it runs in; the root of the source tree by default.
        timeout: seconds that it may take to start.
    """
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-u", "-c", code] if isinstance(code, str) else list(code)
    environment = os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}", "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        command, cwd=cwd or root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield Process(child, _url_told_by(child, timeout))
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate(timeout=PATIENCE)


def _url_told_by(child: subprocess.Popen[str], timeout: float) -> str:
    """The first URL on standard output."""
    found: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            if match := re.search(r"https?://[\w.:\[\]]+", line):
                found.put(match[0])
                return
        found.put(None)

    threading.Thread(target=read, daemon=True).start()
    url = found.get(timeout=timeout)
    if url is None:
        raise RuntimeError(f"the server ended with {child.wait(PATIENCE)}: {child.communicate()[1][-2000:]}")
    return url
