"""What each kind of dependence is called, and what to do about it."""

from __future__ import annotations

WHAT: dict[str, str] = {
    "batch_norm": "normalises by statistics of the batch",
    "batch_statistic": "computes a statistic over the batch",
    "attention": "attends, or takes a softmax, across the batch",
    "pooling": "pools across the batch",
    "top_k": "ranks the rows of the batch against each other",
    "capacity": "has room for so many rows of a batch; which are dropped depends on the others",
    "mixing": "mixes the rows of the batch",
    "shape": "does not run on a piece of the batch",
    "padding": "lets padding change the result of what is not padding",
    "packing": "lets one packed sequence see another",
    "time": "runs along dimension 0, which is cut",
    "state": "carries state from one piece to the next",
    "loss": "is no sum over rows",
    "gradient": "has a backward pass that mixes the rows",
}
"""What a module of that kind does."""

REMEDY: dict[str, str] = {
    "batch_norm": 'Use GroupNorm or LayerNorm, freeze it with .eval(), or train with TrainStep(batch_norm="exact").',
    "batch_statistic": "Compute it within each row, or over the whole batch beforehand and pass it in.",
    "attention": "Attend within each row: put the batch first (batch_first=True), or name the dimension that is the "
    'batch (batch_dimension=1). A loss over all pairs is exact with TrainStep(joint="outputs").',
    "pooling": "Pool over the dimensions of one row only.",
    "top_k": "Choose within each row, or by a fixed threshold.",
    "capacity": "Lift the capacity limit (capacity=None, dropless routing), or let each token choose its experts.",
    "mixing": "Compute each row from that row alone.",
    "shape": "Take the batch size from the input (x.shape[0], -1), and squeeze named dimensions only.",
    "padding": "Pass the mask on to attention and pooling, and count positions and lengths without the padding.",
    "packing": "Attend within each sequence: pass cu_seqlens or a block-diagonal mask on to attention.",
    "time": "Cut the dimension that is the batch: batch_dimension=1, or batch_first=True.",
    "state": "Reset the state before each piece, or pass it in and out.",
    "loss": 'Return the sum over rows and its weight; a loss over pairs of rows takes TrainStep(joint="outputs").',
    "gradient": "Make its backward pass treat each row alone.",
}
