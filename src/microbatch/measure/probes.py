"""Pieces of torch with both of their sides: a call to time, and the `Work` that the time model sees.

Sizes are whole numbers here, so the polynomials are constants. Where a model would not find its weights in the cache,
a probe has many weights and uses one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from microbatch.work.operators import Gemm, Operator, Work
from microbatch.work.polynomial import Polynomial, constant

_FLOAT = 4
_CHAIN = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One call.

    Attributes:
        name: shape in words.
        work: what the call does.
        call: does it.
    """

    name: str
    work: Work
    call: Callable[[], object]


class FeedForward(nn.Module):
    """x + down(gelu(up(norm(x)))), as it stands in most models; x: (rows, width)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return added


class Activated(nn.Module):
    """relu(linear(x)), as in a plain perceptron, whose weights keep more of the cache; x: (rows, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Residual(nn.Module):
    """relu(x + two convolutions of 3×3 with their normalisations); x: (batch, channels, image, image)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(hidden)) + x)


def feed_forward(layers: Sequence[FeedForward], rows: int) -> Probe:
    """One layer after the other over the same rows."""
    n, k = layers[0].up.weight.shape
    x = torch.randn(rows, k)
    operators = (
        _elementwise("native_layer_norm", rows * k, kind="normalisation"),
        _linear(rows, k, n),
        _elementwise("gelu", rows * n),
        _linear(rows, n, k),
        _elementwise("add", rows * k, inputs=2),
    )
    name = f"{len(layers)} feed-forward layers {k} to {n} at {rows} rows"
    return Probe(name=name, work=_work(operators, len(layers)), call=_chained(layers, x))


def activated(layers: Sequence[Activated], rows: int) -> Probe:
    """One layer after the other over the same rows."""
    width = layers[0].linear.in_features
    operators = (_linear(rows, width, width), _elementwise("relu", rows * width))
    name = f"{len(layers)} activated layers of {width} at {rows} rows"
    return Probe(name=name, work=_work(operators, len(layers)), call=_chained(layers, torch.randn(rows, width)))


def residual(channels: int, image: int, batch: int) -> Probe:
    """Two residual layers."""
    x, size = torch.randn(batch, channels, image, image), batch * channels * image * image
    normalised, active = _elementwise("native_batch_norm", size, kind="normalisation"), _elementwise("relu", size)
    convolved = _convolution(batch * image * image, channels)
    added = _elementwise("add", size, inputs=2)
    operators = (convolved, normalised, active, convolved, normalised, added, active)
    layers = [Residual(channels).eval() for _ in range(2)]
    name = f"residual layers of {channels} channels, {batch} images of {image}"
    return Probe(name=name, work=_work(operators, len(layers)), call=_chained(layers, x))


def attention(batch: int, heads: int, sequence: int, width: int) -> Probe:
    """Fused attention of every token to every token, on heads cut out of rows as a model cuts them."""
    x = torch.randn(batch, sequence, heads, width).transpose(1, 2)
    pairs, size = batch * heads * sequence * sequence, batch * heads * sequence * width
    operator = Operator(
        name="aten::scaled_dot_product_attention", kind="attention",
        gemm=_gemm(sequence, sequence, width, batch * heads), flops=constant(4 * pairs * width),
        read_bytes=_bytes(3 * size), written_bytes=_bytes(size),
    )  # fmt: skip
    name = f"attention of {batch}x{heads} heads, {sequence} tokens of {width}"
    call = lambda: functional.scaled_dot_product_attention(x, x, x)  # noqa: E731
    return Probe(name=name, work=_work((operator,), 1), call=call)


def elementwise(name: str, function: Callable[[Tensor], Tensor], elements: int) -> Probe:
    """Passes over rows of 256 numbers, each over the result of the one before."""
    x = torch.randn(max(1, elements // 256), 256)
    work = _work((_elementwise(name, x.numel()),), _CHAIN)
    return Probe(name=f"{name} of {x.numel()} numbers", work=work, call=_chained([function] * _CHAIN, x))


def _chained(layers: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Callable[[], object]:
    def call() -> Tensor:
        result = x
        for layer in layers:
            result = layer(result)
        return result

    return call


def _work(operators: Sequence[Operator], repeat: int) -> Work:
    return Work(operators=tuple(replace(operator, repeat=repeat) for operator in operators))


def _linear(rows: int, k: int, n: int) -> Operator:
    return Operator(
        name="aten::addmm", kind="matmul", gemm=_gemm(rows, n, k), flops=constant(2 * rows * n * k),
        weight_bytes=_bytes(n * k + n), read_bytes=_bytes(rows * k), written_bytes=_bytes(rows * n),
    )  # fmt: skip


def _convolution(pixels: int, channels: int) -> Operator:
    depth = 9 * channels
    return Operator(
        name="aten::convolution", kind="convolution", gemm=_gemm(pixels, channels, depth),
        flops=constant(2 * pixels * channels * depth), weight_bytes=_bytes(channels * depth),
        read_bytes=_bytes(pixels * channels), written_bytes=_bytes(pixels * channels),
    )  # fmt: skip


def _elementwise(name: str, elements: int, *, kind: str = "elementwise", inputs: int = 1) -> Operator:
    return Operator(
        name=f"aten::{name}", kind=kind, read_bytes=_bytes(inputs * elements), written_bytes=_bytes(elements)
    )


def _gemm(m: int, n: int, k: int, count: int = 1) -> Gemm:
    return Gemm(m=constant(m), n=constant(n), k=constant(k), count=constant(count))


def _bytes(numbers: int) -> Polynomial:
    return constant(_FLOAT * numbers)
