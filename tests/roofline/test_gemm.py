"""Times of matrix products: the published tables, and what must hold for every shape and device."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gemm_tables import MEDIAN_BAR, P90_BAR, by_device, read_table, relative_errors
from microbatch.errors import InvalidDevice
from microbatch.hardware.catalogue import device_names, load_device
from microbatch.hardware.constants import DEFAULTS, MOST_CONSTANTS
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.roofline.gemm import TILES, ceil_of, gemm_time, kernels_of, linear_seconds, p_norm
from microbatch.roofline.tiles import tiles, waves

A100, H100 = load_device("a100"), load_device("h100")
UNCOUNTED = replace(A100, multiprocessors=None)
SIZES = st.integers(1, 20000)

PUBLISHED = (
    (A100, 1, 4096, 4096, 25), (A100, 512, 4096, 4096, 88), (A100, 2048, 4096, 4096, 301),
    (A100, 1, 22016, 4096, 116), (A100, 2048, 22016, 4096, 1694), (A100, 256, 4096, 11008, 109.5),
    (H100, 1, 4096, 4096, 16), (H100, 512, 4096, 4096, 29), (H100, 2048, 4096, 4096, 96),
    (H100, 1, 22016, 4096, 64), (H100, 2048, 22016, 4096, 492), (H100, 256, 4096, 11008, 56),
)  # fmt: skip
"""(device, m, n, k, microseconds): rows of the profiling data published with microsoft/vidur, Llama-2-7B."""


@pytest.mark.parametrize(("spec", "m", "n", "k", "microseconds"), PUBLISHED)
def test_published_rows(spec: DeviceSpec, m: int, n: int, k: int, microseconds: float) -> None:
    assert linear_seconds(spec, "bf16", m, n, k) * 1e6 == pytest.approx(microseconds, rel=0.25)


@pytest.mark.parametrize("constants", ["all", "shared"])
@pytest.mark.parametrize("gpu", ["a100", "h100"])
def test_published_tables_are_met(published_data: Path, gpu: str, constants: str) -> None:
    """With the device's own constants, and with those that a device without a table gets."""
    errors = by_device(read_table(published_data / "gemm-latency.csv"), None)[gpu][constants]
    assert errors["rows"] == 784
    assert errors["median"] <= MEDIAN_BAR
    assert errors["p90"] <= P90_BAR


def test_model_names_do_not_matter(published_data: Path) -> None:
    rows = [dict(row) for row in read_table(published_data / "gemm-latency.csv") if row["gpu"] == "a100"]
    names = [f"{row['model']}/{row['operation']}" for row in rows]
    random.Random(0).shuffle(names)
    renamed = [{**row, "model": name, "operation": name} for row, name in zip(rows, names, strict=True)]
    assert relative_errors(renamed, A100) == relative_errors(rows, A100)


@pytest.mark.parametrize("name", device_names())
def test_no_device_has_more_constants_than_allowed(name: str) -> None:
    spec = load_device(name)
    assert len(DEFAULTS[spec.kind]) <= MOST_CONSTANTS
    assert set(spec.constants) <= set(DEFAULTS[spec.kind])


@given(SIZES, SIZES, SIZES)
def test_no_product_beats_the_datasheet(m: int, n: int, k: int) -> None:
    seconds = linear_seconds(A100, "bf16", m, n, k)
    assert seconds > 2 * m * n * k / A100.flops["bf16"]
    assert seconds > 2 * (m * k + k * n + m * n) / A100.bandwidth


@given(SIZES, SIZES, SIZES, st.sampled_from([A100, UNCOUNTED, load_device("t4"), load_device("mi300x")]))
def test_more_work_takes_no_less_time_with_the_same_tiles(m: int, n: int, k: int, spec: DeviceSpec) -> None:
    """Whole rows of the largest tile: each kernel has at least as many tiles, as long and as much to move."""
    grown = -(-m // 256) * 256
    assert linear_seconds(spec, "fp16", grown, n, k) >= linear_seconds(spec, "fp16", m, n, k) * (1 - 1e-12)


@given(SIZES, SIZES, SIZES)
def test_a_device_twice_as_fast_is_no_slower(m: int, n: int, k: int) -> None:
    twice = replace(A100, bandwidth=2 * A100.bandwidth, flops={"bf16": 2 * A100.flops["bf16"]})
    assert linear_seconds(twice, "bf16", m, n, k) <= linear_seconds(A100, "bf16", m, n, k)


@given(st.integers(1, 4096), SIZES, SIZES)
def test_evidence_agrees_with_the_arithmetic_of_tiles(m: int, n: int, k: int) -> None:
    time = gemm_time(kernels_of(A100, "bf16"), ((float(m), 1.0),), n, k, 2.0 * n * k)
    assert time.tile in TILES
    assert time.tiles == tiles(m, n, *time.tile)
    assert time.waves == waves(round(time.tiles) * time.split, 108)
    assert f"of {time.tile[0]}x{time.tile[1]}" in time.evidence


def test_evidence_in_words() -> None:
    kernels = kernels_of(A100, "bf16")
    few = gemm_time(kernels, ((8.0, 1.0),), 1024, 16384, 2.0 * 1024 * 16384)
    assert few.split > 1
    assert few.evidence.endswith(f"k in {few.split} parts")
    one = gemm_time(kernels, ((16.0, 1.0),), 64, 64, 8192.0)
    assert one.evidence.startswith("1 tile in 1 wave of ")
    assert "wave" not in gemm_time(kernels_of(UNCOUNTED, "bf16"), ((8.0, 1.0),), 64, 64, 8192.0).evidence


def test_few_tiles_are_split_along_k() -> None:
    """64 tiles of a long product leave 44 of 108 multiprocessors idle unless k is split."""
    kernels = kernels_of(A100, "bf16")
    whole = gemm_time(replace(kernels, split_start=1.0), ((128.0, 1.0),), 1024, 16384, 4e7)
    assert whole.split == 1
    assert gemm_time(kernels, ((128.0, 1.0),), 1024, 16384, 4e7).seconds < whole.seconds


def test_sizes_a_hair_above_a_whole_number_are_whole() -> None:
    assert (ceil_of(128 * (1 + 1e-9), 128), ceil_of(129, 128), ceil_of(0.0, 128)) == (1, 2, 1)


@given(st.floats(1e-9, 1e3), st.floats(0, 1e3), st.floats(1, 60))
def test_p_norm_is_numpys(a: float, b: float, p: float) -> None:
    assert max(a, b) <= p_norm(a, b, p) <= (a + b) * (1 + 1e-12)
    top = max(a, b)
    assert p_norm(a, b, p) == pytest.approx(top * np.linalg.norm([a / top, b / top], p))


def test_an_unknown_rate_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(InvalidDevice, match="t4 has no rate for 'bf16'") as raised:
        linear_seconds(load_device("t4"), "bf16", 1, 1, 1)
    assert "fp16" in str(raised.value)


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "bf16", "int8"])
def test_large_products_run_at_the_rate_of_their_dtype(dtype: str) -> None:
    seconds = linear_seconds(A100, dtype, 8192, 8192, 8192)
    share = 2 * 8192**3 / seconds / A100.flops[dtype]
    assert 0.6 < share < 0.82
    assert math.isfinite(seconds)
