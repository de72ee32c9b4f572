"""Floating-point operations of one operator, from its shapes: a table from the operator's name to its closed form.

To count a further operator, write its formula and its row in `FLOPS`. A formula gets the operator's arguments by the
names of its schema, and its result. One multiply-add counts as two operations.

Conventions, so that others can compare:

* Matrix products count 2·m·n·k; the bias is left out.
* Convolutions count 2·B·Ho·Wo·Co·Ci·k²/groups, padded positions included.
* Causal attention counts only the pairs that a mask keeps; an explicit mask counts as all pairs.
* The backward of a fused attention counts 2.5 times its forward: five matrix products instead of two, because the
  scores are computed again (Dao, FlashAttention-2, arXiv 2307.08691, section 4.1). Attention written with plain
  matrix products keeps its scores, so its backward is counted as 2 times its forward by their own formulas.
* Everything else counts a few operations per element (`PER_ELEMENT`), which says what kind of work it is, not
  how many instructions it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

Arguments = Mapping[str, Any]
Formula = Callable[[Arguments, Any], float]

ATTENTION_BACKWARD = 2.5
"""Work of a fused attention's backward over its forward."""


def _product_of(left: str) -> Formula:
    """2·(elements of the result)·k, where k is the last dimension of the argument named `left`."""
    return lambda given, out: float(2 * first(out).numel() * given[left].shape[-1])


def attention_pairs(queries: int, keys: int, *, causal: bool) -> int:
    """Pairs of a query and a key that are computed; causal query i (from 0) sees keys 0..i."""
    if not causal:
        return queries * keys
    below = min(queries, keys)
    return below * (below + 1) // 2 + (queries - below) * keys


def attention_flops(query: Any, key: Any, value: Any, *, causal: bool) -> float:
    """2·B·H·pairs·(d_qk + d_v); with grouped queries H is the number of query heads."""
    pairs = attention_pairs(query.shape[-2], key.shape[-2], causal=causal)
    return float(2 * prod(query.shape[:-2]) * pairs * (query.shape[-1] + value.shape[-1]))


def _attention(given: Arguments, _: Any) -> float:
    return attention_flops(given["query"], given["key"], given["value"], causal=given["is_causal"])


def _attention_backward(given: Arguments, out: Any) -> float:
    return ATTENTION_BACKWARD * _attention(given, out)


def _convolution_pass(given: Arguments, result: Any) -> float:
    """2·pixels·(elements of the weight): the pixels of the result, or of the input where it is transposed."""
    weight = given["weight"]
    image = given["input"] if given["transposed"] else result
    pixels = image.numel() // image.shape[1]
    return float(2 * pixels * weight.numel())


def _convolution_backward(given: Arguments, _: Any) -> float:
    """The gradients of input and weight cost one forward each, where they are asked for; the bias is a sum."""
    bias: int = given["grad_output"].numel() if given["output_mask"][2] else 0
    return float(convolution_passes(given) * _convolution_pass(given, given["grad_output"]) + bias)


def convolution_passes(given: Arguments) -> int:
    """How many of the gradients of input and weight a convolution's backward computes."""
    to_input, to_weight, _ = given["output_mask"]
    return int(to_input) + int(to_weight)


def _onednn_rnn(weights: tuple[str, str]) -> Formula:
    """2·(steps·batch)·(elements of both weight matrices), one layer in one direction; gates' element work left out."""
    return lambda given, _: 2.0 * _steps(given) * sum(given[name].numel() for name in weights)


def _library_rnn(given: Arguments, _: Any) -> float:
    """The same over every layer and direction, for cuDNN and MIOpen."""
    matrices: int = sum(weight.numel() for weight in given["weight"] if weight.dim() == 2)
    return 2.0 * _steps(given) * matrices


def _steps(given: Arguments) -> int:
    tensor = given["input"]
    return int(tensor.numel() // tensor.shape[-1])


def _twice(formula: Formula) -> Formula:
    return lambda given, out: 2 * formula(given, out)


def _pool(given: Arguments, out: Any) -> float:
    """One operation for every element of every window."""
    kernel = given["kernel_size"]
    rank = 3 if given["self"].dim() == 5 else 2
    return float(first(out).numel() * (kernel[0] ** rank if len(kernel) == 1 else prod(kernel)))


def _size_of(source: str) -> Formula:
    """One addition for each element that is added into a larger tensor."""
    return lambda given, _: float(given[source].numel())


def _packed_linear(given: Arguments, out: Any) -> float:
    """2·rows·in·out of a Linear whose weight is packed away from sight."""
    return float(2 * given["X"].numel() * out.shape[-1])


def first(out: Any) -> Any:
    """The first tensor of a result."""
    return out[0] if isinstance(out, tuple | list) else out


FUSED_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math_for_mps",
)

