"""Out-of-memory that is real: an address space with a cap. `benchmarks/out_of_memory.py` runs twenty of these."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone

ROOM = {"mlp": "6e7", "conv": "5e7", "attention": "5e7", "bf16": "6e7"}


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is enforced on Linux only")
@pytest.mark.parametrize("kind", ROOM)
def test_a_step_survives_and_trains_what_an_uncapped_one_does(kind: str, root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.capped", kind, "0", ROOM[kind]],
        cwd=root,
        env={"PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert any(len(attempts) > 1 for attempts in report["attempts"]), report
    assert report["difference"] == 0.0
    assert all(reason.startswith(("CPU allocator", "oneDNN", "bad_alloc", "Python")) for reason in report["reasons"])
