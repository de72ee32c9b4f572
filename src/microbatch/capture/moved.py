"""Bytes that one operator must move: each input read once and each result written once, views for nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from microbatch.capture.formulas import Arguments, first

Bytes = Callable[[Arguments, Any], float]


def tensors_in(*values: object) -> list[Tensor]:
    """Every tensor in nested values, each object once."""
    found = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return list({id(tensor): tensor for tensor in found}.values())


def distinct_bytes(tensor: Tensor) -> int:
    """Bytes of the elements in memory: a dimension that was expanded (stride 0) is stored once."""
    if tensor.layout != torch.strided:
        return tensor.numel() * tensor.element_size()
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count * tensor.element_size()


def moved_bytes(name: str, given: Arguments, out: object) -> float:
    """Bytes read and written by the operator called `name` (the key of `capture.formulas`)."""
    special = BYTES.get(name)
    return special(given, out) if special else _total(tensors_in(given)) + _total(tensors_in(out))


def _total(tensors: Iterable[Tensor]) -> float:
    return float(sum(distinct_bytes(tensor) for tensor in tensors))


def _rows_read(indices: str) -> Bytes:
    """A lookup reads only the rows that it returns: the indices, the rows, and the result."""
    return lambda given, out: _total(tensors_in(given[indices])) + 2 * _total(tensors_in(first(out)))


def _rows_added(source: str, indices: str) -> Bytes:
    """An addition into some rows reads the source and those rows, and writes those rows."""
    return lambda given, _: _total(tensors_in(given[indices])) + 3 * _total(tensors_in(given[source]))


def _written(_: Arguments, out: Any) -> float:
    return _total(tensors_in(out))


def _copied(given: Arguments, out: Any) -> float:
    return _total(tensors_in(given["src"])) + _total(tensors_in(out))


def _packed_linear(given: Arguments, out: Any) -> float:
    """The packed int8 weight is one byte an element, in·out of them."""
    return _total([given["X"], out]) + float(given["X"].shape[-1] * out.shape[-1])


BYTES: dict[str, Bytes] = {
    "embedding": _rows_read("indices"),
    "index_select": _rows_read("index"),
    "gather": _rows_read("index"),
    "index": _rows_read("indices"),
    "index_add_": _rows_added("source", "index"),
    "scatter_add_": _rows_added("src", "index"),
    "index_put_": _rows_added("values", "indices"),
    "zero_": _written,
    "fill_": _written,
    "copy_": _copied,
    "zeros_like": _written,
    "ones_like": _written,
    "full_like": _written,
    "new_zeros": _written,
    "new_ones": _written,
    "new_full": _written,
    "rand_like": _written,
    "randn_like": _written,
    "quantized::linear_dynamic": _packed_linear,
    "quantized::linear_relu_dynamic": _packed_linear,
}
"""Operators that touch less, or more, than all of their arguments; in-place forms with their underscore."""
