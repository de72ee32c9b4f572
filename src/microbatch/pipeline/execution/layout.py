"""Which processes form a pipeline, and which are its replicas: read off a mesh or a process group."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from microbatch.errors import InvalidSettings

STAGES = ("pp", "pipeline", "stage", "stages")
"""Names that the axis of stages can have."""
TOGETHER = ("tp", "tensor", "cp", "context", "ep", "expert")
"""Names of axes whose ranks work on the same batch."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where this process stands.

    Attributes:
        group: of the pipeline; None for all processes.
        rank: place in the pipeline.
        ranks: number of places.
        data: the ranks that hold the same stages and get other batches; None where there are none.
        replicas: of the whole pipeline, each with a batch of its own.
        replica: which one this process is in.
        every: all processes of the mesh; None for all there are.
        counts: whether sums of this process count; of ranks that work on the same batch only the first does.
        device: where stages are.
    """

    group: Any
    rank: int
    ranks: int
    data: Any
    replicas: int
    replica: int
    every: Any
    counts: bool
    device: torch.device

    def global_rank(self, rank: int) -> int:
        """Number among all processes of a place in the pipeline."""
        return dist.get_process_group_ranks(self.group)[rank]


def layout_of(mesh: Any, group: Any, device: torch.device) -> Layout:
    """
    Args:
        mesh: a DeviceMesh with an axis of stages (``pp``); all others hold replicas, but for tensor parallelism.
        group: a process group that is one pipeline; neither is all processes.
        device: where stages are.

    Raises:
        InvalidSettings: no process group, a mesh without names, or without an axis of stages.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidSettings(
            "A pipeline runs on several processes, and there is no process group.",
            "Start with torchrun and call torch.distributed.init_process_group first.",
        )
    if mesh is None:
        return Layout(group, dist.get_rank(group), dist.get_world_size(group), None, 1, 0, group, True, device)
    names: tuple[str, ...] = tuple(mesh.mesh_dim_names or ())
    axis = next((name for name in names if name in STAGES), None)
    if axis is None:
        raise InvalidSettings(
            f"The mesh has the axes {', '.join(names) or 'without names'}, and none is the pipeline's.",
            'Name one "pp": init_device_mesh(device, (2, 2), mesh_dim_names=("pp", "dp")).',
        )
    data = tuple(name for name in names if name != axis and name not in TOGETHER)
    beside = [name for name in names if name in TOGETHER]
    replicas, replica = 1, 0
    for name in data:
        size, place = mesh.size(names.index(name)), mesh.get_local_rank(name)
        replicas, replica = replicas * size, replica * size + place
    return Layout(
        group=mesh.get_group(axis),
        rank=mesh.get_local_rank(axis),
        ranks=mesh.size(names.index(axis)),
        data=_group_of(mesh, data),
        replicas=replicas,
        replica=replica,
        every=None if mesh.size() == dist.get_world_size() else _group_of(mesh, names),
        counts=all(mesh.get_local_rank(name) == 0 for name in beside),
        device=device,
    )


def _group_of(mesh: Any, names: tuple[str, ...]) -> Any:
    """The group along some axes together; None for no axis."""
    if not names:
        return None
    return mesh.get_group(names[0]) if len(names) == 1 else mesh[names]._flatten().get_group()


def introduce(layout: Layout, placement: tuple[int, ...]) -> None:
    """One message each way between ranks that hold neighbouring stages, in the order of stages.

    A communicator between two ranks is made at their first message, and both wait for each other there: in this order
    none waits in a circle.
    """
    met: set[tuple[int, int]] = set()
    for one, other in pairwise(placement):
        pair = (min(one, other), max(one, other))
        if one == other or pair in met:
            continue
        met.add(pair)
        if layout.rank in pair:
            peer = layout.global_rank(pair[1] if layout.rank == pair[0] else pair[0])
            _greet(layout, peer, first=layout.rank == pair[0])


def _greet(layout: Layout, peer: int, *, first: bool) -> None:
    word = torch.zeros(1, device=layout.device)
    for sends in (first, not first):
        if sends:
            dist.send(word, peer, group=layout.group)
        else:
            dist.recv(word, peer, group=layout.group)
