"""Bytes that one operator must move: each input read once and each result written once, views for nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from microbatch.capture.formulas import Arguments, first


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of one operator, apart: parameters read, other tensors read, results written."""

    weights: int
    read: int
    written: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.read + self.written


Touched = tuple[list[Tensor], list[Tensor]]
"""Tensors read, and tensors written, as often as they move."""
Rule = Callable[[Arguments, Any], Touched]


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


def storage_of(tensor: Tensor) -> int | None:
    """A number that views of one memory share; None for a layout that keeps its parts elsewhere."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else None


def moved_bytes(name: str, given: Arguments, out: object, weights: Collection[int] = ()) -> Moved:
    """Bytes moved by the operator called `name` (the key of `capture.formulas`).

    Args:
        weights: storages that belong to the model; by default all that is read counts as activations.
    """
    read, written = TOUCHED[name](given, out) if name in TOUCHED else (tensors_in(given), tensors_in(out))
    stored = [tensor for tensor in read if weights and storage_of(tensor) in weights]
    from_weights = _total(stored)
    return Moved(from_weights + PACKED.get(name, _none)(given, out), _total(read) - from_weights, _total(written))


def _total(tensors: Iterable[Tensor]) -> int:
    return sum(distinct_bytes(tensor) for tensor in tensors)


def _rows_read(indices: str) -> Rule:
    """A lookup reads only the rows that it returns: the indices, the rows, and the result."""
    return lambda given, out: (tensors_in(given[indices]) + tensors_in(first(out)), tensors_in(first(out)))


def _rows_added(source: str, indices: str) -> Rule:
    """An addition into some rows reads the source and those rows, and writes those rows."""
    return lambda given, _: (tensors_in(given[indices]) + 2 * tensors_in(given[source]), tensors_in(given[source]))


def _written(_: Arguments, out: Any) -> Touched:
    return [], tensors_in(out)


def _copied(given: Arguments, out: Any) -> Touched:
    return tensors_in(given["src"]), tensors_in(out)


def _packed_linear(given: Arguments, out: Any) -> Touched:
    return [given["X"]], [out]


TOUCHED: dict[str, Rule] = {
    "embedding": _rows_read("indices"),
    "index_select": _rows_read("index"),
    "gather": _rows_read("index"),
    "index": _rows_read("indices"),
    "index_add_": _rows_added("source", "index"),
    "index_copy_": _rows_added("source", "index"),
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


def _none(_: Arguments, __: Any) -> int:
    return 0


def _packed_int8(given: Arguments, out: Any) -> int:
    """in·out elements of one byte."""
    return int(given["X"].shape[-1] * out.shape[-1])


PACKED: dict[str, Callable[[Arguments, Any], int]] = {
    "quantized::linear_dynamic": _packed_int8,
    "quantized::linear_relu_dynamic": _packed_int8,
}
"""Bytes of weights that are packed out of sight."""
