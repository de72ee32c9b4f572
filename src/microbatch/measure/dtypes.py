"""Our spelling of a dtype, and torch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from microbatch.errors import InvalidSettings
from microbatch.models.load import TORCH_DTYPES


def torch_dtype(name: str) -> torch.dtype:
    """``"bf16"`` → ``torch.bfloat16``.

    Raises:
        InvalidSettings: a dtype that a model cannot be converted to.
    """
    if name not in TORCH_DTYPES:
        raise InvalidSettings(f"A model cannot be run in {name!r}.", f"Use one of {', '.join(TORCH_DTYPES)}.")
    return TORCH_DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` → ``"bf16"``; torch's own word for one we have no spelling for."""
    names = {value: name for name, value in TORCH_DTYPES.items() if name != "tf32"}
    return names.get(dtype, str(dtype).removeprefix("torch."))


@contextmanager
def precision(dtype: str | None) -> Iterator[None]:
    """TF32 products: on for tf32, off for fp32 (so that fp32 means fp32), untouched for any other dtype."""
    if dtype not in ("tf32", "fp32"):
        yield
        return
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = matmul.fp32_precision, conv.fp32_precision
    matmul.fp32_precision = conv.fp32_precision = "tf32" if dtype == "tf32" else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision, conv.fp32_precision = before
