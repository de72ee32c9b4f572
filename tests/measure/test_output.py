"""Text written at the file descriptor, captured and given back."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path


def run(root: Path, body: str) -> subprocess.CompletedProcess[str]:
    """Lines in a process of their own, whose streams are real files."""
    code = "import os, sys\nfrom microbatch.measure.output import *\n" + textwrap.dedent(body)
    environment = {"PYTHONPATH": str(root / "src"), "PATH": os.environ["PATH"]}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_what_is_written_below_python_is_captured(root: Path) -> None:
    done = run(
        root,
        """
        print("before")
        with captured(1) as output:
            os.write(1, b"from C\\n")
            print("from Python")
        print("after", repr(output.text))
        """,
    )
    assert done.stderr == ""
    assert done.stdout == "before\nafter 'from C\\nfrom Python\\n'\n"


def test_the_stream_is_put_back_after_an_exception(root: Path) -> None:
    done = run(
        root,
        """
        files = len(os.listdir("/proc/self/fd"))
        try:
            with captured(1):
                print("lost")
                raise KeyError
        except KeyError:
            print("back", len(os.listdir("/proc/self/fd")) - files)
        """,
    )
    assert done.stdout == "back 0\n"


def test_only_the_named_lines_are_dropped(root: Path) -> None:
    done = run(
        root,
        """
        try:
            with without_lines(2, "USDT:"):
                os.write(2, b"USDT: noise\\nmine\\n")
                print("out")
                raise KeyError
        except KeyError:
            os.write(2, b"end\\n")
        """,
    )
    assert (done.stdout, done.stderr) == ("out\n", "mine\nend\n")
