"""Twenty training jobs that really run out of memory, under a capped address space: how many go on, and how exactly.

    PYTHONPATH=src:. python benchmarks/out_of_memory.py > benchmarks/results/out_of_memory.txt

Each job (MLP, convolutions, attention, bf16 autocast; five caps and seeds each) takes three steps of a batch of 64 with
AdamW. A job is recovered when every step ends, memory ran out at least once, and the weights equal, bit for bit, those
of the same steps in the same pieces without a cap.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOM = {"mlp": 60e6, "conv": 50e6, "attention": 50e6, "bf16": 60e6}
"""Bytes by which the address space may grow."""


def run(kind: str, seed: int) -> dict[str, object]:
    """The report of one job; its last words where it died."""
    room = ROOM[kind] * (1 + 0.05 * seed)
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.capped", kind, str(seed), str(room)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        return {"died": done.stderr.strip().split("\n")[-1][:150]}
    report: dict[str, object] = json.loads(done.stdout)
    return report


def main() -> int:
    recovered = 0
    for kind in ROOM:
        for seed in range(5):
            report = run(kind, seed)
            attempts: list[list[int]] = report.get("attempts", [])  # type: ignore[assignment]
            good = any(len(sizes) > 1 for sizes in attempts) and report["difference"] == 0.0
            recovered += good
            verdict = "recovered" if good else "NOT recovered"
            print(
                f"{kind:10} {seed}  {verdict}  sizes {attempts}  {report.get('phases', report.get('died'))}", flush=True
            )
    print(f"{recovered} of {5 * len(ROOM)} recovered, each equal to the uncapped steps to the last bit")
    return 0 if recovered == 5 * len(ROOM) else 1


if __name__ == "__main__":
    raise SystemExit(main())
