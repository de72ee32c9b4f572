"""The batch at which a whole model's products compute as long as they move bytes. No torch.

Compute and memory time of one call are polynomials in the batch b,

    C(b) = Σ FLOPs / F        M(b) = Σ bytes / BW        over the products of the work,

and the ridge is the smallest b with C(b) ≥ M(b). For one Linear this is b* = s·F/(2·BW) with the weights alone, and
I*·s·m·n / (2·m·n − I*·s·(m+n)) with what goes in and out (see `microbatch.roofline.ridge`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import ceil

from microbatch.hardware.device_spec import DeviceSpec
from microbatch.roofline.ridge import rate_of
from microbatch.roofline.routing import even_probabilities, expected_distinct_experts
from microbatch.units import DTYPE_BYTES
from microbatch.work.operators import Operator, Work

PRODUCTS = ("matmul", "attention", "convolution", "recurrent", "experts")
"""Kinds whose arithmetic runs at the device's peak rate, so that a batch can make them compute-bound."""
LARGEST = 1e12
"""A ridge beyond this is none: the slopes differ by rounding only."""


def weights_ridge_of(work: Work, spec: DeviceSpec, *, sequence: float = 1.0) -> float | None:
    """Batch where computing takes as long as moving what does not grow with the batch: weights, their gradients, and
    in training the optimizer's state. None for a model without weights.

    Of a mixture of experts all weights count, which with even routing puts the ridge E/k times as far out.

    Raises:
        InvalidDevice: the device has no rate for a dtype of the work.
    """
    products = [o for o in work.operators if _counts(o) and _bytes(o, 0, sequence) > 0]
    steps = [o for o in work.operators if o.kind == "optimizer"]
    fixed = sum(o.repeat * _bytes(o, 0, sequence) for o in (*products, *steps)) / spec.bandwidth
    return _crossing(lambda batch: _compute_seconds(products, spec, batch, sequence) - fixed) if products else None


def full_ridge_of(work: Work, spec: DeviceSpec, *, sequence: float = 1.0) -> float | None:
    """The same when everything that the products read and write is moved: activations, keys and values too.

    None where no batch is compute-bound, or the model has no product.

    Raises:
        InvalidDevice: the device has no rate for a dtype of the work.
    """
    products = [o for o in work.operators if _counts(o)]
    moving = [*products, *(o for o in work.operators if o.kind == "optimizer")]

    def gain(batch: float) -> float:
        moved = sum(o.repeat * _bytes(o, batch, sequence) for o in moving) / spec.bandwidth
        return _compute_seconds(products, spec, batch, sequence) - moved

    return _crossing(gain) if products else None


def moved_bytes(work: Work, batch: float, sequence: float = 1.0) -> float:
    """Bytes that one call must move: each operator reads its inputs and writes its results once, and of the experts'
    weights those that at least one token is expected to pick."""
    return sum(
        o.repeat
        * (
            awake_share(o, batch, sequence) * o.weight_bytes(batch, sequence)
            + o.read_bytes(batch, sequence)
            + o.written_bytes(batch, sequence)
        )
        for o in work.operators
    )


def awake_share(operator: Operator, batch: float, sequence: float) -> float:
    """Share of the experts that at least one token of the batch is expected to pick; 1 for any other operator."""
    routed = operator.routed
    if routed is None:
        return 1.0
    chances = routed.probabilities or even_probabilities(routed.experts, routed.top_k)
    return expected_distinct_experts(chances, max(1, ceil(routed.tokens(batch, sequence)))) / routed.experts


def _counts(operator: Operator) -> bool:
    return operator.kind in PRODUCTS and bool(operator.flops.terms)


def _bytes(operator: Operator, batch: float, sequence: float) -> float:
    return _matrix_bytes(operator) + operator.read_bytes(batch, sequence) + operator.written_bytes(batch, sequence)


def _matrix_bytes(operator: Operator) -> float:
    """Weights without their bias, which is 1/k of them: the ridge is that of the product."""
    stored, gemm = operator.weight_bytes(0), operator.gemm
    if operator.kind not in ("matmul", "convolution") or gemm is None:
        return stored
    size = DTYPE_BYTES[operator.weight_dtype or operator.dtype]
    return min(stored, gemm.n(0) * gemm.k(0) * gemm.count(0) * size)


def _compute_seconds(operators: Iterable[Operator], spec: DeviceSpec, batch: float, sequence: float) -> float:
    return sum(o.repeat * o.flops(batch, sequence) / rate_of(spec, o.dtype) for o in operators)


def _crossing(gain: Callable[[float], float]) -> float | None:
    """The smallest b with gain(b) = 0, below which it is negative; None where it stays negative."""
    high = 1.0
    while gain(high) < 0:
        high *= 2
        if high > LARGEST:
            return None
    low = 0.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if gain(middle) < 0 else (low, middle)
    return high


def with_rates(work: Work, spec: DeviceSpec) -> Work:
    """The work with the dtype of each operator that is no product set to one that the device has a rate for.

    Sums and copies run on whatever units there are; what a datasheet leaves out is the rate of products. Products keep
    their dtype: a device without a rate for theirs cannot be predicted.
    """
    spare = work.dtype if work.dtype in spec.flops else next(iter(spec.flops))
    return replace(
        work,
        operators=tuple(
            o if o.kind in PRODUCTS or o.dtype in spec.flops else replace(o, dtype=spare) for o in work.operators
        ),
    )
