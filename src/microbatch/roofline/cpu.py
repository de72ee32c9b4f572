"""Seconds of one operator on a device of kind ``cpu``. No torch.

A call on a CPU hardly overlaps anything, so the parts of an operator's time add up (p = 1 of the p-norm):

    seconds = host work + weights streamed and repacked + arithmetic + activations moved + functions + fresh pages

* Host work: Python, dispatch and what the library prepares, in units of ``launch_seconds`` (`HOST_WORK`).
* Weights: a product of several rows repacks its weights before it computes, one of a single row does not. Both reach
  their bandwidth with long rows of the weight only: W / (share · bandwidth) · (1 + half / row bytes).
* Arithmetic: FLOPs over the share of the peak that large shapes reach; less for few columns of a convolution and few
  rows of a batched product, as x / (x + half).
* Activations move at the cache's speed while the operator's own fit into it, else at the main memory's; weights come
  from the cache in a call whose weights all fit (`after_last_call`).
* Functions such as exp cost as much as so many FLOPs per element (`FUNCTIONS`).
* Fresh pages: what the C library has given back to the system comes back page by page (`FRESH_BYTES`, `TRIMMED`).

Shares, halves and efficiencies are the device's constants; ``microbatch devices --measure`` measures them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from microbatch.hardware.constants import constants_of
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.roofline.operator_time import OperatorTime
from microbatch.roofline.ridge import rate_of
from microbatch.roofline.routing import even_probabilities, expected_distinct_experts
from microbatch.units import DTYPE_BYTES
from microbatch.work.operators import Operator, Routed, Work

LAUNCH_SECONDS = 3e-6
"""One unit of host work where a device's file does not say."""

HOST_WORK = {
    "matmul": 6.0,
    "attention": 8.0,
    "convolution": 20.0,
    "recurrent": 25.0,
    "experts": 8.0,
    "lookup": 5.0,
    "normalisation": 10.0,
    "reduction": 3.0,
    "elementwise": 2.5,
    "copy": 2.0,
    "communication": 6.0,
    "optimizer": 2.5,
}
"""Host work of one operator of each kind, its views and its module included; about 1 for a bare function of a tensor.
Of experts: for each one that runs."""

HOST_WORK_BY_NAME = {"gelu": 6.0, "mean": 6.0, "_adaptive_avg_pool2d": 6.0}
"""Where an operator needs more than others of its kind: gelu is a call of oneDNN, a mean of two operators."""

_WAYS = ("vector", "weight")

FUNCTIONS = {
    **dict.fromkeys(("gelu", "_softmax", "_log_softmax", "exp", "log", "tanh", "sigmoid", "silu", "erf"), 1.0),
    **dict.fromkeys(("logsumexp", "softplus", "mish", "elu", "sin", "cos", "pow", "expm1", "log1p"), 1.0),
    **dict.fromkeys(("native_layer_norm", "native_group_norm", "_fused_rms_norm"), 0.5),
    **dict.fromkeys(("index", "index_select", "gather", "index_put", "index_add", "scatter_add", "combine"), 1.5),
}
"""Cost of one element of the result that is neither moving it nor a product, over that of an exp; rows picked by
number count here, since one thread copies them."""

WINDOWS = {"max_pool2d_with_indices": 3.0, "max_pool2d": 3.0, "avg_pool2d": 2.0}
"""The same for one element of a pooling window: torch's loops over windows are not vectorised."""

BIAS_PASSES = 3.0
"""What it costs to write a bias into every row of a result first, over passing over the result once."""

IM2COL = 0.7
"""The same for one element of the matrix into which torch's own convolution unfolds an image."""

CACHE_SHARES = 0.25, 0.5
"""Of the last-level cache: what surely fits, and from where on nothing is left when it is needed again. Neighbours on
the machine have their part of it, and what is read in turn falls out just before its turn comes."""

CACHED_ROWS = 16
"""A batched product of at most so many rows reads an operand of earlier calls, such as keys and values."""

FRESH_BYTES = 32 << 20
"""glibc maps a block of this size anew each time (DEFAULT_MMAP_THRESHOLD_MAX on 64 bits, see mallopt(3))."""
FRESH = "fresh pages"
"""What the evidence says of them."""
TRIMMED = 0.5
"""Share of smaller blocks that are fresh when an operator holds that much in all: glibc gives the free top of its heap
back from twice the largest block ever freed on, so it depends on what ran before."""

