"""The matrix product inside an operator: a table from the operator's name to its (m, n, k, count).

An operator with a row here does ``count`` products of (m × k) by (k × n). m is the side of the batch: for a linear
layer its rows, for a convolution the pixels of its im2col product (the input's pixels where it is transposed), for
fused attention the queries of its first product, for a recurrent layer the rows of one step.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from microbatch.capture.formulas import FUSED_ATTENTION, Arguments, convolution_passes, first

Product = tuple[int, int, int, int]
"""(m, n, k, count)"""


def _rows(left: str) -> Callable[[Arguments, Any], Product]:
    """All rows of the argument named `left` against one matrix."""
    return lambda given, out: (
        given[left].numel() // given[left].shape[-1],
        first(out).shape[-1],
        given[left].shape[-1],
        1,
    )


def _each(left: str) -> Callable[[Arguments, Any], Product]:
    """One product for each matrix in the argument named `left`: (batch, m, k)."""
    return lambda given, out: (
        given[left].shape[-2],
        out.shape[-1],
        given[left].shape[-1],
        prod(given[left].shape[:-2]),
    )


def _added_up(given: Arguments, out: Any) -> Product:
    batches, m, k = given["batch1"].shape
    return m, out.shape[-1], k, batches


def _vector(left: str) -> Callable[[Arguments, Any], Product]:
    return lambda given, _: (given[left].numel() // given[left].shape[-1], 1, given[left].shape[-1], 1)


def _convolution(given: Arguments, out: Any) -> Product:
    """(B·Ho·Wo × Ci/g·k²)·(Ci/g·k² × Co/g) for each of g groups; transposed: (B·Hi·Wi × Ci/g)·(Ci/g × Co/g·k²)."""
    weight, groups, transposed = given["weight"], given["groups"], given["transposed"]
    image = given["input"] if transposed else first(out)
    kernel = prod(weight.shape[2:])
    pixels = image.numel() // image.shape[1]
    if transposed:
        return pixels, weight.shape[1] * kernel, weight.shape[0] // groups, groups
    return pixels, weight.shape[0] // groups, weight.shape[1] * kernel, groups


def _convolution_backward(given: Arguments, _: Any) -> Product:
    """The forward's product, once for each gradient that is asked for."""
    m, n, k, groups = _convolution(given, given["grad_output"])
    return m, n, k, groups * convolution_passes(given)


def _attention(given: Arguments, _: Any) -> Product:
    query, key = given["query"], given["key"]
    return query.shape[-2], key.shape[-2], query.shape[-1], prod(query.shape[:-2])


def _onednn_rnn(weights: tuple[str, str]) -> Callable[[Arguments, Any], Product]:
    """Input (steps, batch, width): one product of (batch × width+hidden) a step."""

    def product(given: Arguments, _: Any) -> Product:
        (steps, batch, _), (gates, width) = given["input"].shape, given[weights[0]].shape
        return batch, gates, width + given[weights[1]].shape[1], steps

    return product


def _packed(given: Arguments, out: Any) -> Product:
    return given["X"].numel() // given["X"].shape[-1], out.shape[-1], given["X"].shape[-1], 1


PRODUCTS: dict[str, Callable[[Arguments, Any], Product]] = {
    "mm": _rows("self"),
    "addmm": _rows("mat1"),
    "linear": _rows("input"),
    "matmul": _rows("self"),
    "_int_mm": _rows("self"),
    "_grouped_mm": _rows("self"),
    "_scaled_mm": _rows("self"),
    "_weight_int4pack_mm": _rows("self"),
    "_weight_int4pack_mm_for_cpu": _rows("self"),
    "_weight_int8pack_mm": _rows("self"),
    "bmm": _each("self"),
    "baddbmm": _each("batch1"),
    "addbmm": _added_up,
    "mv": _vector("self"),
    "addmv": _vector("mat"),
    "dot": _vector("self"),
    "vdot": _vector("self"),
    "quantized::linear_dynamic": _packed,
    "quantized::linear_relu_dynamic": _packed,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "mkldnn_rnn_layer": _onednn_rnn(("weight0", "weight1")),
    "mkldnn_rnn_layer_backward": _onednn_rnn(("weight1", "weight2")),
    **dict.fromkeys(FUSED_ATTENTION, _attention),
    **dict.fromkeys((f"{name}_backward" for name in FUSED_ATTENTION), _attention),
}
