"""Time of a call on a machine that does other things too."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from microbatch.serving.engine import undisturbed as module
from microbatch.serving.engine.undisturbed import SCHEDULER, undisturbed

pytestmark = pytest.mark.alone

BUSY = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(1, flush=True)\nwhile True: pass"


def work(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.skipif(not SCHEDULER.exists(), reason="this system does not tell how long a thread waits for a core")
def test_time_that_others_had_the_core_does_not_count() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    other = subprocess.Popen([sys.executable, "-c", BUSY, str(core)], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None and other.stdout.readline()
        os.sched_setaffinity(0, {core})
        start = time.perf_counter()
        seconds = undisturbed(lambda: work(0.3))
        took = time.perf_counter() - start
    finally:
        os.sched_setaffinity(0, before)
        other.kill()
        other.communicate()
    assert took > 0.45, "half of the core belonged to the other process"
    assert 0.29 < seconds < 0.75 * took


def test_time_asleep_counts() -> None:
    assert undisturbed(lambda: time.sleep(0.1)) > 0.09


def test_a_system_that_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SCHEDULER", tmp_path / "nothing")
    assert undisturbed(lambda: time.sleep(0.02)) > 0.019
    (tmp_path / "nothing").write_text("0\n")
    assert undisturbed(lambda: time.sleep(0.02)) > 0.019
