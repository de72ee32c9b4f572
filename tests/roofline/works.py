"""Works made by hand from the textbook's formulas: an MLP, a language model that decodes, a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from microbatch.hardware.catalogue import load_device
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.roofline.operator_time import OperatorTime
from microbatch.roofline.ridge import rate_of
from microbatch.roofline.time import TIMERS
from microbatch.units import DTYPE_BYTES
from microbatch.work.operators import Gemm, Operator, Routed, Work
from microbatch.work.polynomial import Polynomial, constant


def per_item(value: float) -> Polynomial:
    """value · b"""
    return Polynomial({(1, 0): value})


def per_token(value: float) -> Polynomial:
    """value · b · s"""
    return Polynomial({(1, 1): value})


def linear(inputs: int, outputs: int, dtype: str, *, layer: str = "linear", repeat: int = 1) -> Operator:
    """A product with weights and one row for each item."""
    size = DTYPE_BYTES[dtype]
    return Operator(
        name="aten::mm", kind="matmul", layer=layer, dtype=dtype, flops=per_item(2 * inputs * outputs),
        weight_bytes=constant(size * inputs * outputs), read_bytes=per_item(size * inputs),
        written_bytes=per_item(size * outputs), repeat=repeat,
        gemm=Gemm(m=per_item(1), n=constant(outputs), k=constant(inputs)),
    )  # fmt: skip


def elementwise(width: int, dtype: str, *, layer: str = "act", repeat: int = 1) -> Operator:
    """Reads and writes as much."""
    moved = per_item(DTYPE_BYTES[dtype] * width)
    return Operator(
        name="aten::relu", kind="elementwise", layer=layer, dtype=dtype, flops=per_item(width), read_bytes=moved,
        written_bytes=moved, repeat=repeat,
    )  # fmt: skip


def mlp(*, depth: int = 8, width: int = 1024, dtype: str = "fp16", mode: str = "inference") -> Work:
    """Linear and ReLU, `depth` times."""
    operators = (linear(width, width, dtype, repeat=depth), elementwise(width, dtype, repeat=depth))
    count = depth * width * width
    return Work(
        operators=operators, model=f"mlp:depth={depth},width={width}", dtype=dtype, mode=mode, parameters=count,
        weight_bytes=round(count * DTYPE_BYTES[dtype]),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A language model of the Llama family."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int

    @property
    def head(self) -> int:
        return self.hidden // self.heads


LLAMA_2_7B = Shape(layers=32, hidden=4096, heads=32, kv_heads=32, ffn=11008, vocabulary=32000)
LLAMA_3_8B = Shape(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)
LLAMA_3_70B = Shape(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocabulary=128256)


def decoding(shape: Shape, dtype: str = "bf16", *, parameters: float | None = None) -> Work:
    """One token for each of b sequences with s tokens in their caches."""
    d, kv, size, n = shape.hidden, shape.kv_heads * shape.head, DTYPE_BYTES[dtype], shape.layers
    attention = Operator(
        name="aten::scaled_dot_product_attention", kind="attention", layer="layers.0.attention", dtype=dtype,
        flops=per_token(4 * shape.heads * shape.head), written_bytes=per_item(size * d), repeat=n,
        read_bytes=Polynomial({(1, 1): 2 * kv * size, (1, 0): size * d}),
        gemm=Gemm(m=constant(1), n=Polynomial({(0, 1): 1.0}), k=constant(shape.head), count=per_item(shape.heads)),
    )  # fmt: skip
    operators = (
        Operator(name="aten::embedding", kind="lookup", layer="embedding", dtype=dtype,
                 read_bytes=per_item(size * d), written_bytes=per_item(size * d)),
        elementwise(d, dtype, layer="layers.0.norm", repeat=n),
        linear(d, d, dtype, layer="layers.0.attention.q", repeat=n),
        linear(d, kv, dtype, layer="layers.0.attention.k", repeat=n),
        linear(d, kv, dtype, layer="layers.0.attention.v", repeat=n),
        attention,
        linear(d, d, dtype, layer="layers.0.attention.o", repeat=n),
        linear(d, shape.ffn, dtype, layer="layers.0.mlp.gate", repeat=n),
        linear(d, shape.ffn, dtype, layer="layers.0.mlp.up", repeat=n),
        elementwise(shape.ffn, dtype, layer="layers.0.mlp.act", repeat=n),
        linear(shape.ffn, d, dtype, layer="layers.0.mlp.down", repeat=n),
        linear(d, shape.vocabulary, dtype, layer="head"),
    )  # fmt: skip
    count = parameters or n * (2 * d * d + 2 * d * kv + 3 * d * shape.ffn) + 2 * d * shape.vocabulary
    return Work(
        operators=operators, model="llama", mode="decode", dtype=dtype, unit="sequences", sequence_free=True,
        parameters=round(count), weight_bytes=round(count * size), cache_bytes=per_token(n * 2 * kv * size),
    )  # fmt: skip


def experts(*, count: int = 8, top_k: int = 2, width: int = 1024, dtype: str = "bf16") -> Work:
    """One layer of experts, each token through `top_k` of them."""
    size = DTYPE_BYTES[dtype]
    operator = Operator(
        name="experts", kind="experts", layer="moe", dtype=dtype, flops=per_item(2 * top_k * width * width),
        weight_bytes=constant(size * count * width * width), read_bytes=per_item(size * top_k * width),
        written_bytes=per_item(size * top_k * width), routed=Routed(experts=count, top_k=top_k, tokens=per_item(1)),
        gemm=Gemm(m=per_item(top_k / count), n=constant(width), k=constant(width), count=constant(count)),
    )  # fmt: skip
    parameters = count * width * width
    return Work(operators=(operator,), dtype=dtype, parameters=parameters, weight_bytes=round(parameters * size))


def plain(name: str) -> DeviceSpec:
    """A catalogue device timed by its datasheet alone: tests of what is made of times do not follow a model of them."""
    TIMERS.setdefault("plain", _plain_time)
    return replace(load_device(name), kind="plain")


def _plain_time(operator: Operator, spec: DeviceSpec, batch: float, sequence: float) -> OperatorTime:
    moved = sum(part(batch, sequence) for part in (operator.weight_bytes, operator.read_bytes, operator.written_bytes))
    compute, memory = operator.flops(batch, sequence) / rate_of(spec, operator.dtype), moved / spec.bandwidth
    seconds = max(compute, memory)
    return OperatorTime(seconds=seconds, compute_seconds=compute, memory_seconds=memory, overhead_seconds=0.0)
