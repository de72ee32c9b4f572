"""Work in another dtype than the model's own: which dtype the arithmetic has, and which the weights are stored in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from microbatch.work.operators import Operator

ARITHMETIC: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
    "int8": torch.bfloat16,
    "int4": torch.bfloat16,
}
"""The dtype in which the model runs when it is asked for in ours.

fp8 products work in fp8 on fp8 weights; int8 and int4 are weights only, widened for products in bf16. tf32 is the
arithmetic of products on fp32. All other operators work in the dtype that the model runs in.
"""

NARROW = {"fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Bytes of one weight of a product, where they are not those of the arithmetic."""

_PRODUCTS = ("matmul", "experts", "convolution", "recurrent", "attention")


def stored_as(made: Sequence[Operator], dtype: str | None) -> list[Operator]:
    """The operators with the weights of their products stored, and multiplied, as `dtype` says."""
    return [_stored(operator, dtype) if dtype and operator.kind in _PRODUCTS else operator for operator in made]


def _stored(operator: Operator, dtype: str) -> Operator:
    if dtype == "tf32" and operator.dtype == "fp32":
        return replace(operator, dtype="tf32")
    if dtype not in NARROW or not operator.weight_bytes.terms or operator.weight_dtype or operator.dtype != "bf16":
        return operator
    weights = operator.weight_bytes * (NARROW[dtype] / ARITHMETIC[dtype].itemsize)
    return replace(operator, dtype="fp8" if dtype == "fp8" else "bf16", weight_dtype=dtype, weight_bytes=weights)


def weight_bytes(model: nn.Module, dtype: str | None) -> int:
    """All parameters as stored in `dtype` (None: as they are), tied ones once, packed ones included.

    Narrow dtypes are for matrices; vectors, and tables that nothing multiplies, stay in the dtype of the arithmetic.
    """
    tables = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    multiplied = {
        id(p) for m in model.modules() if not isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)
    }
    lookups = tables - multiplied
    own = sum(_bytes(p, dtype, matrix=p.dim() > 1 and id(p) not in lookups) for p in model.parameters())
    return round(own) + sum(map(packed_bytes, model.modules()))


def _bytes(parameter: nn.Parameter, dtype: str | None, *, matrix: bool) -> float:
    if dtype is None or not parameter.dtype.is_floating_point:
        return parameter.nbytes
    return parameter.numel() * (NARROW[dtype] if matrix and dtype in NARROW else ARITHMETIC[dtype].itemsize)


def packed_bytes(module: nn.Module) -> int:
    """torch's quantised modules keep their weight packed, outside the parameters."""
    weight = getattr(module, "weight", None)
    if not (hasattr(module, "_packed_params") and callable(weight)):
        return 0
    tensor = weight()
    return int(tensor.numel() * tensor.element_size())
