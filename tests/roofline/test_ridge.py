"""Predicted ridges against published ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch.errors import InvalidDevice
from microbatch.hardware.catalogue import load_device
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.roofline.ridge import ridge_with_activations, weights_ridge
from microbatch.units import DTYPE_BYTES


@pytest.mark.parametrize(
    ("device", "dtype", "weights", "ridge"),
    [
        ("t4", "fp16", None, 217),
        ("t4", "fp32", None, 54),
        ("a100", "bf16", None, 153),
        ("a100", "int8", None, 153),
        ("a100", "bf16", "int8", 77),
        ("a100", "bf16", "int4", 38),
        ("a100", "tf32", None, 153),
        ("a100", "fp32", None, 19),
    ],
)
def test_ridge_of_the_weights(device: str, dtype: str, weights: str | None, ridge: int) -> None:
    assert weights_ridge(load_device(device), dtype, weight_dtype=weights) == pytest.approx(ridge, abs=0.5)


@pytest.mark.parametrize(("width", "ridge"), [(1024, 376), (2048, 275)])
def test_ridge_with_activations(width: int, ridge: int) -> None:
    found = ridge_with_activations(load_device("t4"), "fp16", width, width)
    assert found is not None and round(found) == ridge


def test_a_narrow_layer_has_no_ridge() -> None:
    assert ridge_with_activations(load_device("t4"), "fp16", 256, 256) is None
    exactly = DeviceSpec(name="even", flops={"fp16": 100.0}, bandwidth=1.0)
    assert ridge_with_activations(exactly, "fp16", 200, 200) is None  # m·n/(m+n) = I*·s/2


@given(m=st.integers(1, 20_000), n=st.integers(1, 20_000), intensity=st.floats(1, 700),
       dtype=st.sampled_from(["fp32", "bf16", "int8"]))  # fmt: skip
def test_at_the_ridge_both_times_are_equal(m: int, n: int, intensity: float, dtype: str) -> None:
    spec = DeviceSpec(name="any", flops={dtype: intensity}, bandwidth=1.0)
    b = ridge_with_activations(spec, dtype, m, n)
    if b is None:
        assert m * n / (m + n) <= intensity * DTYPE_BYTES[dtype] / 2 * (1 + 1e-12)
        return
    computing, moving = 2 * m * n * b / intensity, DTYPE_BYTES[dtype] * (m * n + b * (m + n))
    assert computing == pytest.approx(moving, rel=1e-4)
    assert b >= weights_ridge(spec, dtype)


def test_an_unknown_dtype_is_an_error() -> None:
    with pytest.raises(InvalidDevice, match=r"t4 has no rate for 'bf16'. Rates are known for fp32, fp16, int8"):
        weights_ridge(load_device("t4"), "bf16")
