"""One rank of a process group: runs a whole table of cases and writes what it found as JSON."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


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
