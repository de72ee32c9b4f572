"""Formulas of operators that this machine cannot run, given shapes; and tables that do not contradict each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from microbatch.capture.formulas import FLOPS, FREE, FUSED_ATTENTION, MOVES, PER_ELEMENT, attention_pairs
from microbatch.capture.moved import TOUCHED
from microbatch.capture.tally import operator_of


def _meta(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def _flops(name: str, given: dict[str, Any], out: object) -> float | None:
    """FLOPs of one of torch's operators whose arguments carry the names of its real schema."""
    operator = operator_of(getattr(torch.ops.aten, name).default)
    assert set(given) <= set(operator.defaults), f"{name} has no argument {set(given) - set(operator.defaults)}"
    return operator.flops(operator.named((), given), out)


QUERY, KEY, VALUE = _meta(2, 4, 8, 16), _meta(2, 4, 6, 16), _meta(2, 4, 6, 32)
PAIRS = {False: 8 * 6, True: 1 + 2 + 3 + 4 + 5 + 6 + 6 + 6}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [name for name in FUSED_ATTENTION if hasattr(torch.ops.aten, name)])
def test_attention_of_every_backend(name: str, causal: bool) -> None:
    given = {"query": QUERY, "key": KEY, "value": VALUE, "is_causal": causal}
    forward = 2 * 2 * 4 * PAIRS[causal] * (16 + 32)
    assert _flops(name, given, (_meta(2, 4, 8, 32),)) == forward
    if hasattr(torch.ops.aten, f"{name}_backward"):
        assert _flops(f"{name}_backward", given, (QUERY, KEY, VALUE)) == 2.5 * forward


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 5), (3, 7), (7, 3), (1, 9)])
def test_causal_pairs_equal_a_count(queries: int, keys: int) -> None:
    mask = torch.ones(queries, keys).tril()
    assert attention_pairs(queries, keys, causal=True) == int(mask.sum())
    assert attention_pairs(queries, keys, causal=False) == queries * keys


def test_recurrent_layers_of_cudnn_and_miopen() -> None:
    # Two layers of an LSTM of width 20 over 5 steps of 3 sequences of width 12; biases are not matrices.
    weights = [_meta(80, 12), _meta(80, 20), _meta(80), _meta(80), _meta(80, 20), _meta(80, 20), _meta(80), _meta(80)]
    forward = 2 * 5 * 3 * 80 * (12 + 20 + 20 + 20)
    given = {"input": _meta(5, 3, 12), "weight": weights}
    for name in ("_cudnn_rnn", "miopen_rnn"):
        assert _flops(name, given, (_meta(5, 3, 20),)) == forward
        assert _flops(f"{name}_backward", given, (_meta(5, 3, 12),)) == 2 * forward


@pytest.mark.parametrize("name", ["_int_mm", "_weight_int8pack_mm"])
def test_quantised_products(name: str) -> None:
    assert _flops(name, {"self": _meta(3, 5)}, _meta(3, 7)) == 2 * 3 * 5 * 7


def test_convolution_backward_counts_what_is_asked_for() -> None:
    forward = 2 * 2 * 36 * 6 * 4 * 9
    for mask, passes, bias in (((True, True, True), 2, 2 * 36 * 6), ((False, True, False), 1, 0)):
        given = {
            "grad_output": _meta(2, 6, 6, 6), "input": _meta(2, 4, 8, 8), "weight": _meta(6, 4, 3, 3),
            "transposed": False, "output_mask": list(mask),
        }  # fmt: skip
        assert _flops("convolution_backward", given, (None, None, None)) == passes * forward + bias


def test_no_operator_stands_in_two_tables() -> None:
    tables = {"flops": set(FLOPS), "per element": set(PER_ELEMENT), "moves": set(MOVES), "free": set(FREE)}
    names = list(tables)
    for index, one in enumerate(names):
        for other in names[index + 1 :]:
            assert tables[one] & tables[other] == set(), (one, other)


def test_every_special_byte_rule_is_of_an_operator_that_is_counted() -> None:
    for name in TOUCHED:
        plain = name if name in FLOPS else name.rstrip("_")
        assert any(plain in table for table in (FLOPS, PER_ELEMENT, MOVES)), name
