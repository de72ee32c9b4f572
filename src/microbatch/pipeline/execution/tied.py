"""Weights that stand in several stages: one value and one gradient on all ranks that hold a copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from microbatch.pipeline.execution.layout import Layout
from microbatch.pipeline.placement import Placement


@dataclass(frozen=True, slots=True)
class Tied:
    """A weight on several ranks.

    Attributes:
        name: on this rank.
        group: the ranks that hold it.
        counts: whether its gradient counts here in a norm over all ranks; it does on the first of them.
    """

    name: str
    group: Any
    counts: bool


def tie(places: Mapping[str, tuple[tuple[int, str], ...]], placement: Placement, layout: Layout) -> tuple[Tied, ...]:
    """The tied weights of this rank. Every rank calls it; groups are made by those that are in them.

    Args:
        places: of each tied weight, see `cutting.tied_parameters`.
        placement: the rank of each stage.
        layout: of the processes.
    """
    groups: dict[tuple[int, ...], Any] = {}
    found = []
    for several in places.values():
        ranks = tuple(sorted({placement[stage] for stage, _ in several}))
        if len(ranks) == 1 or layout.rank not in ranks:
            continue
        if ranks not in groups:
            members = [layout.global_rank(rank) for rank in ranks]
            groups[ranks] = dist.new_group(members, use_local_synchronization=True)
        name = next(name for stage, name in several if placement[stage] == layout.rank)
        found.append(Tied(name, groups[ranks], layout.rank == ranks[0]))
    return tuple(found)


def same_values(tied: tuple[Tied, ...], parameter: Callable[[str], nn.Parameter]) -> None:
    """All copies become that of the first rank."""
    for one in tied:
        value = _local(parameter(one.name).data)
        if not value.is_meta:
            dist.broadcast(value, group=one.group, group_src=0)


def add_up(tied: tuple[Tied, ...], parameter: Callable[[str], nn.Parameter]) -> None:
    """The gradient of each copy becomes the sum over all copies."""
    for one in tied:
        held = parameter(one.name)
        if not held.requires_grad:
            continue
        if held.grad is None:
            held.grad = torch.zeros_like(held, dtype=getattr(held, "grad_dtype", None) or held.dtype)
        dist.all_reduce(_local(held.grad), group=one.group)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
