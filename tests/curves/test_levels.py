"""Levels: one time per size, whatever outliers and drift do."""

from __future__ import annotations

import numpy as np
import pytest

from microbatch.curves.levels import find_levels
from microbatch.curves.profile import Point


def noisy_points(
    rng: np.random.Generator, seconds: np.ndarray, repeats: int, *, noise: float, outliers: float, drift: float
) -> list[Point]:
    samples = seconds[:, None] * np.exp(noise * rng.standard_normal((len(seconds), repeats)))
    samples *= np.exp(drift * np.arange(repeats))[None, :]
    slow = rng.random(samples.shape) < outliers
    samples[slow] *= rng.uniform(1.5, 3.0, slow.sum())
    return [
        Point(batch_size=i + 1, samples=tuple(map(float, row)), rounds=tuple(range(repeats)))
        for i, row in enumerate(samples)
    ]


@pytest.mark.parametrize("repeats", [3, 5, 15])
def test_errors_are_as_large_as_they_say(repeats: int) -> None:
    rng = np.random.default_rng(1)
    seconds = np.linspace(1.0, 2.0, 60)
    scores: list[float] = []
    for _ in range(20):
        levels = find_levels(noisy_points(rng, seconds, repeats, noise=0.03, outliers=0.05, drift=0.02))
        error = levels.log_seconds - np.log(seconds)
        scores.extend((error - np.median(error)) / levels.standard_error)
    assert 0.85 < np.std(scores) < 1.15
    assert np.mean(np.abs(scores) > 4) < 0.002


def test_two_outliers_of_three_do_not_move_a_level() -> None:
    rng = np.random.default_rng(2)
    points = noisy_points(rng, np.ones(30), 3, noise=0.01, outliers=0.0, drift=0.0)
    clean = find_levels(points).log_seconds[7]
    first = points[7].samples[0]
    points[7] = Point(batch_size=8, samples=(first, 1.7, 2.6), rounds=(0, 1, 2))
    assert find_levels(points).log_seconds[7] == pytest.approx(np.log(first), abs=1e-9)
    assert abs(clean) < 0.03


def test_drift_between_rounds_is_not_noise() -> None:
    rng = np.random.default_rng(3)
    still = find_levels(noisy_points(rng, np.ones(40), 6, noise=0.01, outliers=0.0, drift=0.0))
    moving = find_levels(noisy_points(rng, np.ones(40), 6, noise=0.01, outliers=0.0, drift=0.05))
    assert still.sigma is not None and moving.sigma is not None
    assert moving.sigma == pytest.approx(still.sigma, rel=0.25)


def test_one_sample_each_has_no_noise_estimate() -> None:
    points = [Point(batch_size=b, samples=(0.001 * b,)) for b in (1, 2, 3)]
    levels = find_levels(points)
    assert levels.sigma is None
    assert not levels.standard_error.any()


def test_a_single_repeated_size_does_not_set_the_noise_of_all() -> None:
    points = [Point(batch_size=b, samples=(0.001 * b,)) for b in range(1, 20)]
    points[4] = Point(batch_size=5, samples=(0.005, 0.005))
    assert find_levels(points).sigma is None
