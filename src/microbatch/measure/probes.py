"""Single operators of torch with both of their sides: a call to time, and the `Operator` that the time model sees.

Sizes are whole numbers here, so the polynomials are constants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from microbatch.work.operators import Gemm, Operator
from microbatch.work.polynomial import Polynomial, constant

_FLOAT = 4
_CHAIN = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One operator of one shape.

    Attributes:
        name: shape in words.
        operator: what the model of time gets.
        call: runs it `runs` times.
        runs: how often `call` runs it.
    """

    name: str
    operator: Operator
    call: Callable[[], object]
    runs: int = 1


def linear(weights: list[Tensor], rows: int) -> Probe:
    """A Linear over many weights in turn, so that each of them comes from where a large model's would: (n, k) each."""
    n, k = weights[0].shape
    x, bias = torch.randn(rows, k), torch.zeros(n)

    def call() -> None:
        for weight in weights:
            functional.linear(x, weight, bias)

    operator = Operator(
        name="aten::addmm", kind="matmul", gemm=_gemm(rows, n, k), flops=constant(2 * rows * n * k),
        weight_bytes=_bytes(n * k + n), read_bytes=_bytes(rows * k), written_bytes=_bytes(rows * n),
    )  # fmt: skip
    return Probe(name=f"Linear {k} to {n} at {rows} rows", operator=operator, call=call, runs=len(weights))


def batched(count: int, m: int, k: int, n: int) -> Probe:
    """`count` products (m, k)·(k, n)."""
    left, right = torch.randn(count, m, k), torch.randn(count, n, k).transpose(1, 2)
    operator = Operator(
        name="aten::bmm", kind="matmul", gemm=_gemm(m, n, k, count), flops=constant(2 * count * m * n * k),
        read_bytes=_bytes(count * (m * k + k * n)), written_bytes=_bytes(count * m * n),
    )  # fmt: skip
    return Probe(name=f"{count} products {m}x{k}x{n}", operator=operator, call=lambda: torch.bmm(left, right))


def convolution(batch: int, inputs: int, outputs: int, image: int, kernel: int) -> Probe:
    """A convolution of stride 1 that keeps the image's size."""
    x, weight = torch.randn(batch, inputs, image, image), torch.randn(outputs, inputs, kernel, kernel)
    pixels, depth = batch * image * image, inputs * kernel * kernel
    operator = Operator(
        name="aten::convolution", kind="convolution", gemm=_gemm(pixels, outputs, depth),
        flops=constant(2 * pixels * outputs * depth), weight_bytes=_bytes(outputs * depth),
        read_bytes=_bytes(pixels * inputs), written_bytes=_bytes(pixels * outputs),
    )  # fmt: skip
    name = f"convolution {kernel}x{kernel} of {inputs} to {outputs} channels, {batch} images of {image}"
    return Probe(name=name, operator=operator, call=lambda: functional.conv2d(x, weight, padding=kernel // 2))


def attention(batch: int, heads: int, sequence: int, width: int) -> Probe:
    """Fused attention of every token to every token."""
    x = torch.randn(batch, heads, sequence, width)
    pairs, size = batch * heads * sequence * sequence, batch * heads * sequence * width
    operator = Operator(
        name="aten::scaled_dot_product_attention", kind="attention",
        gemm=_gemm(sequence, sequence, width, batch * heads), flops=constant(4 * pairs * width),
        read_bytes=_bytes(3 * size), written_bytes=_bytes(size),
    )  # fmt: skip
    name = f"attention of {batch}x{heads} heads, {sequence} tokens of {width}"
    return Probe(name=name, operator=operator, call=lambda: functional.scaled_dot_product_attention(x, x, x))


def elementwise(name: str, function: Callable[[Tensor], Tensor], elements: int, *, kind: str = "elementwise") -> Probe:
    """Passes over rows of 256 numbers, each over the result of the one before."""
    x = torch.randn(max(1, elements // 256), 256)

    def call() -> None:
        result = x
        for _ in range(_CHAIN):
            result = function(result)

    operator = Operator(name=f"aten::{name}", kind=kind, read_bytes=_bytes(x.numel()), written_bytes=_bytes(x.numel()))
    return Probe(name=f"{name} of {x.numel()} numbers", operator=operator, call=call, runs=_CHAIN)


def _gemm(m: int, n: int, k: int, count: int = 1) -> Gemm:
    return Gemm(m=constant(m), n=constant(n), k=constant(k), count=constant(count))


def _bytes(numbers: int) -> Polynomial:
    return constant(_FLOAT * numbers)
