"""Seconds of one operator on a device of kind ``gpu``. No torch.

Products of every kind are timed by tiles and waves (`microbatch.roofline.gemm`); what passes over its tensors once, by
the bytes it moves. The seconds are those of the kernel; what lies between kernels, and the host that launches them,
belong to the call (`microbatch.roofline.launches`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from microbatch.hardware.constants import constants_of
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.roofline.gemm import GemmTime, Rows, ceil_of, gemm_time, kernels_of, p_norm
from microbatch.roofline.operator_time import OperatorTime
from microbatch.roofline.ridge import rate_of
from microbatch.roofline.routing import even_probabilities
from microbatch.work.operators import Operator, Routed

QUERY_BLOCK = 128
"""Queries that one block of fused attention holds (FlashAttention-2, arXiv 2307.08691, section 3.3)."""
SMALLEST_QUERIES = 16
"""Rows of a tensor core's smallest product: a decode step's single query costs as much as this many."""
KEY_BLOCK = 256
"""Least keys of one part when blocks are too few and the keys are split among multiprocessors (flash-decoding)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """One operator at one batch and sequence, in plain numbers; without a shape m, n and k are 0."""

    operator: Operator
    spec: DeviceSpec
    constants: dict[str, float]
    flops: float
    weight_bytes: float
    other_bytes: float
    m: float
    n: float
    k: float
    count: float
    tokens: float

    @property
    def moved(self) -> float:
        return self.weight_bytes + self.other_bytes

    @property
    def bandwidth(self) -> float:
        """Byte/s that large transfers reach."""
        return self.spec.bandwidth * self.constants["bandwidth_efficiency"]


def time_operator(operator: Operator, spec: DeviceSpec, batch: float, sequence: float) -> OperatorTime:
    """Seconds of one run.

    Raises:
        InvalidDevice: a product in a dtype for which the device has no rate.
    """
    return _BY_KIND.get(operator.kind, _streamed)(sizes_of(operator, spec, batch, sequence))


def sizes_of(operator: Operator, spec: DeviceSpec, batch: float, sequence: float) -> Sizes:
    """The operator's polynomials at one batch and sequence."""
    gemm, routed = operator.gemm, operator.routed
    moved = operator.read_bytes(batch, sequence) + operator.written_bytes(batch, sequence)
    return Sizes(
        operator=operator,
        spec=spec,
        constants=constants_of(spec),
        flops=operator.flops(batch, sequence),
        weight_bytes=operator.weight_bytes(batch, sequence),
        other_bytes=moved,
        m=gemm.m(batch, sequence) if gemm else 0.0,
        n=gemm.n(batch, sequence) if gemm else 0.0,
        k=gemm.k(batch, sequence) if gemm else 0.0,
        count=gemm.count(batch, sequence) if gemm else 0.0,
        tokens=routed.tokens(batch, sequence) if routed else 0.0,
    )


def _matmul(s: Sizes) -> OperatorTime:
    return _product(s) if s.k else _shapeless(s)


def _product(s: Sizes, share: float = 1.0) -> OperatorTime:
    kernels = kernels_of(s.spec, s.operator.dtype)
    kernels = kernels if share == 1 else replace(kernels, rate=kernels.rate * share)
    return _told(gemm_time(kernels, ((s.m, s.count),), s.n, s.k, s.moved))


def _told(time: GemmTime) -> OperatorTime:
    return OperatorTime(
        seconds=time.seconds,
        compute_seconds=time.compute_seconds,
        memory_seconds=time.memory_seconds,
        overhead_seconds=time.overhead_seconds,
        evidence=time.evidence,
    )


def _shapeless(s: Sizes) -> OperatorTime:
    """A product whose shape is unknown, as of several that were added up: full tiles."""
    rate = rate_of(s.spec, s.operator.dtype) * s.constants["gemm_efficiency"]
    return _overlapped(s, s.flops / rate, s.moved / s.bandwidth, s.constants["gemm_seconds"])


def _overlapped(s: Sizes, compute: float, memory: float, start: float, evidence: str = "") -> OperatorTime:
    return OperatorTime(
        seconds=start + p_norm(compute, memory, s.constants["overlap_norm"]),
        compute_seconds=compute,
        memory_seconds=memory,
        overhead_seconds=start,
        evidence=evidence,
    )


