"""The bar: on a terminal it says what is measured, in a pipe it is silent."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading

import pytest

from microbatch.cli.progress import progress_bar

pytestmark = pytest.mark.alone

CODE = """
import threading
from microbatch.cli.progress import progress_bar
with progress_bar() as progress:
    progress(0.25, "batch 32, round 2 [of 9]")
    print("threads", threading.active_count())
"""


def test_no_bar_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar() as progress:
        assert progress is None
    assert capsys.readouterr().err == ""


def read_all(file: int) -> bytes:
    data = b""
    while True:
        try:
            chunk = os.read(file, 4096)
        except OSError:  # the other side is closed
            return data
        if not chunk:
            return data
        data += chunk


def test_a_terminal_is_told_what_is_measured_without_a_thread() -> None:
    controller, terminal = pty.openpty()
    seen: list[bytes] = []
    reader = threading.Thread(target=lambda: seen.append(read_all(controller)))
    reader.start()
    done = subprocess.run(
        [sys.executable, "-c", CODE], stderr=terminal, stdout=subprocess.PIPE, text=True, check=True, timeout=60
    )
    os.close(terminal)
    reader.join(timeout=10)
    os.close(controller)
    shown = b"".join(seen).decode()
    assert "batch 32, round 2 [of 9]" in shown
    assert "25%" in shown
    assert done.stdout == "threads 1\n"
