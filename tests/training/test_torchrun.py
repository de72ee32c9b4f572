"""Training as users start it: torchrun, two processes on this machine; and a process that is killed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.alone

SCRIPT = "tests/training/torchrun_job.py"
SECONDS = 120
NO_HANG = 20  # gloo's own timeout is 30 minutes


def environment(root: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def test_ddp_and_fsdp2_under_torchrun_equal_one_process(root: Path, tmp_path: Path) -> None:
    """The rendezvous on loopback, on a port that is free."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", SCRIPT, str(tmp_path), "ddp", "fsdp"]
    done = subprocess.run(
        command, cwd=root, env=environment(root), capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    ranks: list[Any] = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert all(one[kind]["difference"] <= 1e-12 for one in ranks for kind in ("ddp", "fsdp")), ranks
    assert [one["ddp"]["attempts"] for one in ranks] == [[1, 1], [2, 1]]
    assert [one["fsdp"]["attempts"] for one in ranks] == [[2, 1], [2, 1]]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_killed_rank_ends_the_others_with_a_message(kind: str, root: Path, tmp_path: Path) -> None:
    """SIGKILL in the backward pass of the second step; no torchrun around them that would end the rest."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = environment(root) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(tmp_path), f"{kind} killed"],
            cwd=root,
            env=common | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        assert processes[1].wait(SECONDS) == -9
        began = time.monotonic()
        processes[0].wait(NO_HANG)
        assert time.monotonic() - began < NO_HANG
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    found = json.loads((tmp_path / "rank0.json").read_text())[f"{kind} killed"]
    assert "Rank 0 of 2 lost the other ranks" in found["error"]
    assert "start again from the last checkpoint" in found["error"]