def _convolution(s: Sizes) -> OperatorTime:
    """As its im2col product, or directly on the plain units where that is faster: groups of few channels."""
    if not s.k:
        return _shapeless(s)
    product = _product(s, s.constants["convolution_efficiency"])
    rate = s.spec.flops.get("fp32", 0.0) * s.constants["gemm_efficiency"]
    if s.count < 2 or not rate:
        return product
    direct = _overlapped(s, s.flops / rate, s.moved / s.bandwidth, s.constants["kernel_seconds"], "without tiles")
    return min(product, direct, key=lambda time: time.seconds)


def _attention(s: Sizes) -> OperatorTime:
    """Blocks of queries of each head in waves; where blocks are few, keys are split. Keys and values move once."""
    rate = rate_of(s.spec, s.operator.dtype) * s.constants["attention_efficiency"]
    start, processors = s.constants["gemm_seconds"], s.spec.multiprocessors
    if not s.m or not processors:
        return _overlapped(s, s.flops / rate, s.moved / s.bandwidth, start)
    padded = s.flops * max(1.0, SMALLEST_QUERIES / s.m)
    blocks = ceil_of(s.m, QUERY_BLOCK) * s.count
    parts = min(ceil_of(s.n, KEY_BLOCK), ceil_of(processors, blocks))
    blocks *= parts
    waves = ceil_of(blocks, processors)
    compute = waves * padded / blocks * processors / rate
    evidence = f"{math.ceil(blocks)} blocks in {waves} wave{'s' if waves != 1 else ''}"
    return _overlapped(s, compute, s.moved / s.bandwidth, start, evidence)


def _recurrent(s: Sizes) -> OperatorTime:
    """`count` products one after the other, each of which reads the weights again and waits for the one before."""
    if not s.count:
        return _shapeless(s)
    moved = s.weight_bytes + s.other_bytes / s.count
    step = gemm_time(kernels_of(s.spec, s.operator.dtype), ((s.m, 1.0),), s.n, s.k, moved)
    return OperatorTime(
        seconds=s.count * step.seconds,
        compute_seconds=s.count * step.compute_seconds,
        memory_seconds=s.count * step.memory_seconds,
        overhead_seconds=s.count * step.overhead_seconds,
        evidence=f"{math.ceil(s.count)} steps, each {step.evidence}",
    )


def _experts(s: Sizes) -> OperatorTime:
    """The weights of the experts that got a token, and each one's own row of tiles."""
    routed = s.operator.routed
    if routed is None or not s.k:
        return _shapeless(s)
    rows = expected_loads(routed, s.tokens)
    distinct = sum(count for _, count in rows)
    moved = s.weight_bytes * distinct / routed.experts + s.other_bytes
    time = gemm_time(kernels_of(s.spec, s.operator.dtype), rows, s.n, s.k, moved)
    told = _told(time)
    return OperatorTime(
        seconds=told.seconds,
        compute_seconds=told.compute_seconds,
        memory_seconds=told.memory_seconds,
        overhead_seconds=told.overhead_seconds,
        evidence=f"{distinct:.4g} of {routed.experts} experts, {told.evidence}",
    )


def expected_loads(routed: Routed, tokens: float) -> Rows:
    """(tokens of an expert that got any, how many such experts), on average.

    An expert that each token picks with chance p gets any with chance a = 1 − (1 − p)^tokens, and then p·tokens/a.
    """
    chances = Counter(routed.probabilities or even_probabilities(routed.experts, routed.top_k))
    active = [(p, count * (1 - (1 - min(p, 1.0)) ** tokens), count) for p, count in chances.items() if p > 0]
    return tuple((p * tokens * count / share, share) for p, share, count in active if share > 0)


def _streamed(s: Sizes) -> OperatorTime:
    """One pass over the tensors; arithmetic on the plain units."""
    rate = s.spec.flops.get("fp32", 0.0)
    compute = s.flops / rate if rate else 0.0
    return _overlapped(s, compute, s.moved / s.bandwidth, s.constants["kernel_seconds"])


_BY_KIND: dict[str, Callable[[Sizes], OperatorTime]] = {
    "matmul": _matmul,
    "attention": _attention,
    "convolution": _convolution,
    "recurrent": _recurrent,
    "experts": _experts,
}
"""The kinds that compute; every other kind is one pass over its tensors."""
