"""Ranks of a process group, each a process that runs whole tables of cases and writes what it found as JSON."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]

Found = list[dict[str, Any]]
"""What each rank found, by table and case."""


def run_ranks(world: int, folder: Path, tables: Sequence[str], seconds: float) -> Found:
    """Start a group, let it run its tables, and read what it found.

    Args:
        world: number of ranks.
        folder: for what they write.
        tables: as ``module:function``, a function that yields cases and what was found.
        seconds: that they may take.
    """
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(world):
        command = [sys.executable, "-m", "tests.training.ranks", str(rank), str(world), str(folder), *tables]
        with (folder / f"said{rank}").open("w") as log:
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=log))
    try:
        for process in processes:
            process.wait(seconds)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = [(folder / f"said{rank}").read_text() for rank in range(world)]
    assert [process.returncode for process in processes] == [0] * world, said
    found: Found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]
    for one in found:
        assert "error" not in one, one["error"]
    return found


def main(rank: int, world: int, folder: Path, tables: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # a Linear of 3-d inputs
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    found: dict[str, object] = {}
    try:
        for table in tables:
            module, name = table.split(":")
            kind = module.split(".")[-1].removesuffix("_cases")
            found[f"{kind}:{name}"] = dict(getattr(importlib.import_module(module), name)())
    except BaseException:
        found["error"] = traceback.format_exc()
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    if "error" not in found:
        dist.barrier()  # a rank that ends while another still takes its groups down makes that one abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
