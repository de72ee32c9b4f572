"""Seconds of one operator on a device of kind ``cpu``. No torch.

A call on a CPU hardly overlaps anything, so the parts of an operator's time add up (p = 1 of the p-norm):

    seconds = host work + weights streamed and repacked + arithmetic + activations moved + functions + fresh pages

* Host work: Python, dispatch and what the library prepares, in units of ``launch_seconds`` (`HOST_WORK`).
* Weights: a product of several rows repacks its weights before it computes, one of a single row does not. Both reach
  their bandwidth with long rows of the weight only: W / (share · bandwidth) · (1 + half / row bytes).
* Arithmetic: FLOPs over the share of the peak that large shapes reach; less for few columns of a convolution, few
  rows of a batched product, short attention, each as x / (x + half).
* Activations move at the cache's speed while the operator's own fit into it, else at the main memory's.
* Functions such as exp cost as much as so many FLOPs per element (`FUNCTIONS`).
* Fresh pages: what the C library has given back to the system comes back page by page (`FRESH_BYTES`).

Shares, halves and efficiencies are the device's constants; ``microbatch devices --measure`` measures them.
"""

from __future__ import annotations

from dataclasses import dataclass

from microbatch.hardware.constants import constants_of
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.roofline.operator_time import OperatorTime
from microbatch.roofline.ridge import rate_of
from microbatch.roofline.routing import even_probabilities, expected_distinct_experts
from microbatch.units import DTYPE_BYTES
from microbatch.work.operators import Operator, Routed

LAUNCH_SECONDS = 3e-6
"""One unit of host work where a device's file does not say."""

HOST_WORK = {
    "matmul": 4.0,
    "attention": 5.0,
    "convolution": 12.0,
    "recurrent": 16.0,
    "experts": 10.0,
    "lookup": 4.0,
    "normalisation": 6.0,
    "reduction": 3.0,
    "elementwise": 2.0,
    "copy": 2.0,
    "communication": 4.0,
    "optimizer": 2.0,
}
"""Host work of one operator of each kind over that of the simplest one, its views and its module included."""

FUNCTIONS = {
    **dict.fromkeys(("gelu", "_softmax", "_log_softmax", "exp", "log", "tanh", "sigmoid", "silu", "erf"), 1.0),
    **dict.fromkeys(("logsumexp", "softplus", "mish", "elu", "sin", "cos", "pow", "expm1", "log1p"), 1.0),
    **dict.fromkeys(("native_layer_norm", "native_group_norm", "_fused_rms_norm"), 0.6),
}
"""Passes per element of the result whose cost is arithmetic and not moving, over that of exp."""

FRESH_BYTES = 32 << 20
"""glibc maps blocks from here on anew each time (DEFAULT_MMAP_THRESHOLD_MAX, malloc(3)), and gives the top of its heap
back from twice the largest block ever freed on; so an operator that holds this much touches fresh pages."""

LIBRARY_COPIES = 2
"""A convolution's library copies its input and its output into its own order of channels and back."""

