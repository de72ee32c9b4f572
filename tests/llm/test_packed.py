"""Linear layers in packed, fused and tiled form beside torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from microbatch.llm import packed
from microbatch.llm.models import fast_arithmetic
from microbatch.llm.packed import Linear, fused, may_be_packed
from microbatch.models.packed_linear import is_available


@pytest.mark.parametrize("rows", [1, 2, 31, 70])
@pytest.mark.parametrize("shape", [(200, 160), (24, 7)])
@pytest.mark.parametrize("biased", [True, False])
def test_a_layer_equals_torchs(rows: int, shape: tuple[int, int], biased: bool) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(shape), torch.randn(rows, shape[1])
    bias = torch.randn(shape[0]) if biased else None
    torch.testing.assert_close(Linear(weight, bias)(x), linear(x, weight, bias), rtol=1e-4, atol=1e-4)


def test_large_weights_are_packed_where_the_processor_has_it() -> None:
    assert may_be_packed(torch.empty(200, 160)) == is_available(torch.float32)
    assert not may_be_packed(torch.empty(16, 16))
    assert not may_be_packed(torch.empty(200, 160, dtype=torch.float64))


def test_without_the_private_operators_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "is_available", lambda dtype: False)
    weight, x = torch.randn(200, 160), torch.randn(3, 160)
    assert torch.equal(Linear(weight)(x), linear(x, weight))


def test_fused_layers_stand_side_by_side() -> None:
    parts = [(torch.randn(5, 8), torch.randn(5)), (torch.randn(3, 8), None), (torch.randn(2, 8), torch.randn(2))]
    x = torch.randn(4, 8)
    expected = torch.cat([linear(x, weight, bias) for weight, bias in parts], dim=-1)
    torch.testing.assert_close(fused(parts)(x), expected)
    assert fused(parts).features == 10


@pytest.mark.parametrize("shape", [(200, 160), (1000, 333), (24, 7)])
def test_tiles_give_a_row_the_same_bits_beside_any_others(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layer, x = Linear(torch.randn(shape)), torch.randn(40, shape[1])
    layer.use_tiles(torch.float32, shape[1], torch.device("cpu"))
    whole = layer(x)
    for first, last in ((0, 1), (3, 4), (5, 22), (7, 40)):
        assert torch.equal(layer(x[first:last]), whole[first:last])


def test_16_bits_run_in_fp32_where_a_cpu_has_no_products_in_them() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert fast_arithmetic(dtype, torch.device("cpu")) == (dtype if is_available(dtype) else torch.float32)
        assert fast_arithmetic(dtype, torch.device("cuda")) == dtype
    assert fast_arithmetic(torch.float64, torch.device("cpu")) == torch.float64
