"""Tile and wave arithmetic, against the published GEMM tables and against jumps that it must not claim."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch.hardware.catalogue import load_device
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.roofline.tiles import (
    COMMON_TILES,
    JumpExplanation,
    explain_jump,
    predicted_edges,
    tiles,
    wave_seconds,
    waves,
)  # fmt: skip

K, N = 4096, 22016
A100 = load_device("a100")
UNCOUNTED = replace(A100, multiprocessors=None)


def _explain(
    before: int,
    after: int,
    seconds: tuple[float, float],
    spec: DeviceSpec = A100,
    *,
    dtype: str = "bf16",
    gemms: float = 1,
) -> JumpExplanation | None:
    return explain_jump(before, after, k=K, n=N, spec=spec, seconds_before=seconds[0] * 1e-6,
                        seconds_after=seconds[1] * 1e-6, dtype=dtype, gemms=gemms)  # fmt: skip


def _times(folder: Path, gpu: str, operation: str) -> dict[int, float]:
    """Medians in microseconds by tokens."""
    with (folder / "gemm-latency.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["gpu"] == gpu and row["operation"] == operation]
    return {int(row["tokens"]): float(row["median_us"]) for row in rows}


def test_published_wave_of_an_a100() -> None:
    """128×256 tiles at K = 4096: 93 µs a wave; n = 22016 has 86 columns of tiles."""
    assert wave_seconds((128, 256), K, 108, 312e12) == pytest.approx(93e-6, rel=0.01)
    assert [tiles(b, N, 128, 256) for b in (1, 128, 129, 256, 257)] == [86, 86, 172, 172, 258]
    assert [waves(count, 108) for count in (86, 108, 109, 172, 258, 344)] == [1, 1, 2, 2, 3, 4]
    assert waves(344, 108, 2) == 2


@given(b=st.integers(1, 5000), n=st.integers(1, 30000), tile=st.sampled_from(COMMON_TILES), sms=st.integers(1, 200))
def test_waves_hold_every_tile_and_never_fall(b: int, n: int, tile: tuple[int, int], sms: int) -> None:
    count = tiles(b, n, *tile)
    assert count * tile[0] * tile[1] >= b * n
    assert (waves(count, sms) - 1) * sms < count <= waves(count, sms) * sms
    assert tiles(b + 1, n, *tile) >= count
    assert tiles(b + 1, n, *tile) == count or b % tile[0] == 0


@pytest.mark.parametrize(
    ("before", "after", "tile", "counts", "in_waves"),
    [
        (128, 136, (128, 256), (86, 172), (1, 2)),
        (192, 200, (64, 256), (258, 344), (3, 4)),
        (256, 264, (128, 256), (172, 258), (2, 3)),
        (384, 392, (128, 256), (258, 344), (3, 4)),
        (512, 520, (256, 128), (344, 516), (4, 5)),
        (640, 648, (128, 256), (430, 516), (4, 5)),
        (768, 776, (128, 256), (516, 602), (5, 6)),
        (1280, 1296, (128, 256), (860, 946), (8, 9)),
        (1536, 1552, (128, 256), (1032, 1118), (10, 11)),
    ],
)
def test_published_jumps_of_an_a100(
    published_data: Path,
    before: int,
    after: int,
    tile: tuple[int, int],
    counts: tuple[int, int],
    in_waves: tuple[int, int],
) -> None:
    times = _times(published_data, "a100", "mlp_up_proj")
    found = _explain(before, after, (times[before], times[after]))
    assert found is not None
    assert (found.kind, found.edge, found.tile) == ("wave", before, tile)
    assert (found.tiles_before, found.tiles_after) == counts
    assert (found.waves_before, found.waves_after) == in_waves
    assert found.tile not in found.alternatives


@pytest.mark.parametrize(("before", "after"), [(80, 88), (960, 968)])
def test_published_jumps_without_an_edge_stay_unexplained(published_data: Path, before: int, after: int) -> None:
    times = _times(published_data, "a100", "mlp_up_proj")
    assert _explain(before, after, (times[before], times[after])) is None


def test_the_kernel_switch_of_an_h100_is_no_wave(published_data: Path) -> None:
    """136 takes 126 µs but 152 takes 96: whatever 136 ran, it was not full waves at a good rate."""
    times = _times(published_data, "h100", "mlp_up_proj")
    assert _explain(128, 136, (times[128], times[136]), load_device("h100")) is None


def test_the_sentence() -> None:
    found = _explain(128, 136, (157, 205))
    assert found is not None
    assert found.sentence == "Second wave: 86 -> 172 tiles on 108 SMs (tile 128x256)."
    unknown = _explain(128, 136, (157, 205), dtype="")
    assert unknown is not None and unknown.sentence.endswith("(tile 128x256, taking 16-bit values).")


@pytest.mark.parametrize(
    ("before", "after", "times"),
    [
        (136, 144, (157, 205)),  # no edge
        (100, 260, (157, 400)),  # a gap that holds an edge of nearly every tile
        (104, 144, (157, 205)),  # the edge at 128 is in it, but so wide a gap holds one by chance
        (128, 136, (157, 160)),  # hardly a rise
        (128, 136, (75, 150)),  # faster before than the peak allows for one wave
        (128, 136, (157, 900)),  # far more than the waves take
        (128, 136, (700, 900)),  # the waves are a small part of the time
    ],
)
def test_no_claim_without_evidence(before: int, after: int, times: tuple[float, float]) -> None:
    assert _explain(before, after, times) is None


def test_a_dtype_without_a_rate_explains_nothing() -> None:
    assert _explain(128, 136, (157, 205), dtype="fp64") is None


def test_several_products_in_one_call() -> None:
    one, eight = _explain(128, 136, (157, 205)), _explain(128, 136, (8 * 157, 8 * 205), gemms=8)
    assert one == eight is not None
    assert _explain(128, 136, (8 * 157, 8 * 205)) is None


def test_a_row_that_needs_several_waves_is_a_tile() -> None:
    spec = replace(A100, multiprocessors=20, flops={"bf16": 312e12 * 20 / 108})
    found = _explain(128, 129, (465, 838), spec)
    assert found is not None and found.kind == "tile"
    assert found.sentence.startswith("New row of tiles, 5 -> 9 waves: 86 -> 172 tiles on 20 SMs")


def test_without_multiprocessors_rows_of_tiles_are_compared() -> None:
    """A staircase of 32 rows: flat to 32, +95 % at 33, +49 % at 65, as published for a laptop's GPU."""
    spec = DeviceSpec(name="laptop", flops={}, bandwidth=4e11)
    for before, after, rise, words in ((32, 33, 1.95, "Second row"), (64, 65, 1.49, "Third row")):
        found = explain_jump(before, after, k=5120, n=17408, spec=spec, seconds_before=1e-3, seconds_after=rise * 1e-3)
        assert found is not None and found.kind == "tile" and found.waves_after is None
        assert found.sentence.startswith(f"{words} of tiles")
    assert _explain(128, 136, (1000, 1100), UNCOUNTED) is None  # rows of 128 double, time does not


def test_predicted_edges_are_where_waves_rise() -> None:
    edges = predicted_edges(A100, N, 1100)
    assert {128, 256, 384, 512, 640, 768} <= set(edges)
    assert all(edge % 64 == 0 for edge in edges) and max(edges) < 1100
    assert predicted_edges(UNCOUNTED, N, 1100) == ()
    assert len(predicted_edges(A100, N, 1100, smallest_rise=1.4)) < len(edges)


@given(edge=st.integers(33, 2000), gap=st.integers(1, 8), rise=st.floats(1.05, 1.6))
def test_a_claimed_edge_lies_within_the_jump(edge: int, gap: int, rise: float) -> None:
    before = 1.25 * 2 * edge * K * N / 312e12 * 1e6
    found = _explain(edge, edge + gap, (before, before * rise))
    if found is not None:
        assert edge <= found.edge < edge + gap
        assert found.edge % found.tile[0] == 0
        assert found.waves_before is not None and found.waves_after is not None
        assert found.waves_after > found.waves_before
