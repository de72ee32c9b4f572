"""Cliffs on planted curves, and none where nothing is planted."""

from __future__ import annotations

import numpy as np
import pytest

from microbatch.curves.cliffs import find_shape
from microbatch.curves.levels import find_levels
from microbatch.curves.profile import Point

SIZES = np.array([*range(1, 17), *range(16 + 8, 257, 8)], dtype=float)


def curve(knee: float = 30.0) -> np.ndarray:
    return 1e-4 * (knee + SIZES)


def find(seconds: np.ndarray, *, noise: float = 0.02, repeats: int = 5, seed: int = 0) -> list[int]:
    rng = np.random.default_rng(seed)
    samples = seconds[:, None] * np.exp(noise * rng.standard_normal((len(seconds), repeats)))
    points = [
        Point(batch_size=int(b), samples=tuple(map(float, row)), rounds=tuple(range(repeats)))
        for b, row in zip(SIZES, samples, strict=True)
    ]
    return [int(SIZES[i]) for i in find_shape(find_levels(points)).cliffs]


@pytest.mark.parametrize("height", [0.12, 0.25, 0.6])
@pytest.mark.parametrize("at", [64, 128, 200])
def test_a_lasting_step_is_found_at_its_batch(height: float, at: int) -> None:
    assert find(curve() * np.where(at <= SIZES, 1 + height, 1.0)) == [at]


def test_a_slow_zone_opens_with_one_cliff() -> None:
    assert find(curve() * np.where((SIZES >= 96) & (SIZES < 128), 1.3, 1.0)) == [96]


def test_a_dip_makes_the_size_after_it_a_cliff() -> None:
    assert find(curve() * np.where(SIZES == 128, 0.75, 1.0)) == [136]


def test_a_staircase_is_found_at_every_step_of_enough_excess() -> None:
    rounded = np.ceil(SIZES / 64) * 64
    seconds = 1e-4 * (10.0 + rounded)
    assert find(seconds) == [72, 136, 200]


def test_no_cliff_in_smooth_curves() -> None:
    found = sum(bool(find(curve(knee), seed=seed)) for seed, knee in enumerate(np.geomspace(4, 200, 60)))
    assert found <= 3


def test_one_sample_per_size_needs_no_noise_estimate() -> None:
    seconds = curve() * np.where(SIZES >= 128, 1.3, 1.0)
    assert find(seconds, noise=0.003, repeats=1) == [128]
