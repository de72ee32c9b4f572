"""Operators of published measurements, from closed forms: a Llama that decodes as gpt-fast runs it, ResNet-50 v2."""

from __future__ import annotations

from dataclasses import dataclass

from microbatch.units import DTYPE_BYTES
from microbatch.work.operators import Gemm, Operator, Work
from microbatch.work.polynomial import Polynomial, constant
from tests.roofline.works import Shape, per_item


@dataclass(frozen=True, kw_only=True)
class Stored:
    """How weights lie in memory: bytes of one, scales included."""

    dtype: str | None = None
    bytes: float = 2.0


BF16 = Stored()
INT8 = Stored(dtype="int8", bytes=1.0)
INT4 = Stored(dtype="int4", bytes=0.5 + 4 / 32)
"""With a bf16 scale and a bf16 zero for each group of 32 weights, as gpt-fast's 4-bit (G=32)."""


def product(inputs: int, outputs: int, stored: Stored = BF16, *, dtype: str = "bf16", repeat: int = 1) -> Operator:
    """A Linear with one row for each item."""
    size = DTYPE_BYTES[dtype]
    return Operator(
        name="mm", kind="matmul", dtype=dtype, weight_dtype=stored.dtype, flops=per_item(2 * inputs * outputs),
        weight_bytes=constant(stored.bytes * inputs * outputs), read_bytes=per_item(size * inputs),
        written_bytes=per_item(size * outputs), repeat=repeat,
        gemm=Gemm(m=per_item(1), n=constant(outputs), k=constant(inputs)),
    )  # fmt: skip


def one_pass(kind: str, read: float, written: float, *, dtype: str = "bf16", repeat: int = 1) -> Operator:
    """A kernel that reads and writes so many elements for each item."""
    size = DTYPE_BYTES[dtype]
    return Operator(name=kind, kind=kind, dtype=dtype, read_bytes=per_item(size * read),
                    written_bytes=per_item(size * written), repeat=repeat)  # fmt: skip


def compiled_decoding(shape: Shape, stored: Stored = BF16) -> Work:
    """The kernels of one compiled decode step with s tokens in each cache: query, key and value in one product."""
    d, n, f, kv = shape.hidden, shape.layers, shape.ffn, shape.kv_heads * shape.head
    attention = Operator(
        name="sdpa", kind="attention", dtype="bf16", flops=Polynomial({(1, 1): 4 * d}),
        read_bytes=Polynomial({(1, 1): 4 * kv, (1, 0): 2 * d}), written_bytes=per_item(2 * d), repeat=n,
        gemm=Gemm(m=constant(1), n=Polynomial({(0, 1): 1}), k=constant(shape.head), count=per_item(shape.heads)),
    )  # fmt: skip
    return Work(operators=(
        one_pass("normalisation", 2 * d, d, repeat=n), product(d, d + 2 * kv, stored, repeat=n),
        one_pass("elementwise", d + 2 * kv, d + 2 * kv, repeat=n), attention, product(d, d, stored, repeat=n),
        one_pass("normalisation", 3 * d, 2 * d, repeat=n), product(d, f, stored, repeat=n),
        product(d, f, stored, repeat=n), one_pass("elementwise", 2 * f, f, repeat=n), product(f, d, stored, repeat=n),
        one_pass("normalisation", d, d), product(d, shape.vocabulary, stored),
    ))  # fmt: skip


def convolution(
    channels: tuple[int, int], side: int, *, kernel: int = 1, stride: int = 1, dtype: str = "tf32", added: int = 0
) -> Operator:
    """A square convolution of a side×side image as its im2col product; `added` elements are read and added on top."""
    (inputs, outputs), size, out = channels, DTYPE_BYTES[dtype], side // stride
    depth = inputs * kernel**2
    return Operator(
        name="conv", kind="convolution", dtype=dtype, flops=per_item(2 * out**2 * outputs * depth),
        weight_bytes=constant(size * outputs * depth), read_bytes=per_item(size * (side**2 * inputs + added)),
        written_bytes=per_item(size * out**2 * outputs),
        gemm=Gemm(m=per_item(out**2), n=constant(outputs), k=constant(depth)),
    )  # fmt: skip


def resnet50_v2(dtype: str) -> Work:
    """ResNet-50 v2 (arXiv 1603.05027) as an engine runs it.

    Additions, and the scale and ReLU that follow a convolution, are part of it; those before a block are not, since the
    shortcut needs the sum too.
    """
    operators = [
        convolution((3, 64), 224, kernel=7, stride=2, dtype=dtype),
        one_pass("reduction", 112**2 * 64, 56**2 * 64, dtype=dtype),
    ]
    inputs, side = 64, 56
    for width, blocks, first in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            stride = first if block == 0 else 1
            out = side // stride
            operators += [
                one_pass("elementwise", side**2 * inputs, side**2 * inputs, dtype=dtype),
                convolution((inputs, width), side, dtype=dtype),
                convolution((width, width), side, kernel=3, stride=stride, dtype=dtype),
                convolution((width, 4 * width), out, dtype=dtype, added=out**2 * 4 * width),
            ]
            if block == 0:
                operators.append(convolution((inputs, 4 * width), side, stride=stride, dtype=dtype))
            inputs, side = 4 * width, out
    stored = Stored(bytes=DTYPE_BYTES[dtype])
    operators += [
        one_pass("reduction", 49 * 2048, 2048, dtype=dtype), product(2048, 1000, stored, dtype=dtype),
    ]  # fmt: skip
    return Work(operators=tuple(operators))
