"""What a compiler makes of a captured work: passes over tensors that follow each other become one kernel. No torch.

Captured work has a kernel for every operator, as eager torch runs it. A compiler or an inference engine computes a
pass over a tensor while it still holds it, so the tensor between two operators is neither written nor read and one
kernel fewer is launched. Only neighbours are looked at: an operator that reads at least what the one before it writes
is taken to read just that. A tensor that somebody else needs later would still be written, so this is the best case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from microbatch.work.operators import Operator, Work
from microbatch.work.polynomial import Polynomial

PASSES = ("elementwise", "normalisation", "reduction", "copy")
"""Kinds that pass over their tensors once, and so can be computed by the kernel before them."""
PRODUCTS = ("matmul", "convolution")
"""Kinds whose kernel can apply a pass to its result before writing it, where `epilogues` are asked for."""


def fuse(work: Work, *, epilogues: bool = False) -> Work:
    """The work with neighbouring passes joined.

    Args:
        epilogues: also join a pass to the product before it, as TensorRT does with a convolution's scale and
            activation; a compiler that calls a GEMM library does not.
    """
    before = (*PASSES, *PRODUCTS) if epilogues else PASSES
    fused: list[Operator] = []
    for operator in work.operators:
        if fused and _follows(fused[-1], operator, before):
            fused[-1] = _joined(fused[-1], operator)
        else:
            fused.append(operator)
    return replace(work, operators=tuple(fused))


def _follows(first: Operator, second: Operator, kinds: Sequence[str]) -> bool:
    """Whether the second, a pass, reads what the first writes, just after it and as often."""
    if first.kind not in kinds or second.kind not in PASSES:
        return False
    same = first.repeat == second.repeat and first.backward == second.backward
    left = _left_to_read(first, second)
    return same and bool(first.written_bytes.terms) and all(c >= 0 for _, c in left.terms)


def _left_to_read(first: Operator, second: Operator) -> Polynomial:
    return second.read_bytes + first.written_bytes * -1


def _joined(first: Operator, second: Operator) -> Operator:
    return replace(
        first,
        name=f"{first.name} + {second.name}",
        flops=first.flops + second.flops,
        weight_bytes=first.weight_bytes + second.weight_bytes,
        read_bytes=first.read_bytes + _left_to_read(first, second),
        written_bytes=second.written_bytes,
    )
