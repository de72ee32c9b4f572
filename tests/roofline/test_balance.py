"""The ridge of a whole model, against the closed forms of one layer and the published figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch.errors import InvalidDevice
from microbatch.hardware.catalogue import load_device
from microbatch.roofline.balance import awake_share, full_ridge_of, moved_bytes, weights_ridge_of, with_rates
from microbatch.roofline.precision import in_precision
from microbatch.roofline.ridge import ridge_with_activations, weights_ridge
from tests.roofline import works

FIGURES = [
    # device, arithmetic, stored weights, width, weights only, with activations
    ("t4", "fp16", "fp16", 1024, 217, 376),
    ("t4", "fp16", "fp16", 2048, 217, 275),
    ("t4", "fp16", "fp16", 256, 217, None),
    ("t4", "fp32", "fp32", 1024, 54, 60),
    ("a100", "bf16", "bf16", 1024, 153, None),
    ("a100", "int8", "int8", 1024, 153, None),
    ("a100", "bf16", "int8", 1024, 77, None),
    ("a100", "bf16", "int4", 1024, 38, None),
    ("a100", "tf32", "tf32", 1024, 153, None),
    ("a100", "fp32", "fp32", 1024, 19, None),
]


@pytest.mark.parametrize(("device", "dtype", "stored", "width", "weights", "full"), FIGURES)
def test_published_ridges(device: str, dtype: str, stored: str, width: int, weights: int, full: int | None) -> None:
    spec = load_device(device)
    captured = works.mlp(width=width, dtype={"int8": "bf16", "tf32": "fp32"}.get(dtype, dtype))
    work = in_precision(captured, dtype, stored)
    assert round(weights_ridge_of(work, spec) or 0) == weights
    if full is not None or width == 256:
        found = full_ridge_of(work, spec)
        assert (found and round(found)) == full


@given(
    m=st.integers(64, 8192), n=st.integers(64, 8192), device=st.sampled_from(["t4", "a100", "h100", "l4"]),
    depth=st.integers(1, 5),
)  # fmt: skip
def test_one_linear_repeated_has_the_ridge_of_its_closed_form(m: int, n: int, device: str, depth: int) -> None:
    spec = load_device(device)
    work = works.mlp()
    work = type(work)(operators=(works.linear(m, n, "fp16", repeat=depth),), dtype="fp16")
    assert weights_ridge_of(work, spec) == pytest.approx(weights_ridge(spec, "fp16"), rel=1e-9)
    closed = ridge_with_activations(spec, "fp16", m, n)
    assert full_ridge_of(work, spec) == (None if closed is None else pytest.approx(closed, rel=1e-6))


@pytest.mark.parametrize(("count", "top_k"), [(8, 2), (128, 8), (64, 1)])
def test_experts_put_the_ridge_out_by_their_number(count: int, top_k: int) -> None:
    spec = load_device("h100")
    found = weights_ridge_of(works.experts(count=count, top_k=top_k), spec)
    assert found == pytest.approx(weights_ridge(spec, "bf16") * count / top_k, rel=1e-9)


def test_elementwise_work_alone_has_no_ridge() -> None:
    work = works.mlp()
    work = type(work)(operators=(works.elementwise(64, "fp16"),), dtype="fp16")
    assert (weights_ridge_of(work, load_device("t4")), full_ridge_of(work, load_device("t4"))) == (None, None)


def test_only_experts_that_a_token_picks_are_read() -> None:
    work = works.experts(count=8, top_k=2, width=64)
    operator = work.operators[0]
    assert 8 * awake_share(operator, 3, 1) == pytest.approx(4.625)
    assert awake_share(works.linear(8, 8, "fp16"), 3, 1) == 1
    assert work.moved_bytes(3) - moved_bytes(work, 3) == pytest.approx((8 - 4.625) * 2 * 64 * 64)


def test_sums_in_a_dtype_without_a_rate_are_timed_by_another_and_products_are_refused() -> None:
    spec = load_device("t4")
    work = works.mlp(dtype="fp16")
    mixed = type(work)(operators=(*work.operators, works.elementwise(8, "bf16")), dtype="fp16")
    assert [o.dtype for o in with_rates(mixed, spec).operators] == ["fp16", "fp16", "fp16"]
    with pytest.raises(InvalidDevice, match=r"no rate for 'bf16'.*fp32, fp16, int8"):
        weights_ridge_of(with_rates(works.mlp(dtype="bf16"), spec), spec)
