"""How a command ends its process: quickly, and with nothing lost."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.alone

LEAVE = "import sys, atexit, threading, time; from microbatch.cli.quick import leave; {before}; leave(3)"


def ended(before: str) -> subprocess.CompletedProcess[str]:
    code = LEAVE.format(before=before)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize("loaded", ["sys.modules['torch'] = sys", "pass"], ids=["with torch", "without torch"])
def test_the_exit_status_and_everything_written_arrive(loaded: str) -> None:
    done = ended(f"{loaded}; atexit.register(print, 'exit function'); print('x' * 100_000)")
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines() == ["x" * 100_000, "exit function"]


def test_torch_is_not_taken_apart() -> None:
    class_with_end = "type('End', (), {'__del__': lambda self: print('taken apart')})()"
    assert ended(f"sys.modules['torch'] = sys; end = {class_with_end}").stdout == ""
    assert ended(f"end = {class_with_end}").stdout == "taken apart\n"


def test_a_thread_that_still_works_is_waited_for() -> None:
    work = "threading.Thread(target=lambda: (time.sleep(0.3), print('done'))).start()"
    done = ended(f"sys.modules['torch'] = sys; {work}")
    assert (done.returncode, done.stdout) == (3, "done\n"), done.stderr
