"""What kind of work an operator is: a table from the operator's name to one of `work.operators.KINDS`."""

from __future__ import annotations

from microbatch.capture.formulas import FUSED_ATTENTION, MOVES, NORMALISATIONS
from microbatch.capture.shapes import PRODUCTS

_CONVOLUTIONS = ("convolution", "convolution_backward")
_RECURRENT = (
    "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_cudnn_rnn", "_cudnn_rnn_backward", "miopen_rnn",
    "miopen_rnn_backward",
)  # fmt: skip
_LOOKUPS = (
    "embedding", "_embedding_bag", "embedding_dense_backward", "_embedding_bag_dense_backward", "index", "index_select",
    "gather",
)  # fmt: skip
_REDUCTIONS = (
    "_softmax", "_log_softmax", "_safe_softmax", "logsumexp", "_softmax_backward_data", "_log_softmax_backward_data",
    "_masked_softmax", "max_pool2d_with_indices", "max_pool3d_with_indices", "max_pool2d", "avg_pool2d", "avg_pool3d",
    "max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward", "avg_pool2d_backward",
    "avg_pool3d_backward", "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d",
    "_adaptive_avg_pool3d_backward", "adaptive_max_pool2d", "adaptive_max_pool3d", "sum", "mean", "prod", "amax",
    "amin", "max", "min", "argmax", "argmin", "aminmax", "any", "all", "count_nonzero", "cumsum", "cumprod",
    "linalg_vector_norm", "var", "std", "var_mean", "std_mean", "norm", "topk", "sort", "argsort", "nll_loss_forward",
    "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward",
)  # fmt: skip

KIND: dict[str, str] = {
    **dict.fromkeys(MOVES, "copy"),
    **dict.fromkeys(PRODUCTS, "matmul"),
    **dict.fromkeys(_CONVOLUTIONS, "convolution"),
    **dict.fromkeys(_RECURRENT, "recurrent"),
    **dict.fromkeys(FUSED_ATTENTION, "attention"),
    **dict.fromkeys((f"{name}_backward" for name in FUSED_ATTENTION), "attention"),
    **dict.fromkeys(_LOOKUPS, "lookup"),
    **dict.fromkeys(NORMALISATIONS, "normalisation"),
    **dict.fromkeys((f"{name}_backward" for name in NORMALISATIONS), "normalisation"),
    "batch_norm_backward": "normalisation",
    **dict.fromkeys(_REDUCTIONS, "reduction"),
}
"""Operators that are not here work element by element."""


def kind_of(name: str) -> str:
    """The kind of the operator called `name` (the key of `capture.formulas`)."""
    return KIND.get(name, "elementwise")
