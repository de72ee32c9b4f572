"""Comparing two profiles: what is found, what must not be found, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from microbatch.curves.codec import dump_profile
from microbatch.curves.profile import Environment, Point, Profile
from microbatch.errors import InvalidProfile, InvalidSettings
from microbatch.profiling.compare import compare

SIZES = (1, 2, 3, 4, 6, 8, *range(16, 400, 16))
TRIES = 200


def _profile(
    rng: np.random.Generator,
    noise: float,
    repeats: int,
    *,
    changes: Mapping[int, float] | None = None,
    sizes: tuple[int, ...] = SIZES,
) -> Profile:
    """A planted curve: lognormal noise, 5 % outliers of 1.5 to 3 times, interleaved rounds."""
    points = []
    for size in sizes:
        seconds = 1e-3 * (1 + size / 50) * (changes or {}).get(size, 1.0) * np.exp(rng.normal(0, noise, repeats))
        outliers = np.where(rng.random(repeats) < 0.05, rng.uniform(1.5, 3, repeats), 1.0)
        samples = tuple(map(float, seconds * outliers))
        points.append(Point(batch_size=size, samples=samples, rounds=tuple(range(repeats))))
    return Profile(points=tuple(points))


def test_the_same_against_itself_regresses_in_at_most_5_percent_of_tries() -> None:
    """With a threshold of zero, so that nothing but the statistics holds a claim back."""
    rng = np.random.default_rng(20)
    slower = faster = 0
    for _ in range(TRIES):
        noise, repeats = float(rng.uniform(0.01, 0.05)), int(rng.integers(3, 16))
        sizes = tuple(sorted(rng.choice(SIZES, int(rng.integers(5, len(SIZES) + 1)), replace=False).tolist()))
        first, second = (_profile(rng, noise, repeats, sizes=sizes) for _ in range(2))
        found = compare(first, second, threshold=0)
        slower += bool(found.regressions)
        faster += bool(found.improvements)
    assert slower <= 0.05 * TRIES
    assert faster <= 0.05 * TRIES


def test_more_samples_in_one_of_them_is_no_change() -> None:
    rng = np.random.default_rng(21)
    tries = [compare(_profile(rng, 0.03, 15), _profile(rng, 0.03, 3), threshold=0) for _ in range(30)]
    assert sum(bool(one.regressions or one.improvements) for one in tries) <= 0.1 * 30
    assert np.mean([one.common.ratio for one in tries]) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(("noise", "repeats"), [(0.01, 3), (0.02, 5), (0.03, 9)])
def test_one_size_that_became_10_percent_slower_is_found_alone(noise: float, repeats: int) -> None:
    rng = np.random.default_rng(22)
    found = false = 0
    sizes = SIZES[:15]
    for _ in range(20):
        size = int(rng.choice(sizes))
        first = _profile(rng, noise, repeats, sizes=sizes)
        result = compare(first, _profile(rng, noise, repeats, sizes=sizes, changes={size: 1.1}))
        claimed = {change.batch_size for change in result.regressions}
        found += size in claimed
        false += bool(claimed - {size})
    assert found >= 0.95 * 20
    assert false <= 1


@pytest.mark.parametrize(("noise", "repeats"), [(0.01, 3), (0.05, 3), (0.05, 9)])
def test_all_sizes_10_percent_slower_are_found(noise: float, repeats: int) -> None:
    rng = np.random.default_rng(23)
    everywhere = dict.fromkeys(SIZES, 1.1)
    found = 0
    for _ in range(5):
        result = compare(_profile(rng, noise, repeats), _profile(rng, noise, repeats, changes=everywhere))
        found += len(result.regressions)
        assert result.regressions and not result.improvements
        assert result.common.ratio == pytest.approx(1.1, abs=0.04)
        assert result.common.low is not None and result.common.low > 1.04
    assert found >= 0.3 * 5 * len(SIZES)  # together: alone, under noise of 5 %, hardly one in ten would stand out


def test_an_improvement_is_the_mirror_of_a_regression() -> None:
    rng = np.random.default_rng(24)
    first, second = _profile(rng, 0.01, 9), _profile(rng, 0.01, 9, changes={64: 1.2, 128: 1.2})
    there, back = compare(first, second), compare(second, first)
    assert [change.batch_size for change in there.regressions] == [64, 128]
    assert [change.batch_size for change in back.improvements] == [64, 128]
    assert not back.regressions and not there.improvements
    assert there.regressions[0].ratio == pytest.approx(1 / back.improvements[0].ratio)


def test_a_change_below_the_threshold_is_not_claimed() -> None:
    rng = np.random.default_rng(25)
    first, second = _profile(rng, 0.005, 15), _profile(rng, 0.005, 15, changes={64: 1.04})
    assert not compare(first, second).regressions
    assert [change.batch_size for change in compare(first, second, threshold=0.02).regressions] == [64]


def test_the_90_percent_interval_covers_the_true_ratio() -> None:
    rng = np.random.default_rng(26)
    covered = [
        (change.low or 0) <= 1 <= (change.high or 0)
        for _ in range(15)
        for change in compare(_profile(rng, 0.03, 9), _profile(rng, 0.03, 9)).sizes
    ]
    assert 0.85 <= np.mean(covered) <= 0.99  # wider than 90 % where samples are independent, as they are here


def test_only_common_sizes_are_compared() -> None:
    rng = np.random.default_rng(27)
    first, second = _profile(rng, 0.01, 5, sizes=(1, 2, 4)), _profile(rng, 0.01, 5, sizes=(2, 4, 8))
    result = compare(first, second)
    assert [change.batch_size for change in result.sizes] == [2, 4]
    assert (result.only_in_first, result.only_in_second) == ((1,), (8,))


def test_points_may_stand_in_any_order() -> None:
    rng = np.random.default_rng(28)
    first, second = _profile(rng, 0.01, 5), _profile(rng, 0.01, 5, changes={64: 1.3})
    shuffled = replace(second, points=tuple(reversed(second.points)))
    assert compare(first, shuffled) == compare(first, second)


@pytest.mark.parametrize("repeats", [1, 2])
def test_too_few_samples_give_ratios_and_no_claim(repeats: int) -> None:
    rng = np.random.default_rng(29)
    everywhere = dict.fromkeys(SIZES, 1.5)
    result = compare(_profile(rng, 0.01, repeats), _profile(rng, 0.01, repeats, changes=everywhere))
    assert not result.regressions and not result.improvements
    assert all(change.low is None and change.high is None for change in result.sizes)
    assert result.common.ratio == pytest.approx(1.5, rel=0.05) and result.common.low is None
    assert result.detectable is None and (result.noise is None) == (repeats == 1)
    assert any("no interval" in warning for warning in result.warnings)


def test_a_noisy_run_says_what_it_cannot_find() -> None:
    rng = np.random.default_rng(30)
    result = compare(_profile(rng, 0.08, 3), _profile(rng, 0.08, 3))
    assert result.detectable is not None and result.detectable > 0.1
    assert any("Too noisy for small changes" in warning for warning in result.warnings)
    assert result.noise == pytest.approx(0.08, rel=0.4)


@pytest.mark.parametrize("field", ["unit", "mode", "dtype", "structure"])
def test_unlike_profiles_are_refused(field: str) -> None:
    profile = _profile(np.random.default_rng(31), 0.01, 3)
    first = replace(profile, **{field: "one"})  # type: ignore[arg-type]
    with pytest.raises(InvalidProfile, match=f"differ in {field}: 'one' and 'two'"):
        compare(first, replace(profile, **{field: "two"}))  # type: ignore[arg-type]
    assert compare(first, first).sizes


def test_what_a_csv_does_not_tell_agrees_with_anything() -> None:
    profile = _profile(np.random.default_rng(32), 0.01, 3)
    assert compare(replace(profile, dtype="fp32", structure="abc"), profile).sizes


def test_no_size_in_common_is_refused() -> None:
    rng = np.random.default_rng(33)
    with pytest.raises(InvalidProfile, match="no batch size in common: 1, 2 and 3, 4"):
        compare(_profile(rng, 0.01, 3, sizes=(1, 2)), _profile(rng, 0.01, 3, sizes=(3, 4)))


@pytest.mark.parametrize("threshold", [-0.1, 1.0, float("nan")])
def test_a_threshold_outside_its_range_is_refused(threshold: float) -> None:
    profile = _profile(np.random.default_rng(34), 0.01, 3)
    with pytest.raises(InvalidSettings, match="between 0 and 1"):
        compare(profile, profile, threshold=threshold)


def test_other_machines_and_versions_are_warned_of() -> None:
    profile = _profile(np.random.default_rng(35), 0.01, 3)
    first = replace(profile, environment=Environment(device="A", threads=2, versions={"torch": "2.12", "numpy": "2"}))
    second = replace(profile, environment=Environment(device="B", threads=4, versions={"torch": "2.13", "numpy": "2"}))
    warnings = compare(first, second).warnings
    assert warnings == (
        "The profiles differ in device: A and B.",
        "The profiles differ in threads: 2 and 4.",
        "The profiles differ in versions of torch: 2.12 and 2.13.",
    )


def test_paths_and_json(tmp_path: Path) -> None:
    rng = np.random.default_rng(36)
    first, second = _profile(rng, 0.01, 9), _profile(rng, 0.01, 9, changes={64: 1.3})
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, profile in zip(paths, (first, second)):
        path.write_bytes(dump_profile(profile))
    result = compare(*paths)
    assert result == compare(first, second)
    document = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert set(document["regressions"][0]) == {"batch_size", "ratio", "low", "high"}
    assert document["regressions"][0]["batch_size"] == 64
    assert document["schema_version"] == 1 and document["noise"] > 0


def test_comparing_needs_no_torch() -> None:
    code = (
        "import sys; import microbatch.profiling.compare, microbatch.profiling.settings;"
        "sys.exit(int(bool({'torch', 'matplotlib'} & set(sys.modules))))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=False).returncode
        == 0
    )
