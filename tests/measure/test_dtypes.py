"""Spellings of dtypes, and what fp32 means on a GPU."""

from __future__ import annotations

import pytest
import torch

from microbatch.errors import InvalidSettings
from microbatch.measure.dtypes import dtype_name, precision, torch_dtype
from microbatch.models.load import TORCH_DTYPES
from microbatch.units import DTYPE_BYTES


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_every_dtype_has_the_bytes_that_units_says(name: str) -> None:
    assert torch_dtype(name).itemsize == DTYPE_BYTES[name]


@pytest.mark.parametrize("name", [name for name in TORCH_DTYPES if name != "tf32"])
def test_names_go_both_ways(name: str) -> None:
    assert dtype_name(torch_dtype(name)) == name


def test_a_dtype_without_our_spelling_keeps_torchs() -> None:
    assert dtype_name(torch.complex64) == "complex64"


def test_a_dtype_that_no_model_runs_in_is_refused() -> None:
    with pytest.raises(InvalidSettings, match=r"'int3'.*bf16"):
        torch_dtype("int3")


@pytest.mark.parametrize(("name", "wanted"), [("tf32", "tf32"), ("fp32", "ieee")])
def test_tf32_is_switched_and_put_back(name: str, wanted: str) -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with precision(name):
        assert matmul.fp32_precision == wanted
    assert matmul.fp32_precision == before


def test_other_dtypes_switch_nothing() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    with precision("bf16"):
        assert torch.backends.cuda.matmul.fp32_precision == before
