"""Runs groups of real processes one after the other, forked from one that has loaded torch: a tenth of a second each.

``python -m tests.training.nursery FOLDER MODULE`` runs the module's `GROUPS`: for each name a list of phases, each with
a number of ranks, a function and its arguments. Every rank writes what the function returned, or its traceback, as
JSON; a rank that was killed writes nothing.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
SECONDS = 60


@dataclass(frozen=True)
class Phase:
    """One group of processes: `function(folder, **arguments)` on each rank; `folder` is shared by a name's phases."""

    ranks: int
    function: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)


def run(folder: Path, module: str) -> dict[str, list[list[Any]]]:
    """What each rank of each phase returned, by name; None for a rank that was killed."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.training.nursery", str(folder), module]
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=300, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[list[Any]]] = json.loads((folder / "found.json").read_text())
    for name, phases in found.items():
        for rank in (rank for phase in phases for rank in phase if rank):
            assert "error" not in rank, f"{name}: {rank['error']}"
    return found


def main(folder: Path, module: str) -> None:
    torch.set_num_threads(1)
    for slow in ("torch._dynamo", "torch._inductor.config", "torch.onnx", "safetensors.torch", "numpy.random"):
        importlib.import_module(slow)  # the first optimizer and checkpoint import these: once, not in each child
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # a Linear of 3-d inputs
    groups: Mapping[str, Sequence[Phase]] = importlib.import_module(module).GROUPS
    found = {name: [_run_phase(folder / name, phase) for phase in phases] for name, phases in groups.items()}
    (folder / "found.json").write_text(json.dumps(found))


def _run_phase(folder: Path, phase: Phase) -> list[Any]:
    folder.mkdir(exist_ok=True)
    (folder / "meeting").unlink(missing_ok=True)
    children = [_fork(folder, rank, phase) for rank in range(phase.ranks)]
    ended = time.monotonic() + SECONDS
    while children and time.monotonic() < ended:
        children = [child for child in children if os.waitpid(child, os.WNOHANG) == (0, 0)]
        time.sleep(0.005)
    for child in children:
        os.kill(child, 9)
        os.waitpid(child, 0)
    files = [folder / f"rank{rank}.json" for rank in range(phase.ranks)]
    found = [json.loads(file.read_text()) if file.exists() else None for file in files]
    for file in files:
        file.unlink(missing_ok=True)
    return [{"error": f"hung for {SECONDS} s"}] if children else found


def _fork(folder: Path, rank: int, phase: Phase) -> int:
    child = os.fork()
    if child:
        return child
    try:
        if phase.ranks > 1:
            meeting = f"file://{folder / 'meeting'}"
            wait = timedelta(seconds=SECONDS)
            dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=phase.ranks, timeout=wait)
        found = phase.function(folder, **phase.arguments)
    except BaseException:
        found = {"error": traceback.format_exc()}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
