"""One batch on all ranks of a pipeline: each reads its masks off it, the first the inputs, the last the targets."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from microbatch.errors import InvalidBatch
from microbatch.pipeline.execution.layout import Layout
from microbatch.pipeline.execution.shapes import Meta, tensors_of


def fingerprint(batch: Any) -> int:
    """Equal for equal batches: shapes, and the values of what lies on the CPU."""
    found = 0
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            found = zlib.crc32(repr((tuple(leaf.shape), leaf.dtype)).encode(), found)
            if leaf.device.type == "cpu" and leaf.layout == torch.strided and not leaf.is_nested:
                found = zlib.crc32(leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data, found)
        elif isinstance(leaf, (int, float, str, bool, type(None))):
            found = zlib.crc32(repr(leaf).encode(), found)
    return found


def source_of(prints: Sequence[int | None]) -> int | None:
    """The first rank that has the batch, where another has none; None where all have it, or none has.

    Raises:
        InvalidBatch: two ranks of one pipeline have different batches.
    """
    having = [rank for rank, one in enumerate(prints) if one is not None]
    other = next((rank for rank in having if prints[rank] != prints[having[0]]), None)
    if other is not None:
        raise InvalidBatch(
            f"Ranks {having[0]} and {other} of one pipeline were given different batches.",
            "Give all ranks of a pipeline the same batch (one sampler with one seed), or None on all but one.",
        )
    return having[0] if having and len(having) < len(prints) else None


def from_rank(value: Any, source: int, layout: Layout) -> Any:
    """A value with its tensors, from one rank of the pipeline on all of them; tensors arrive on the device."""
    at_source = layout.rank == source
    described: list[Any] = [tree_map(_described, value) if at_source else None]
    dist.broadcast_object_list(described, group=layout.group, group_src=source, device=layout.device)
    room = value if at_source else tree_map(lambda leaf: _room(leaf, layout.device), described[0])
    for tensor in tensors_of(room):
        dist.broadcast(tensor.detach().to(layout.device).contiguous(), group=layout.group, group_src=source)
    return room


def _described(leaf: Any) -> Any:
    return Meta.of(leaf) if isinstance(leaf, Tensor) else leaf


def _room(leaf: Any, device: torch.device) -> Any:
    return leaf.empty(device) if isinstance(leaf, Meta) else leaf


def joined(outputs: Sequence[Any]) -> Any:
    """Outputs of micro-batches as that of the batch: along dimension 0; numbers side by side."""
    if len(outputs) == 1:
        return outputs[0]
    return tree_map(_joined, outputs[0], *outputs[1:])


def _joined(*parts: Any) -> Any:
    if not isinstance(parts[0], Tensor):
        return parts[0]
    return torch.cat(parts) if parts[0].dim() else torch.stack(parts)