LIBRARY_COPIES = 2
"""A convolution's library copies its input and its output into its own order of channels and back."""
OWN_CONVOLUTION = 20480
"""A single image of at most so many numbers is convolved by torch itself, which prepares less
(ConvParams::use_mkldnn, aten/src/ATen/native/Convolution.cpp)."""
OWN_CONVOLUTION_WORK = 8.0

LOOP_BELOW = 400
"""Batched products of fewer multiply-adds than this are done by torch's own loop, without a call for each
(aten/src/ATen/native/LinearAlgebra.cpp)."""
PRODUCT_LAUNCHES = 0.1
HALF_ROWS = 4
"""Rows of a batched product at which half of the rate is reached: the height of a register tile."""
ATTENTION_ROW, ATTENTION_PAIR = 140.0, 0.55
"""Cost of one query and of one pair of query and key in fused attention, beside the products, over that of an exp."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Seconds of one operator, part by part; they add up."""

    host: float
    weights: float = 0.0
    arithmetic: float = 0.0
    moving: float = 0.0
    functions: float = 0.0
    fresh: float = 0.0
    evidence: str = ""

    def total(self) -> OperatorTime:
        """The sum, and which of it is computing, moving and overhead."""
        compute, memory = self.arithmetic + self.functions, self.weights + self.moving + self.fresh
        return OperatorTime(
            seconds=self.host + compute + memory,
            compute_seconds=compute,
            memory_seconds=memory,
            overhead_seconds=self.host,
            evidence=", ".join(part for part in (self.evidence, FRESH if self.fresh else "") if part),
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
    batch: float

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


def after_last_call(work: Work, spec: DeviceSpec, batch: float, sequence: float) -> DeviceSpec:
    """The device as a call finds it when the one before left weights and keys in the cache: they stream faster."""
    largest = max((o.read_bytes(batch, sequence) + o.written_bytes(batch, sequence) for o in work.operators), default=0)
    stored = sum(o.repeat * _stored_bytes(o, batch, sequence) for o in work.operators)
    gain = _gain(_hit(stored + largest, spec), constants_of(spec)["cached_bandwidth_ratio"])
    faster = {f"{way}_bandwidth_share": gain * constants_of(spec)[f"{way}_bandwidth_share"] for way in _WAYS}
    return replace(spec, constants=spec.constants | faster)


def _stored_bytes(operator: Operator, batch: float, sequence: float) -> float:
    """Bytes that this call reads and an earlier one has written or read: weights, keys and values."""
    weights = operator.weight_bytes(batch, sequence)
    gemm = operator.gemm
    if weights or operator.kind not in ("matmul", "attention") or gemm is None:
        return weights
    return _kept(operator.read_bytes(batch, sequence), gemm.m(batch, sequence))


def _kept(read_bytes: float, rows: float) -> float:
    """Bytes of keys and values among those that a product without weights reads."""
    return read_bytes if rows <= CACHED_ROWS else 0.0


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
        batch=batch,
    )  # fmt: skip


def _product(s: Sizes) -> Parts:
    """A Linear, or products of two activations."""
    if not s.weight_bytes:
        return _batched(s)
    return Parts(
        host=HOST_WORK["matmul"] * s.launch,
        weights=_weights(s, s.weight_bytes, s.m),
        arithmetic=s.flops / (s.peak * s.constants["product_efficiency"]),
        moving=_moving(s, s.read_bytes + s.written_bytes * (1 + BIAS_PASSES * _has_bias(s))),
        fresh=_fresh(s, s.written_bytes),
        evidence="weights read as they lie" if s.m <= 1 else "weights repacked",
    )


