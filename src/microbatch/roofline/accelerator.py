"""Seconds of one operator on a device of kind ``accelerator``: systolic arrays, as in TPUs, Gaudi, Trainium. No torch.

An array of a×a cells holds an a×a piece of the weights and streams rows past it, so n and k are rounded up to whole
pieces while the rows are not (Jouppi et al., arXiv 1704.04760). A compiler lays the program out ahead, so computing and
moving overlap well and no host is waited for.
"""

from __future__ import annotations

from microbatch.hardware.device_spec import DeviceSpec
from microbatch.roofline.gemm import ceil_of, p_norm
from microbatch.roofline.gpu import Sizes, expected_loads, sizes_of
from microbatch.roofline.operator_time import OperatorTime
from microbatch.roofline.ridge import rate_of
from microbatch.work.operators import Operator

PRODUCTS = ("matmul", "convolution", "recurrent", "experts")

_FEWEST_ROWS = 8
"""Rows are taken in groups of eight, the sublanes of a vector register."""


def time_operator(operator: Operator, spec: DeviceSpec, batch: float, sequence: float) -> OperatorTime:
    """Seconds of one run: the p-norm of computing and moving, and the start.

    Raises:
        InvalidDevice: a product in a dtype for which the device has no rate.
    """
    s = sizes_of(operator, spec, batch, sequence)
    compute = _compute_seconds(s)
    memory = _moved(s) / s.bandwidth
    starts = (s.count if operator.kind == "recurrent" else 0.0) or 1.0
    start = starts * s.constants["kernel_seconds"]
    return OperatorTime(
        seconds=start + p_norm(compute, memory, s.constants["overlap_norm"]),
        compute_seconds=compute,
        memory_seconds=memory,
        overhead_seconds=start,
    )


def _compute_seconds(s: Sizes) -> float:
    if s.operator.kind == "attention":
        return s.flops / (rate_of(s.spec, s.operator.dtype) * s.constants["attention_efficiency"])
    if s.operator.kind in PRODUCTS:
        return _padded_flops(s) / (rate_of(s.spec, s.operator.dtype) * s.constants["gemm_efficiency"])
    return 0.0


def _padded_flops(s: Sizes) -> float:
    """Work in whole pieces of the array; groups of few channels (depthwise convolutions) run beside it, unpadded."""
    side = s.constants["array_size"]
    if not s.k or (s.operator.kind == "convolution" and s.count > 1):
        return s.flops
    rows = expected_loads(s.operator.routed, s.tokens) if s.operator.routed else ((s.m, s.count),)
    groups = sum(ceil_of(m, _FEWEST_ROWS) * _FEWEST_ROWS * count for m, count in rows)
    return 2 * groups * ceil_of(s.n, side) * side * ceil_of(s.k, side) * side


def _moved(s: Sizes) -> float:
    routed = s.operator.routed
    if routed is not None:
        distinct = sum(count for _, count in expected_loads(routed, s.tokens))
        return s.weight_bytes * distinct / routed.experts + s.other_bytes
    if s.operator.kind == "recurrent" and s.count:
        return s.weight_bytes * s.count + s.other_bytes
    return s.moved
