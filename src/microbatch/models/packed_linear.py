"""oneDNN's products with weights packed beforehand, on a CPU: torch's own repack theirs in each call of a small batch.

The operators are private to torch, so they are tried before anything relies on them.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

SMALLEST = 128 * 128
"""Elements of a weight below which packing it cannot pay."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def pack(weight: Tensor, rows: int) -> Tensor:
    """A copy of a weight [out, in] in oneDNN's own layout; `rows` is what it is laid out for, others run too."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
    return packed


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """y = x Wᵀ + b with a packed weight."""
    output: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return output


@cache
def is_available(dtype: torch.dtype = torch.float32) -> bool:
    """Whether this torch has the operators for a dtype on this processor, and they still work as they did."""
    if dtype not in DTYPES:
        return False
    try:
        ones = torch.ones(1, 16, dtype=dtype)
        return bool(torch.allclose(packed_linear(ones, pack(torch.eye(16, dtype=dtype), 1), None), ones))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
