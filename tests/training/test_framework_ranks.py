"""Two processes under torchrun, inside each framework: the gradient of one pass over the batches of both."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone

PACKAGES = ("accelerate", "transformers", "pytorch_lightning")


def test_two_ranks_with_pieces_of_their_own_sizes_are_exact(root: Path, tmp_path: Path) -> None:
    missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*launcher, "-m", "tests.training.framework_ranks"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout.strip().splitlines()[-1])
    assert errors.keys() == {"Accelerate", "HF Trainer", "Lightning"}
    assert max(errors.values()) <= 1e-12