def _batched(s: Sizes) -> Parts:
    """Many small products: each has its own call unless it is tiny; the larger operand is read from where it lies."""
    calls = s.count if s.m * s.n * s.k >= LOOP_BELOW else 0.0
    rate = s.peak * s.constants["product_efficiency"] * _saturation(s.m, HALF_ROWS)
    stored = _kept(s.read_bytes, s.m)
    return Parts(
        host=(HOST_WORK["matmul"] + PRODUCT_LAUNCHES * calls) * s.launch,
        weights=stored / (s.spec.bandwidth * s.constants["vector_bandwidth_share"]),
        arithmetic=s.flops / rate,
        moving=_moving(s, s.read_bytes + s.written_bytes - stored),
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
    """oneDNN's: reorders to blocks of channels, computes, and back; or torch's own for one small image."""
    rate = s.peak * s.constants["convolution_efficiency"] * _saturation(s.n, s.constants["convolution_half_channels"])
    if s.batch <= 1 and s.count == 1 and s.read_bytes <= OWN_CONVOLUTION * s.element_bytes:
        unfolded = s.m * s.k if s.k * s.element_bytes * s.m > s.read_bytes else 0.0
        return Parts(
            host=OWN_CONVOLUTION_WORK * s.launch,
            weights=_weights(s, s.weight_bytes, 2),
            arithmetic=s.flops / rate,
            moving=_moving(s, s.read_bytes + s.written_bytes),
            functions=_functions(s, IM2COL * unfolded),
        )
    return Parts(
        host=HOST_WORK["convolution"] * s.launch,
        weights=_weights(s, s.weight_bytes, 2),
        arithmetic=s.flops / rate,
        moving=_moving(s, LIBRARY_COPIES * (s.read_bytes + s.written_bytes)),
        fresh=_fresh(s, s.written_bytes, s.written_bytes, s.read_bytes),
    )


def _attention(s: Sizes) -> Parts:
    """Fused attention: two products, and between them a maximum, exps and a sum of each row of scores.

    A causal mask saves nothing: blocks of scores are computed whole.
    """
    pairs, stored = s.count * s.m * s.n, _kept(s.read_bytes, s.m)
    return Parts(
        host=HOST_WORK["attention"] * s.launch,
        weights=stored / (s.spec.bandwidth * s.constants["vector_bandwidth_share"]),
        arithmetic=max(s.flops, 4 * pairs * s.k) / (s.peak * s.constants["attention_efficiency"]),
        functions=_functions(s, ATTENTION_ROW * s.count * s.m + ATTENTION_PAIR * pairs),
        moving=_moving(s, s.read_bytes + s.written_bytes - stored),
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
    elements = FUNCTIONS.get(s.name, 0.0) * s.written_bytes / s.element_bytes + WINDOWS.get(s.name, 0.0) * s.flops
    return Parts(
        host=HOST_WORK_BY_NAME.get(s.name, HOST_WORK[s.operator.kind]) * s.launch,
        moving=_moving(s, s.weight_bytes + s.read_bytes + s.written_bytes),
        functions=_functions(s, elements),
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
    hit = _hit(s.read_bytes + s.written_bytes, s.spec)
    return moved / (s.spec.bandwidth * _gain(hit, s.constants["cached_bandwidth_ratio"]))


def _hit(held: float, spec: DeviceSpec) -> float:
    """Share of the accesses that find the cache filled, when so many bytes are held between two of them."""
    surely, never = (share * (spec.cache_bytes or 0) for share in CACHE_SHARES)
    return 1.0 if held <= surely else max(0.0, (never - held) / (never - surely)) if never > surely else 0.0


def _gain(hit: float, ratio: float) -> float:
    """Bandwidth over the main memory's when that share of the bytes comes from a cache `ratio` times as fast."""
    return 1 / (hit / ratio + 1 - hit)


def _functions(s: Sizes, elements: float) -> float:
    """Seconds of so many exps, which torch computes in fp32 whatever the dtype."""
    return elements * s.constants["function_flops"] / s.spec.flops.get("fp32", s.peak)


def _fresh(s: Sizes, *blocks: float) -> float:
    """Seconds to write blocks whose pages the system has to clear first."""
    mapped = sum(block for block in blocks if block >= FRESH_BYTES)
    trims = s.read_bytes + sum(blocks) >= FRESH_BYTES
    fresh = mapped + (TRIMMED * (sum(blocks) - mapped) if trims else 0.0)
    return fresh / (s.spec.bandwidth * s.constants["fresh_bandwidth_share"])


def _has_bias(s: Sizes) -> int:
    """A product with a bias writes the bias first and adds to it."""
    return int(s.name.startswith("addmm"))


def _saturation(x: float, half: float) -> float:
    return x / (x + half)
