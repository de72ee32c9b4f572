"""The noise scale over ranks, and bytes on the wire; run by `nursery.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.training.nursery import Phase
from tests.training.planted_noise import PLANTED
from tests.training.wire_cases import GROUPS as WIRE

STEPS, FEW_STEPS, ITEMS = 150, 15, 24


def planted(folder: Path, name: str, kind: str, steps: int = STEPS) -> dict[str, Any]:
    """Ranks have 6 and 18 samples in pieces of 4."""
    case, rank = PLANTED[name], dist.get_rank()
    model: Any = case.model()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    group = dist.group.WORLD if kind == "replicas" else None
    step = case.step(model, 4, process_group=group)
    generator = torch.Generator().manual_seed(0)
    result = None
    for _ in range(steps):
        batch = case.batch(ITEMS, generator)
        result = step({key: value[:6] if rank == 0 else value[6:] for key, value in batch.items()})
    assert result is not None and result.noise_scale is not None
    return {**result.to_json()["noise_scale"], "calls": result.communication_calls}


GROUPS: dict[str, list[Phase]] = {
    "few dimensions ddp": [Phase(2, planted, {"name": "few dimensions", "kind": "ddp"})],
    "weighted replicas": [Phase(2, planted, {"name": "weighted", "kind": "replicas"})],
    "the same": [Phase(2, planted, {"name": "weighted", "kind": kind, "steps": FEW_STEPS}) for kind in ("ddp", "fsdp")],
    **WIRE,
}