FLOPS: dict[str, Formula] = {
    "mm": _product_of("self"),
    "addmm": _product_of("mat1"),
    "bmm": _product_of("self"),
    "baddbmm": _product_of("batch1"),
    "addbmm": lambda given, _: 2.0 * given["batch1"].numel() * given["batch2"].shape[-1],
    "mv": _product_of("self"),
    "addmv": _product_of("mat"),
    "dot": _product_of("self"),
    "vdot": _product_of("self"),
    "linear": _product_of("input"),
    "matmul": _product_of("self"),
    "linalg_solve_triangular": lambda given, out: float(out.numel() * given["self"].shape[-1]),
    "addr": lambda _, out: 2.0 * out.numel(),
    "_grouped_mm": _product_of("self"),
    "_cdist_forward": lambda given, out: 3.0 * out.numel() * given["x1"].shape[-1],
    "_int_mm": _product_of("self"),
    "_scaled_mm": _product_of("self"),
    "_weight_int4pack_mm": _product_of("self"),
    "_weight_int4pack_mm_for_cpu": _product_of("self"),
    "_weight_int8pack_mm": _product_of("self"),
    "quantized::linear_dynamic": _packed_linear,
    "quantized::linear_relu_dynamic": _packed_linear,
    "convolution": _convolution_pass,
    "convolution_backward": _convolution_backward,
    "mkldnn_rnn_layer": _onednn_rnn(("weight0", "weight1")),
    "mkldnn_rnn_layer_backward": _twice(_onednn_rnn(("weight1", "weight2"))),
    "_cudnn_rnn": _library_rnn,
    "_cudnn_rnn_backward": _twice(_library_rnn),
    "miopen_rnn": _library_rnn,
    "miopen_rnn_backward": _twice(_library_rnn),
    "max_pool2d_with_indices": _pool,
    "max_pool3d_with_indices": _pool,
    "max_pool2d": _pool,
    "avg_pool2d": _pool,
    "avg_pool3d": _pool,
    "index_add": _size_of("source"),
    "index_put": _size_of("values"),
    "_index_put_impl": _size_of("values"),
    "scatter_add": _size_of("src"),
    "scatter_reduce": _size_of("src"),
    "embedding_dense_backward": _size_of("grad_output"),
    "_embedding_bag": lambda given, _: float(given["indices"].numel() * given["weight"].shape[-1]),
    "_embedding_bag_dense_backward": lambda given, _: float(given["indices"].numel() * given["grad"].shape[-1]),
    **dict.fromkeys(FUSED_ATTENTION, _attention),
    **dict.fromkeys((f"{name}_backward" for name in FUSED_ATTENTION), _attention_backward),
}
"""Operators with a formula of their own. Names without a namespace are aten's, in-place forms without underscore."""

NORMALISATIONS = (
    "native_layer_norm", "native_batch_norm", "native_group_norm", "_fused_rms_norm", "cudnn_batch_norm",
    "miopen_batch_norm", "_batch_norm_with_update", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training",
)  # fmt: skip

PER_ELEMENT: dict[str, float] = {
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax", "logsumexp"), 5),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data", "_masked_softmax"), 4),
    **dict.fromkeys(NORMALISATIONS, 7),
    **dict.fromkeys((f"{name}_backward" for name in NORMALISATIONS), 11),
    "batch_norm_backward": 11,
    **dict.fromkeys(("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"), 8),
    **dict.fromkeys(
        ("native_dropout", "native_dropout_backward", "bernoulli", "uniform", "normal", "rand", "randn"), 1
    ),
    **dict.fromkeys(("rand_like", "randn_like", "exponential", "multinomial"), 1),
    **dict.fromkeys(("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward"), 1),
    **dict.fromkeys(("avg_pool2d_backward", "avg_pool3d_backward", "_adaptive_avg_pool2d_backward"), 1),
    **dict.fromkeys(("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d"), 1),
    **dict.fromkeys(("sum", "mean", "prod", "amax", "amin", "max", "min", "argmax", "argmin", "aminmax"), 1),
    **dict.fromkeys(
        (
            "any",
            "all",
            "_is_all_true",
            "_is_any_true",
            "count_nonzero",
            "cumsum",
            "cumprod",
            "_assert_async",
            "linalg_vector_norm",
        ),
        1,
    ),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean", "norm"), 4),
    **dict.fromkeys(("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward"), 1),
    **dict.fromkeys(("mse_loss", "mse_loss_backward", "smooth_l1_loss", "smooth_l1_loss_backward"), 3),
    **dict.fromkeys(("binary_cross_entropy", "binary_cross_entropy_with_logits", "huber_loss"), 5),
    **dict.fromkeys(("threshold_backward", "gelu_backward", "silu_backward", "sigmoid_backward"), 1),
    **dict.fromkeys(("tanh_backward", "hardtanh_backward", "elu_backward", "leaky_relu_backward"), 1),
    **dict.fromkeys(("hardswish_backward", "hardsigmoid_backward", "softplus_backward", "mish_backward"), 1),
    **dict.fromkeys(("glu", "glu_backward", "_prelu_kernel", "_prelu_kernel_backward", "log_sigmoid_forward"), 2),
    **dict.fromkeys(("upsample_nearest2d", "upsample_nearest2d_backward"), 1),
    **dict.fromkeys(("upsample_bilinear2d", "upsample_bilinear2d_backward", "grid_sampler_2d"), 8),
    **dict.fromkeys(("_upsample_bilinear2d_aa", "_upsample_bilinear2d_aa_backward", "upsample_linear1d"), 8),
    **dict.fromkeys(("upsample_trilinear3d", "grid_sampler_3d"), 16),
    **dict.fromkeys(("grid_sampler_2d_backward", "grid_sampler_3d_backward"), 16),
    **dict.fromkeys(("upsample_bicubic2d", "upsample_bicubic2d_backward", "_upsample_bicubic2d_aa"), 32),
    **dict.fromkeys(("upsample_nearest1d", "upsample_nearest3d", "_upsample_nearest_exact2d"), 1),
    "_upsample_nearest_exact2d_backward": 1,
    # torch leaves the tag of element-wise operators off these.
    **dict.fromkeys(("hardswish", "hardsigmoid", "hardtanh", "gelu", "mish", "threshold", "abs", "rsub"), 1),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge", "floor_divide", "heaviside", "gcd", "lcm", "polar"), 1),
    **dict.fromkeys(("geometric", "cauchy", "log_normal", "randint_like", "poisson", "_standard_gamma"), 1),
    **dict.fromkeys(("cummax", "cummin", "logcumsumexp", "nansum", "trace", "median", "kthvalue", "mode"), 1),
    **dict.fromkeys(("adaptive_max_pool3d", "_adaptive_avg_pool3d_backward", "adaptive_max_pool2d_backward"), 1),
    **dict.fromkeys(("log_sigmoid_backward", "huber_loss_backward", "binary_cross_entropy_backward"), 3),
    **dict.fromkeys(("_weight_norm_interface", "renorm"), 4),
    "_weight_norm_interface_backward": 8,
    **dict.fromkeys(("quantize_per_tensor", "dequantize", "_fake_quantize_learnable_per_tensor_affine"), 2),
}
"""Operations per element, of the largest tensor that the operator reads or writes."""

