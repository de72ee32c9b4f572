"""One operator that ran at one size, in numbers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from microbatch.capture.formulas import Arguments
from microbatch.capture.kinds import kind_of
from microbatch.capture.moved import Moved, moved_bytes, tensors_in
from microbatch.capture.shapes import PRODUCTS

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    torch.int8: "int8",
    torch.uint8: "int8",
    torch.complex64: "fp32",
    torch.complex128: "fp64",
    torch.complex32: "fp16",
}
"""Our spelling of the dtype of an arithmetic."""

INTEGER_PRODUCTS = {
    "_int_mm": "int8",
    "_scaled_mm": "fp8",
    "quantized::linear_dynamic": "int8",
    "quantized::linear_relu_dynamic": "int8",
}
"""Products whose arithmetic is not in the dtype of their result."""

STORED_AS = {"_weight_int8pack_mm": "int8", "_weight_int4pack_mm": "int4", "_weight_int4pack_mm_for_cpu": "int4"}
"""Products that widen their weights on the fly."""


@dataclass(slots=True)
class Run:
    """One call of a block that stands for its identical siblings: `count` calls in all, inside another such call.

    `routed`, as in `Record`, says that the siblings are experts that shared the rows of this call.
    """

    name: str
    parent: Run | None = None
    count: int = 1
    routed: tuple[int, int, int] | None = None

    @property
    def shared(self) -> tuple[int, int, int] | None:
        """`routed` of this call or of one around it."""
        return self.routed or (self.parent.shared if self.parent else None)

    @property
    def repeat(self) -> int:
        """How often this happens in one call of the model."""
        return self.count * (self.parent.repeat if self.parent else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """See `work.operators.Operator`; here every size is a number.

    Attributes:
        product: (m, n, k, count).
        routed: (experts, top_k, tokens).
        run: the repeated block that it is a part of.
        uncounted: it computes and has no formula; `flops` is 0.
    """

    name: str
    kind: str
    layer: str
    dtype: str
    flops: float
    moved: Moved
    product: tuple[int | Fraction, ...] | None = None
    routed: tuple[int, int, int] | None = None
    weight_dtype: str | None = None
    backward: bool = False
    run: Run | None = None
    uncounted: bool = False


def measured(
    names: tuple[str, str, str],
    flops: float | None,
    given: Arguments,
    out: object,
    *,
    weights: Collection[int],
    layer: str,
    run: Run | None,
    backward: bool,
) -> Record:
    """The record of one of torch's operators.

    Args:
        names: its full name, the key of the tables, and the same with the underscore of an in-place form.
        flops: None where no formula is known.
        weights: storages of the model.
    """
    full_name, name, written_name = names
    return Record(
        name=full_name,
        kind=kind_of(name),
        layer=layer,
        dtype=INTEGER_PRODUCTS.get(name) or arithmetic_of(tensors_in(out, given)),
        flops=flops or 0.0,
        moved=moved_bytes(written_name, given, out, weights),
        product=PRODUCTS[name](given, out) if name in PRODUCTS else None,
        weight_dtype=STORED_AS.get(name),
        backward=backward,
        run=run,
        uncounted=flops is None,
    )


def arithmetic_of(tensors: list[Tensor]) -> str:
    """The dtype of the first floating-point tensor; index arithmetic counts as fp32."""
    floating = (tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    return DTYPE_NAMES.get(next(floating, torch.float32), "fp32")
