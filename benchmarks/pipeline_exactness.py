"""Every schedule in every situation against one process, and the same for plain torch.distributed.pipelining.

    PYTHONPATH=src:. python benchmarks/pipeline_exactness.py [--ranks 2] [--dtype fp64] [--out FILE]

Starts the ranks itself, one process group for the whole table. A cell is the largest difference of gradients over the
largest gradient (of outputs, losses and weights alike); ``refused`` is an error before anything ran.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BOUND = {"fp64": 1e-12, "fp32": 1e-6}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", choices=BOUND, default="fp64")
    parser.add_argument(
        "--part", type=int, help="one cell in so many, of ours; by default all on 2 ranks, and one in 2 on more"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.part = options.part or (1 if options.ranks <= 2 else 2)
    if options.rank is not None:
        run_rank(options)
        return
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = start(options, folder)
    seconds = time.perf_counter() - started
    found |= {"ranks": options.ranks, "dtype": options.dtype, "seconds": seconds, "bound": BOUND[options.dtype]}
    show(found)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(0 if not over(found["ours"], found["bound"]) + over(found["meshes"], found["bound"]) else 1)


def start(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--ranks", str(options.ranks), "--dtype", options.dtype, "--folder", folder,
               "--part", str(options.part)]  # fmt: skip
    processes = [
        subprocess.Popen([*command, "--rank", str(rank)], env=environment, cwd=ROOT) for rank in range(options.ranks)
    ]
    try:
        for process in processes:
            if process.wait() != 0:
                raise SystemExit("A rank failed; see above.")
    finally:
        for process in processes:
            process.kill()
    found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
    return found


def run_rank(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    meeting = f"file://{options.folder / 'meeting'}"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=options.rank, world_size=options.ranks, timeout=timedelta(seconds=60)
    )
    try:
        found = {"ours": ours(options), "meshes": on_meshes(options), "torch": plain(options)}
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    if options.rank == 0:
        (options.folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def ours(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    import torch

    from microbatch.errors import MicrobatchError
    from tests.pipeline.execution.situations import SITUATIONS, Made
    from tests.pipeline.execution.table_cases import cells

    dtype = {"fp64": torch.float64, "fp32": torch.float32}[options.dtype]
    table: dict[str, dict[str, Any]] = {}
    for schedule, situation in cells(options.part):
        try:
            found: Any = SITUATIONS[situation](Made(schedule, dtype=dtype))
        except MicrobatchError as error:
            found = f"refused: {error}"
        table.setdefault(schedule, {})[situation] = found
    return table


def on_meshes(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """2 × 2, in float64: pipelines with replicas, with stages sharded over them, and with layers shared out."""
    from tests.pipeline.execution.table_cases import meshes, tensor_meshes

    table: dict[str, dict[str, Any]] = {}
    if options.ranks != 4 or options.dtype != "fp64":
        return table
    for case, found in meshes():
        schedule, kind = case.split()
        table.setdefault(schedule, {})[f"pipeline x data, {kind}"] = max(found.values())
    for schedule, found in tensor_meshes():
        table[schedule]["pipeline x tensor"] = max(found.values())
    return table


def plain(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    import torch

    from tests.pipeline.execution.plain_torch import PLAIN, SCHEDULES_OF_TORCH

    dtype = {"fp64": torch.float64, "fp32": torch.float32}[options.dtype]
    return {
        schedule: {situation: run(schedule, dtype) for situation, run in PLAIN.items()}
        for schedule in SCHEDULES_OF_TORCH
    }


def over(table: dict[str, dict[str, Any]], bound: float) -> list[str]:
    """Cells that are not within the bound."""
    return [
        f"{schedule} {situation}: {value}"
        for schedule, row in table.items()
        for situation, value in row.items()
        if isinstance(value, str) or not value <= bound
    ]


def show(found: dict[str, Any]) -> None:
    for who, title in (
        ("ours", "microbatch.Pipeline"),
        ("meshes", "microbatch.Pipeline on meshes of 2 x 2"),
        ("torch", "torch.distributed.pipelining by itself"),
    ):
        table = found[who]
        if not table:
            continue
        situations = list(dict.fromkeys(situation for row in table.values() for situation in row))
        print(f"\n{title}, {found['ranks']} ranks, {found['dtype']}: largest difference from one process\n")
        print("| situation | " + " | ".join(table) + " |")
        print("|---" * (len(table) + 1) + "|")
        for situation in situations:
            cells = [_cell(row.get(situation)) for row in table.values()]
            print(f"| {situation} | " + " | ".join(cells) + " |")
    bad = over(found["ours"], found["bound"]) + over(found["meshes"], found["bound"])
    count = sum(len(row) for who in ("ours", "meshes") for row in found[who].values())
    print(f"\n{count - len(bad)} of {count} cells within {found['bound']:g} in {found['seconds']:.0f} s.")
    for line in bad:
        print("  " + line)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value.split(":")[0] if isinstance(value, str) else f"{value:.1e}"


if __name__ == "__main__":
    main()