# fmt: off
MOVES: frozenset[str] = frozenset((
    "_to_copy", "clone", "copy", "contiguous", "cat", "stack", "index_select", "gather", "index", "embedding",
    "select_scatter", "slice_scatter", "scatter", "select_backward", "slice_backward", "index_copy", "index_fill",
    "masked_fill", "masked_select", "constant_pad_nd", "pad", "repeat", "roll", "flip", "tril", "triu", "zeros",
    "zeros_like", "ones", "ones_like", "full", "full_like", "fill", "zero", "new_zeros", "new_ones", "new_full",
    "arange", "scalar_tensor", "topk", "sort", "argsort", "nonzero", "bincount", "searchsorted", "bucketize",
    "one_hot", "eye", "linspace", "unfold_backward", "im2col", "col2im", "pixel_shuffle", "pixel_unshuffle",
    "channel_shuffle", "reflection_pad1d", "reflection_pad2d", "replication_pad2d", "reflection_pad2d_backward",
    "replication_pad2d_backward", "replication_pad1d", "repeat_interleave", "unique_dim", "_unique2",
    "_pack_padded_sequence", "_pack_padded_sequence_backward", "randperm", "randint", "diag_embed",
    "split_with_sizes_copy", "where", "isin", "_local_scalar_dense", "equal", "is_nonzero",
    "value_selecting_reduction_backward", "_conj_physical", "permute_copy", "view_copy", "_reshape_copy", "resize",
    "copysign", "complex", "narrow_copy", "select_copy", "slice_copy", "as_strided_copy", "alias_copy", "expand_copy",
    "squeeze_copy", "unsqueeze_copy", "t_copy", "transpose_copy", "unbind_copy", "unfold_copy", "lift_fresh_copy",
    "diagonal_copy", "diagonal_backward", "diagonal_scatter", "as_strided_scatter", "tril_indices", "triu_indices",
    "masked_scatter", "masked_scatter_backward", "rot90", "take", "resize_as", "logspace", "hann_window", "_unique",
    "unique_consecutive", "reflection_pad1d_backward", "reflection_pad3d", "reflection_pad3d_backward", "block_diag",
    "replication_pad1d_backward", "replication_pad3d", "replication_pad3d_backward", "_pin_memory", "_unsafe_index",
))
# fmt: on
"""Operators that move data and do no arithmetic on it."""

# fmt: off
FREE: frozenset[str] = frozenset((
    "_unsafe_view", "_reshape_alias", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "lift_fresh",
    "lift", "detach", "alias", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
    "_cudnn_init_dropout_state", "resolve_conj", "resolve_neg", "squeeze", "unsqueeze", "transpose", "t",
    "as_strided", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "is_pinned", "prim::device",
    "empty_permuted", "is_same_size", "_assert_tensor_metadata", "_assert_scalar", "_functional_assert_async",
    "sym_constrain_range", "sym_constrain_range_for_size", "dense_dim", "sparse_dim",
    "prim::layout", "result_type", "swapaxes", "unflatten", "set",
))
# fmt: on
"""Operators that only look at a tensor differently, or reserve memory without writing it."""
