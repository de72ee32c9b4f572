"""A captured work in another precision: of its products' arithmetic, and of their stored weights. No torch."""

from __future__ import annotations

from dataclasses import replace

from microbatch.units import DTYPE_BYTES
from microbatch.work.operators import Operator, Work

CASTS = ("matmul", "convolution", "recurrent", "experts")
"""Products that run in the precision asked for; attention, sums and norms stay as they were captured."""


def in_precision(work: Work, dtype: str, weight_dtype: str) -> Work:
    """The work with its products in `dtype` and their weights stored in `weight_dtype`.

    Products of weights with activations take and give activations of `dtype`; the rest of the model keeps what it was
    captured in, as kernels for quantised models do.
    """
    operators = tuple(_cast(o, work.dtype, dtype, weight_dtype) for o in work.operators)
    before, after = (
        sum(o.repeat * o.weight_bytes(0) for o in part if o.kind in CASTS and not o.backward)
        for part in (work.operators, operators)
    )
    stored = max(0.0, work.weight_bytes - before + after)
    return replace(work, operators=operators, dtype=dtype, weight_bytes=round(stored))


def _cast(operator: Operator, old: str, dtype: str, weight_dtype: str) -> Operator:
    if operator.kind not in CASTS or operator.dtype != old or not operator.weight_bytes.terms:
        return operator
    moved = DTYPE_BYTES[dtype] / DTYPE_BYTES[old]
    return replace(
        operator,
        dtype=dtype,
        weight_dtype=weight_dtype,
        weight_bytes=operator.weight_bytes * (DTYPE_BYTES[weight_dtype] / DTYPE_BYTES[operator.weight_dtype or old]),
        read_bytes=operator.read_bytes * moved,
        written_bytes=operator.written_bytes * moved,
    )
