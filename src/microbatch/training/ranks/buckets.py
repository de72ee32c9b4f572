"""Gradients added up over ranks in buckets: few collectives, each large enough for the bandwidth of a link."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from microbatch.training import gradients
from microbatch.training.ranks.meeting import Meeting

BUCKET_BYTES = 25 << 20
"""As DistributedDataParallel's: large enough for the bandwidth of a link, small beside a model."""

_NARROW = (torch.float16, torch.bfloat16)


def dtype_of_sum(parameter: nn.Parameter) -> torch.dtype:
    """What gradients of a parameter are summed in."""
    return torch.float32 if parameter.dtype in _NARROW else parameter.dtype


def whole_gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient, dense and in the dtype of sums; zeros where this rank has none."""
    gradient, dtype = parameter.grad, dtype_of_sum(parameter)
    if gradient is None or gradient.layout != torch.strided or gradient.dtype != dtype:
        if gradient is None:
            gradient = torch.zeros_like(parameter, dtype=dtype)
        dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
        parameter.grad = None
        gradients.widen([parameter])
        parameter.grad = dense.detach().to(dtype)
    assert parameter.grad is not None
    return parameter.grad


def in_buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours together, up to `BUCKET_BYTES`."""
    bucket: list[Tensor] = []
    held = 0
    for tensor in tensors:
        if bucket and held + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, held = [], 0
        bucket.append(tensor)
        held += tensor.nbytes
    if bucket:
        yield bucket


def reduce_bucket(meeting: Meeting, tensors: list[Tensor], room: Tensor | None = None) -> None:
    """One all-reduce: in place for one tensor, of copies side by side for several."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        meeting.all_reduce(tensors[0])
        return
    numels = [tensor.numel() for tensor in tensors]
    flat = tensors[0].new_empty(sum(numels)) if room is None else room[: sum(numels)]
    parts = [part.view_as(tensor) for part, tensor in zip(flat.split(numels), tensors)]
    torch._foreach_copy_(parts, tensors)
    meeting.all_reduce(flat)
    torch._foreach_copy_(tensors, parts)
