"""The explanation: published GEMM tables, chosen sizes, causes that need evidence, refusals."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from microbatch.curves.explanation import Cliff, Explanation
from microbatch.curves.profile import Environment, MemoryCurve, Peaks, Point, Profile
from microbatch.errors import InvalidSettings, TooNoisy
from microbatch.hardware.catalogue import load_device
from microbatch.profiling.explain import explain

# Times in µs of the A100 up-projection of Llama-2-7B (k 4096, n 22016) around one jump, and of the H100's around
# another; from the profiling data published with microsoft/vidur (MIT licence).
A100 = {120: 156, 128: 157, 136: 205, 144: 208, 152: 206, 160: 207, 168: 184, 176: 185.5, 184: 186, 192: 186.5,
        200: 234, 208: 237, 216: 236.5, 224: 240.5, 232: 238.5, 240: 239, 248: 228, 256: 229, 264: 279.5}  # fmt: skip
H100 = {64: 66, 72: 74, 80: 75, 88: 75, 96: 75, 104: 72, 112: 73, 120: 72, 128: 71, 136: 126, 144: 95.5, 152: 87,
        160: 87.5, 168: 87, 176: 88, 184: 88, 192: 88, 200: 128, 208: 128, 216: 129}  # fmt: skip


def table(seconds: dict[int, float], scale: float = 1e-6) -> Profile:
    points = tuple(Point(batch_size=b, samples=(t * scale,)) for b, t in seconds.items())
    return Profile(points=points, source="csv")


def published(folder: Path, gpu: str, operation: str, up_to: int) -> Profile:
    with (folder / "gemm-latency.csv").open() as rows:
        chosen = [r for r in csv.DictReader(rows) if r["gpu"] == gpu and r["operation"] == operation]
    return table({int(r["tokens"]): float(r["median_us"]) for r in chosen if int(r["tokens"]) <= up_to})


def repeated(function: object, sizes: list[int], *, noise: float = 0.01, repeats: int = 7, **fields: object) -> Profile:
    assert callable(function)
    rng = np.random.default_rng(0)
    points = tuple(
        Point(
            batch_size=b,
            samples=tuple(float(function(b) * np.exp(noise * x)) for x in rng.standard_normal(repeats)),
            rounds=tuple(range(repeats)),
        )
        for b in sizes
    )
    return Profile(points=points, **fields)  # type: ignore[arg-type]


def cliff_at(explanation: Explanation, size: int) -> Cliff:
    return next(cliff for cliff in explanation.cliffs if cliff.batch_size == size)


GRID = [*range(1, 17), *range(24, 257, 8)]


def test_the_published_a100_table_has_these_cliffs_and_no_other(published_data: Path) -> None:
    up_to_1024 = explain(published(published_data, "a100", "mlp_up_proj", 1024))
    large = [cliff.batch_size for cliff in up_to_1024.cliffs if cliff.excess > 1.08]
    assert large == [88, 136, 200, 264, 392, 520, 648, 776, 968]
    whole = explain(published(published_data, "a100", "mlp_up_proj", 10_000))
    assert {1296, 1552} == {c.batch_size for c in whole.cliffs if c.excess > 1.08} - set(large)
    assert cliff_at(up_to_1024, 136).pad_to == 168
    assert up_to_1024.period == 128


def test_the_published_h100_table_pads_136_to_152(published_data: Path) -> None:
    found = explain(published(published_data, "h100", "mlp_up_proj", 10_000))
    assert 72 not in {cliff.batch_size for cliff in found.cliffs}
    assert cliff_at(found, 136).pad_to == 152
    assert cliff_at(found, 136).cause == "kernel_switch"
    assert {drop.cause for drop in found.drops} == {"kernel_switch"}
    assert 144 in {drop.batch_size for drop in found.drops}


@pytest.mark.parametrize("gpu", ["a100", "h100"])
def test_the_fit_of_the_published_tables_is_near_the_datasheet(published_data: Path, gpu: str) -> None:
    found = explain(published(published_data, gpu, "mlp_up_proj", 1024), device=load_device(gpu), gemm=(4096, 22016))
    assert found.ridge.value is not None and found.ridge.predicted_weights is not None
    assert found.ridge.value == pytest.approx(found.ridge.predicted_weights, rel=0.2)
    assert found.fit is not None and 1.1 <= found.fit.p <= 1.8


def test_a100_figures_kept_here() -> None:
    found = explain(table(A100))
    assert [cliff.batch_size for cliff in found.cliffs] == [136, 200, 264]
    assert cliff_at(found, 136).excess == pytest.approx(205 / 136 / (157 / 128))
    assert cliff_at(found, 136).ratio == pytest.approx(205 / 157)
    assert (cliff_at(found, 136).pad_to, cliff_at(found, 136).cause) == (168, "kernel_switch")
    assert cliff_at(found, 136).excess_low is None
    assert any("one time only" in warning for warning in found.warnings)


def test_tiles_and_waves_need_a_device_and_a_shape() -> None:
    known = explain(table(A100), device=load_device("a100"), gemm=(4096, 22016))
    assert cliff_at(known, 264).cause == "wave"
    assert "172 -> 258 tiles on 108 SMs" in cliff_at(known, 264).evidence
    bare = explain(table(A100))
    assert cliff_at(bare, 264).cause not in ("tile", "wave")


def test_h100_figures_kept_here() -> None:
    found = explain(table(H100))
    assert [cliff.batch_size for cliff in found.cliffs] == [136, 200]
    assert cliff_at(found, 136).pad_to == 152
    assert [p.pad_to for p in found.padding if p.batch_size == 136] == [152]


def test_recommends_the_smallest_within_two_percent_outside_zones() -> None:
    def seconds(b: int) -> float:
        return 1e-4 * (20 + b) * (1.4 if 96 <= b < 128 else 1.0)

    found = explain(repeated(seconds, GRID, noise=0.002))
    throughput = {b: b / seconds(b) for b in GRID}
    first = min(b for b in GRID if throughput[b] >= 0.98 * max(throughput.values()))
    assert abs(GRID.index(found.recommended.batch_size) - GRID.index(first)) <= 1
    assert cliff_at(found, 96).to_size == 120
    assert found.recommended.limited_by == "range"
    assert "still rises" in found.recommended.reason


def test_balanced_is_the_ridge_and_a_target_is_kept() -> None:
    profile = repeated(lambda b: 1e-4 * (64 + b), GRID, noise=0.002)
    balanced = explain(profile, objective="balanced")
    assert balanced.recommended.batch_size == balanced.balanced
    assert abs((balanced.balanced or 0) - 64) <= 16
    low, high = balanced.ridge.low, balanced.ridge.high
    assert low is not None and high is not None and low <= 64 <= high
    target = explain(profile, latency_target=0.01275)
    assert target.recommended.objective == "latency"
    assert target.largest_within_target == target.recommended.batch_size == 56
    assert target.point(56).high is not None and (target.point(56).high or 1) < 0.01275


def test_a_target_that_nothing_meets_is_said() -> None:
    found = explain(repeated(lambda b: 1e-4 * (64 + b), GRID), latency_target=0.001)
    assert found.largest_within_target is None
    assert found.recommended.limited_by == "target"
    assert "No size" in found.recommended.reason


def test_flat_and_linear_curves_have_no_ridge_and_say_why() -> None:
    flat = explain(repeated(lambda b: 1e-3 + 1e-7 * b, GRID))
    assert flat.ridge.value is None and "flat" in flat.ridge.reason
    linear = explain(repeated(lambda b: 1e-4 * b, GRID))
    assert linear.ridge.value is None and "proportion" in linear.ridge.reason


def test_noise_that_hides_a_ten_percent_cliff_is_no_answer() -> None:
    noisy = repeated(lambda b: 1e-4 * (20 + b), GRID, noise=0.09, repeats=3)
    with pytest.raises(TooNoisy, match="repeats leave each time uncertain"):
        explain(noisy)
    assert explain(repeated(lambda b: 1e-4 * (20 + b), GRID, noise=0.03, repeats=3)).recommended.batch_size


def evidence(**after: object) -> Profile:
    """A step of 30 % at 128 with more known about the sizes on both sides of it."""
    profile = repeated(lambda b: 1e-4 * (20 + b) * (1.3 if b >= 128 else 1.0), GRID)
    before = {"overhead_seconds": 1e-5, "page_faults": 0.0, "kernels": ("gemm_a",), "moved_bytes": 1e6}
    same = {key: value for key, value in before.items() if key in after}
    points = [
        Point(
            batch_size=p.batch_size,
            samples=p.samples,
            rounds=p.rounds,
            **(after if p.batch_size >= 128 else same),  # type: ignore[arg-type]
        )
        for p in profile.points
    ]
    return Profile(points=tuple(points), peaks=Peaks(cache_bytes=2_000_000))


@pytest.mark.parametrize(
    ("after", "cause"),
    [
        ({}, "unknown"),
        ({"overhead_seconds": 4e-3}, "overhead"),
        ({"overhead_seconds": 2e-5}, "unknown"),
        ({"page_faults": 2e4}, "allocator"),
        ({"page_faults": 10.0}, "unknown"),
        ({"allocator_retries": 3}, "allocator"),
        ({"kernels": ("gemm_b",)}, "kernel_switch"),
        ({"kernels": ("gemm_a",)}, "unknown"),
        ({"moved_bytes": 3e6}, "cache"),
    ],
)
def test_a_cause_is_claimed_only_with_evidence(after: dict[str, object], cause: str) -> None:
    assert cliff_at(explain(evidence(**after)), 128).cause == cause


def test_a_wide_gap_leaves_the_edge_unknown_and_proposes_sizes() -> None:
    sizes = [size for size in GRID if not 128 <= size < 176]
    found = explain(repeated(lambda b: 1e-4 * (20 + b) * (1.3 if b >= 140 else 1.0), sizes))
    cliff = found.cliffs[0]
    assert (cliff.from_size, cliff.batch_size, cliff.exact) == (120, 176, False)
    assert all(120 < size < 176 for size in cliff.proposed) and cliff.proposed


def test_overhead_marks_the_ridge() -> None:
    profile = repeated(lambda b: 5e-3 + 1e-4 * b, GRID)
    points = tuple(
        Point(batch_size=p.batch_size, samples=p.samples, rounds=p.rounds, overhead_seconds=4e-3)
        for p in profile.points
    )
    found = explain(Profile(points=points))
    assert found.ridge.overhead_bound
    assert found.points[0].bound == "overhead"
    assert not explain(profile).ridge.overhead_bound


def test_utilisation_says_what_binds() -> None:
    profile = repeated(lambda b: 1e-4 * max(30.0, b), GRID)
    points = tuple(
        Point(batch_size=p.batch_size, samples=p.samples, rounds=p.rounds, flops=1e6 * p.batch_size, moved_bytes=3e6)
        for p in profile.points
    )
    found = explain(Profile(points=points, peaks=Peaks(flops=1.1e10, bandwidth=1.2e9)))
    assert found.point(1).bound == "memory"
    assert found.point(256).bound == "compute"
    assert found.point(256).compute_utilisation == pytest.approx(1e6 / 1e-4 / 1.1e10, rel=0.05)
    assert "share of time in which anything ran" in found.utilisation


def test_few_sizes_say_that_cliffs_are_not_excluded() -> None:
    found = explain(table({1: 100, 64: 200, 128: 300}))
    assert found.fit is None and found.ridge.value is None
    assert any("too few to exclude cliffs" in warning for warning in found.warnings)
    one = explain(table({16: 100}))
    assert one.recommended.batch_size == 16


def test_json_holds_the_promised_keys_and_loads_again(tmp_path: Path) -> None:
    from microbatch.reporting.save import save

    memory = MemoryCurve(fixed_bytes=1, bytes_per_item=2.0, limit_bytes=100, limit_source="x", margin=0.1)
    profile = repeated(lambda b: 1e-4 * (20 + b), GRID, memory=memory, environment=Environment(threads=2))
    found = explain(profile)
    document = found.to_json()
    assert {"recommended", "balanced", "b90", "largest_within_target", "largest_that_fits", "ridge", "fit", "bound",
            "cliffs", "padding", "period", "warnings", "uncounted", "noise", "points", "environment",
            "schema_version"} <= document.keys()  # fmt: skip
    point = document["points"][0]
    assert {"batch_size", "seconds", "low", "high", "samples", "first_call_seconds", "compute_utilisation",
            "bandwidth_utilisation", "overhead_share", "peak_bytes"} <= point.keys()  # fmt: skip
    save(found, tmp_path / "e.json")
    assert explain(tmp_path / "e.json").recommended == found.recommended


@pytest.mark.parametrize(
    "settings",
    [{"objective": "speed"}, {"latency_target": 0.0}, {"latency_target": float("nan")}, {"gemm": (4096, 4096)}],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(InvalidSettings):
        explain(table(A100), **settings)  # type: ignore[arg-type]
