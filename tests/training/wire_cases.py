"""What goes over the wire in a step, counted at torch's own operators; run by `nursery.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.training.jobs import by_token, sequences, tagger
from tests.training.nursery import Phase
from tests.training.replicated_cases import step_of as replicated
from tests.training.sharded_cases import step_of as sharded

ITEMS = 32
MESHES = {"fsdp": ("shard",), "hsdp": ("replica", "shard")}


class Counting(TorchDispatchMode):
    """Calls and bytes of the collectives that reach torch's process groups, whoever makes them.

    Of each operator the larger of its inputs and outputs is the whole tensor; what a ring of N ranks sends of it is
    (N−1)/N for a gather or a scatter, twice that for a sum, all of it for a broadcast.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls, self.bytes = 0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func.__name__.split(".")[0].strip("_"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        sides = [sum(leaf.nbytes for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)) for arg in args[:2]]
        group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
        ranks = dist.ProcessGroup.unbox(group).size()
        share = {"allreduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}.get(name, (ranks - 1) / ranks)
        self.calls += 1
        self.bytes += share * max(sides)


def counted(step: Any, batch: Any) -> dict[str, Any]:
    """Of a second step, what the result says and what torch's operators say."""
    step(batch)
    with Counting() as counting:
        result = step(batch)
    return {
        "calls": result.communication_calls,
        "bytes": result.sent_bytes,
        "counted calls": counting.calls,
        "counted bytes": counting.bytes,
        "pieces": result.num_micro_batches,
    }


def wire(folder: Path, kind: str, pieces: int, reshard: bool = True, idle: bool = False) -> dict[str, Any]:
    """One case; `idle`: the first rank has no data."""
    model, batch = tagger(), sequences(items=ITEMS)
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = {name: value[rank * ITEMS // world : (rank + 1) * ITEMS // world] for name, value in batch.items()}
    size = ITEMS // world // pieces
    given = None if idle and rank == 0 else mine
    if kind in ("ddp", "plain"):
        return counted(replicated(model, by_token, ddp=kind == "ddp", micro_batch_size=size), given)
    names = MESHES[kind]
    mesh = init_device_mesh("cpu", (world,) if len(names) == 1 else (2, world // 2), mesh_dim_names=names)
    module: Any = model
    for layer in (module.block, module.head, module):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    return counted(sharded(module, by_token, micro_batch_size=size), given)


def _phases(ranks: int, kind: str, **arguments: Any) -> list[Phase]:
    return [Phase(ranks, wire, {"kind": kind, "pieces": pieces, **arguments}) for pieces in (1, 4, 16)]


GROUPS: dict[str, list[Phase]] = {
    "wire ddp": _phases(2, "ddp"),
    "wire plain": _phases(2, "plain"),
    "wire fsdp": _phases(2, "fsdp"),
    "wire fsdp kept": _phases(2, "fsdp", reshard=False)[:2],
    "wire fsdp idle": _phases(2, "fsdp", idle=True)[:1],
    "wire hsdp": [Phase(4, wire, {"kind": "hsdp", "pieces": pieces}) for pieces in (1, 4)],
}
