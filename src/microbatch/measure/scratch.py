"""What CPU kernels allocate and free inside themselves, which no dispatcher sees. Measured and modelled, torch 2.13."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _ConvBackend  # type: ignore[attr-defined]


def scratch_bytes(operator: Any, args: Sequence[Any], result: object) -> int:
    """Bytes that an operator holds at its own peak beside its result; 0 for one that is not listed."""
    formula = _SCRATCH.get(getattr(operator, "name", str)().partition(".")[0])
    if formula is None or not isinstance(args[0], Tensor) or args[0].device.type != "cpu":
        return 0
    arguments = {argument.name: value for argument, value in zip(operator._schema.arguments, args)}
    return formula(arguments, result)


def is_unknown(operator: Any, args: Sequence[Any]) -> bool:
    """Whether an operator holds scratch that no formula here gives: transposed and 3-d convolutions on a CPU."""
    name = getattr(operator, "name", str)().partition(".")[0]
    if name not in ("aten::convolution", "aten::convolution_backward") or args[0].device.type != "cpu":
        return False
    arguments = {argument.name: value for argument, value in zip(operator._schema.arguments, args)}
    return bool(arguments["transposed"]) or arguments["input"].dim() > 4


def _convolution(given: dict[str, Any], result: object) -> int:
    """Copies of input, weight and output in the layout of the kernel, or the native kernel's columns."""
    assert isinstance(result, Tensor)
    backend = _backend(given, given["bias"])
    if backend == _ConvBackend.Slow2d:
        return _columns(given, result)
    if backend != _ConvBackend.Mkldnn:
        return 0
    source, weight, output = _blocked(given, result)
    if _is_channels_last(given["input"]):
        return weight
    return max(source + weight + output - _size(result), output)


def _convolution_backward(given: dict[str, Any], _: object) -> int:
    wants_input, wants_weight, _wants_bias = given["output_mask"]
    backend = _backend(given, None)
    if backend == _ConvBackend.Slow2d:
        return _columns(given, given["grad_output"]) if wants_weight else 0
    if backend != _ConvBackend.Mkldnn:
        return 0
    source, weight, output = _blocked(given, given["grad_output"])
    if _is_channels_last(given["input"]):
        return weight
    beside_weight = source + weight + output - _size(given["weight"] if wants_weight else given["input"])
    # at a stride the input's gradient passes through two copies of its own before the weight's is begun
    beside_input = 2 * _size(given["input"]) - _size(given["weight"]) if wants_input and max(given["stride"]) > 1 else 0
    return max(0, beside_weight, beside_input)


def _backend(given: dict[str, Any], bias: Tensor | None) -> object:
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    options = [given[name] for name in names]
    return torch._C._select_conv_backend(given["input"], given["weight"], bias, *options)


def _columns(given: dict[str, Any], output: Tensor) -> int:
    """The native kernel unfolds the input into C·kh·kw values for every output position."""
    if _is_pointwise(given["weight"]):
        return 0
    positions = output.shape[0] * math.prod(output.shape[2:])
    return int(positions * math.prod(given["weight"].shape[1:]) * output.element_size())


def _blocked(given: dict[str, Any], output: Tensor) -> tuple[int, int, int]:
    """Bytes of input, weight and output with channels in blocks of one vector register (oneDNN's nChw8c, nChw16c).

    An input of up to 4 channels is read as it is.
    """
    source, weight = given["input"], given["weight"]
    lanes = 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8
    copied = _size(source) * _rounded(source.shape[1], lanes) if source.shape[1] > 4 else 0.0
    whole = _size(weight) if given["groups"] > 1 else _size(weight) * _rounded(weight.shape[0], lanes)
    return int(copied), int(whole), int(_size(output) * _rounded(output.shape[1], lanes))


def _rounded(channels: int, lanes: int) -> float:
    """Channels in whole blocks, over channels."""
    return -(-channels // lanes) * lanes / channels


def _is_pointwise(weight: Tensor) -> bool:
    return math.prod(weight.shape[2:]) == 1


def _is_channels_last(source: Tensor) -> bool:
    return source.dim() == 4 and not source.is_contiguous() and source.is_contiguous(memory_format=torch.channels_last)


def _encoder_layer(given: dict[str, Any], result: object) -> int:
    """nn.TransformerEncoderLayer in eval mode: attention, then a feed-forward block, in one operator."""
    source = given["src"]
    own = source.numel() * source.element_size()
    hidden = source.numel() // source.shape[-1] * given["ffn_weight_1"].shape[0] * source.element_size()
    inside = max(6 * own, 3 * own + _scores(source, given["num_heads"]), 2 * own + hidden)
    return int(inside + (own if given["norm_first"] else 0) - _size(result))


def _attention(given: dict[str, Any], result: object) -> int:
    """nn.MultiheadAttention in eval mode: query, key and value twice (projected, then split into heads), the scores."""
    query = given["query"]
    own = query.numel() * query.element_size()
    beside = 3 * own + _scores(query, given["num_head"])
    return int(max(6 * own - _size(result), beside - (0 if given.get("need_weights", True) else _size(result))))


def _scores(source: Tensor, heads: int) -> int:
    """Bytes of the score matrix of self-attention, batch first: B·H·S·S."""
    return source.shape[0] * heads * source.shape[1] ** 2 * source.element_size()


def _upsample(given: dict[str, Any], result: object) -> int:
    """Input and output are copied into channels last, where the fast kernel works."""
    return 0 if _is_channels_last(given["self"]) else _size(given["self"]) + _size(result)


def _batch_norm(given: dict[str, Any], _: object) -> int:
    """With running statistics: scale and shift of every channel."""
    return 0 if given["training"] else 2 * _size(given["running_mean"])


def _product(given: dict[str, Any], _: object) -> int:
    """A matrix that is dense in neither order (the expanded gradient of a sum) is copied first."""
    return sum(_size(value) for value in given.values() if isinstance(value, Tensor) and _must_be_copied(value))


def _must_be_copied(matrix: Tensor) -> bool:
    if matrix.dim() != 2 or 1 in matrix.shape:
        return False
    (rows, columns), (row_stride, column_stride) = matrix.shape, matrix.stride()
    by_row = column_stride == 1 and row_stride >= columns
    by_column = row_stride == 1 and column_stride >= rows
    return not (by_row or by_column)


def _size(result: object) -> int:
    tensors = result if isinstance(result, (tuple, list)) else [result]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor))


_SCRATCH: dict[str, Callable[[dict[str, Any], object], int]] = {
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::_transformer_encoder_layer_fwd": _encoder_layer,
    "aten::_native_multi_head_attention": _attention,
    "aten::native_batch_norm": _batch_norm,
    "aten::upsample_nearest2d": _upsample,
    "aten::_upsample_nearest_exact2d": _upsample,
    "aten::upsample_bilinear2d": _upsample,
    "aten::mm": _product,
}