LOOP_BELOW = 400
"""Batched products of fewer multiply-adds than this are done by torch's own loop, without a call for each
(aten/src/ATen/native/LinearAlgebra.cpp)."""
PRODUCT_LAUNCHES = 0.1
HALF_ROWS = 4
"""Rows of a batched product at which half of the rate is reached: the height of a register tile."""
HALF_SEQUENCE = 32
"""Keys at which fused attention reaches half of its rate: between the products it takes maxima, exp and sums."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Seconds of one operator, part by part; they add up."""

    host: float
    weights: float = 0.0
    arithmetic: float = 0.0
    moving: float = 0.0
    functions: float = 0.0
    fresh: float = 0.0

    def total(self) -> OperatorTime:
        """The sum, and which of it is computing, moving and overhead."""
        compute, memory = self.arithmetic + self.functions, self.weights + self.moving + self.fresh
        return OperatorTime(
            seconds=self.host + compute + memory,
            compute_seconds=compute,
            memory_seconds=memory,
            overhead_seconds=self.host,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """One operator at one batch and sequence, in plain numbers."""

    operator: Operator
    spec: DeviceSpec
    constants: dict[str, float]
    flops: float
    weight_bytes: float
    read_bytes: float
    written_bytes: float
    m: float
    n: float
    k: float
    count: float
    tokens: float

    @property
    def launch(self) -> float:
        return self.spec.launch_seconds or LAUNCH_SECONDS

    @property
    def peak(self) -> float:
        return rate_of(self.spec, self.operator.dtype)

    @property
    def element_bytes(self) -> float:
        return DTYPE_BYTES[self.operator.dtype]

    @property
    def name(self) -> str:
        return self.operator.name.rpartition("::")[2].rstrip("_")


def time_operator(operator: Operator, spec: DeviceSpec, batch: float, sequence: float) -> OperatorTime:
    """Seconds of one run: the sum of its parts."""
    sizes = _sizes(operator, spec, batch, sequence)
    return _BY_KIND.get(operator.kind, _element_by_element)(sizes).total()


def _sizes(operator: Operator, spec: DeviceSpec, batch: float, sequence: float) -> Sizes:
    gemm, routed = operator.gemm, operator.routed
    shape = [getattr(gemm, side)(batch, sequence) if gemm else 1.0 for side in ("m", "n", "k", "count")]
    return Sizes(
        operator=operator,
        spec=spec,
        constants=constants_of(spec),
        flops=operator.flops(batch, sequence),
        weight_bytes=operator.weight_bytes(batch, sequence),
        read_bytes=operator.read_bytes(batch, sequence),
        written_bytes=operator.written_bytes(batch, sequence),
        m=shape[0], n=shape[1], k=shape[2], count=shape[3],
        tokens=routed.tokens(batch, sequence) if routed else 0.0,
    )  # fmt: skip


def _product(s: Sizes) -> Parts:
    """A Linear, or products of two activations."""
    if not s.weight_bytes:
        return _batched(s)
    return Parts(
        host=HOST_WORK["matmul"] * s.launch,
        weights=_weights(s, s.weight_bytes, s.m),
        arithmetic=s.flops / (s.peak * s.constants["product_efficiency"]),
        moving=_moving(s, s.read_bytes + s.written_bytes * (1 + _has_bias(s))),
        fresh=_fresh(s, s.written_bytes),
    )


def _batched(s: Sizes) -> Parts:
    """Many small products: each has its own call unless it is tiny; the larger operand is read from where it lies."""
    calls = s.count if s.m * s.n * s.k >= LOOP_BELOW else 0.0
    rate = s.peak * s.constants["product_efficiency"] * _saturation(s.m, HALF_ROWS)
    return Parts(
        host=(HOST_WORK["matmul"] + PRODUCT_LAUNCHES * calls) * s.launch,
        arithmetic=s.flops / rate,
        moving=_moving(s, s.read_bytes + s.written_bytes),
        fresh=_fresh(s, s.written_bytes),
    )


def _experts(s: Sizes) -> Parts:
    """One product per expert that got a token: its host work and its weights, then everybody's arithmetic."""
    assert s.operator.routed is not None
    distinct, single = _woken(s.operator.routed, s.tokens)
    each = s.weight_bytes / s.operator.routed.experts
    return Parts(
        host=HOST_WORK["experts"] * s.launch * distinct,
        weights=_weights(s, each, 1) * single + _weights(s, each, 2) * (distinct - single),
        arithmetic=s.flops / (s.peak * s.constants["product_efficiency"]),
        moving=_moving(s, s.read_bytes + s.written_bytes),
        fresh=_fresh(s, s.written_bytes),
    )


def _woken(routed: Routed, tokens: float) -> tuple[float, float]:
    """Experts that get a token, and those that get exactly one, on average: Σ n·p·(1 − p)^(n−1)."""
    chances = routed.probabilities or even_probabilities(routed.experts, routed.top_k)
    single = sum(tokens * p * (1 - p) ** max(tokens - 1, 0) for p in chances)
    distinct = expected_distinct_experts(chances, tokens)  # type: ignore[arg-type]
    return distinct, min(single, distinct)


def _convolution(s: Sizes) -> Parts:
    """oneDNN's: reorders to blocks of channels, computes, and back."""
    rate = s.peak * s.constants["convolution_efficiency"] * _saturation(s.n, s.constants["convolution_half_channels"])
    copies = LIBRARY_COPIES * (s.read_bytes + s.written_bytes)
    return Parts(
        host=HOST_WORK["convolution"] * s.launch,
        weights=_weights(s, s.weight_bytes, 2),
        arithmetic=s.flops / rate,
        moving=_moving(s, copies),
        fresh=_fresh(s, s.written_bytes * LIBRARY_COPIES + s.read_bytes, held=copies),
    )


def _attention(s: Sizes) -> Parts:
    """Fused attention."""
    rate = s.peak * s.constants["attention_efficiency"] * _saturation(s.n, HALF_SEQUENCE)
    return Parts(
        host=HOST_WORK["attention"] * s.launch,
        arithmetic=s.flops / rate,
        moving=_moving(s, s.read_bytes + s.written_bytes),
        fresh=_fresh(s, s.written_bytes),
    )


def _recurrent(s: Sizes) -> Parts:
    """One product after the other, of which each waits for the one before; the weights are repacked once."""
    rate = s.peak * s.constants["product_efficiency"] * _saturation(s.m, HALF_ROWS)
    return Parts(
        host=(HOST_WORK["recurrent"] + s.count) * s.launch,
        weights=_weights(s, s.weight_bytes, s.m),
        arithmetic=s.flops / rate,
        moving=_moving(s, s.read_bytes + s.written_bytes),
        fresh=_fresh(s, s.written_bytes),
    )


def _element_by_element(s: Sizes) -> Parts:
    """Everything that passes over its tensors once."""
    elements = FUNCTIONS.get(s.name, 0.0) * s.written_bytes / s.element_bytes
    return Parts(
        host=HOST_WORK[s.operator.kind] * s.launch,
        moving=_moving(s, s.weight_bytes + s.read_bytes + s.written_bytes),
        functions=elements * s.constants["function_flops"] / s.spec.flops.get("fp32", s.peak),
        fresh=_fresh(s, s.written_bytes),
    )


_BY_KIND = {
    "matmul": _product,
    "attention": _attention,
    "convolution": _convolution,
    "recurrent": _recurrent,
    "experts": _experts,
}


def _weights(s: Sizes, weight_bytes: float, rows: float) -> float:
    """Seconds to stream weights, and with more than one row to repack them."""
    way = "vector" if rows <= 1 else "weight"
    seconds = weight_bytes / (s.spec.bandwidth * s.constants[f"{way}_bandwidth_share"])
    return seconds * (1 + s.constants[f"{way}_half_row_bytes"] / max(s.k * s.element_bytes, 1.0))


def _moving(s: Sizes, moved: float) -> float:
    """Seconds to pass over activations, which the operator before left in the cache if they fit."""
    held = s.read_bytes + s.written_bytes
    cached = held <= (s.spec.cache_bytes or 0)
    return moved / (s.spec.bandwidth * (s.constants["cached_bandwidth_ratio"] if cached else 1.0))


def _fresh(s: Sizes, written: float, held: float | None = None) -> float:
    """Seconds to write pages that the system has to clear first."""
    holds = s.read_bytes + s.written_bytes if held is None else held
    return written / (s.spec.bandwidth * s.constants["fresh_bandwidth_share"]) if holds >= FRESH_BYTES else 0.0


def _has_bias(s: Sizes) -> int:
    """A product with a bias writes the bias first and adds to it."""
    return int(s.name.startswith("addmm"))


def _saturation(x: float, half: float) -> float:
    return x / (x + half)
