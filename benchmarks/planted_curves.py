"""Hundreds of curves with known knees and cliffs, noise and all: how often are they found, and how often invented?

    python benchmarks/planted_curves.py [--curves 400] [--seed 0] [--out benchmarks/results/planted_curves.json]

A curve is t(b) = (a^p + (c·b)^p)^(1/p) on an uneven grid, with steps, slow zones, dips and staircases planted in it,
lognormal noise of 1 to 5 %, 5 % outliers of 1.5 to 3 times, slow drift over the run, and 3 to 15 repeats. The truth is
the curve without noise: a cliff is a size whose time per item is at least 1.05 times that of the next smaller size.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from microbatch.curves.profile import Point, Profile
from microbatch.errors import TooNoisy
from microbatch.profiling.explain import explain

Floats = NDArray[np.float64]
WANTED, LEAST = 1.10, 1.05
CLASSES = (1.10, 1.15, 1.20, 1.30, 1.45, 2.0, np.inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class Planted:
    """A curve and the truth about it."""

    profile: Profile
    sizes: tuple[int, ...]
    excess: Floats
    knee: float
    noise: float

    def with_excess(self, least: float) -> set[int]:
        return {size for size, excess in zip(self.sizes, self.excess, strict=True) if excess >= least}


def plant(rng: np.random.Generator, *, smooth: bool = False) -> Planted:
    """One random curve; without anything planted when `smooth`."""
    top = int(rng.choice([256, 512, 1024]))
    sizes = uneven_grid(rng, top)
    knee, p = float(np.exp(rng.uniform(np.log(4), np.log(top / 3)))), float(rng.choice([1, 1, 1.2, 1.5, 2, 4]))
    seconds = smooth_curve(sizes, knee, p)
    for _ in range(0 if smooth else int(rng.integers(1, 4))):
        seconds = disturb(rng, sizes, seconds, knee, p)
    seconds = seconds * np.exp(rng.uniform(-9, -3))
    noise, repeats = float(rng.uniform(0.01, 0.05)), int(rng.integers(3, 16))
    samples = seconds[:, None] * np.exp(noise * rng.standard_normal((len(sizes), repeats)))
    samples *= drift(rng, len(sizes), repeats)
    slow = rng.random(samples.shape) < 0.05
    samples[slow] *= rng.uniform(1.5, 3, slow.sum())
    points = tuple(
        Point(batch_size=int(b), samples=tuple(map(float, row)), rounds=tuple(range(repeats)))
        for b, row in zip(sizes, samples, strict=True)
    )
    per_item = seconds / sizes
    return Planted(
        profile=Profile(points=points, source="planted"),
        sizes=tuple(map(int, sizes)),
        excess=np.concatenate([[0.0], per_item[1:] / per_item[:-1]]),
        knee=knee,
        noise=noise,
    )


def uneven_grid(rng: np.random.Generator, top: int) -> Floats:
    """Dense integers then multiples, sparse powers with both sides, or geometric; a tenth of the sizes left out."""
    kind = rng.integers(3)
    if kind == 0:
        sizes = {*range(1, 17), *range(16, min(top, 128) + 1, 8), *range(128, top + 1, 32)}
    elif kind == 1:
        around = {2**k + d for k in range(3, 12) for d in (-1, 0, 1)}
        sizes = {1, 2, 3, 4, 6, 8, 12, *range(16, top + 1, 16), *(size for size in around if size <= top)}
    else:
        sizes = {round(float(x)) for x in np.exp(np.linspace(0, np.log(top), 60))}
    ordered = np.array(sorted(sizes), dtype=float)
    kept = rng.random(len(ordered)) > 0.1
    kept[[0, -1]] = True
    return ordered[kept]


def smooth_curve(sizes: Floats, knee: float, p: float) -> Floats:
    return np.asarray((knee**p + sizes**p) ** (1 / p))


def disturb(rng: np.random.Generator, sizes: Floats, seconds: Floats, knee: float, p: float) -> Floats:
    """A lasting step, a slow zone, a dip at one size, or a staircase."""
    height, at, index = rng.uniform(0.03, 0.6), int(rng.integers(2, len(sizes) - 2)), np.arange(len(sizes))
    match int(rng.integers(4)):
        case 0:
            return seconds * np.where(index >= at, 1 + height, 1)
        case 1:
            return seconds * np.where((index >= at) & (index < at + rng.integers(1, 8)), 1 + height, 1)
        case 2:
            return seconds * np.where(index == at, 1 - min(height, 0.4), 1)
        case _:
            period = int(rng.choice([16, 32, 64, 128]))
            rounded = np.ceil(sizes / period) * period
            return seconds * smooth_curve(rounded, knee, p) / smooth_curve(sizes, knee, p)


def drift(rng: np.random.Generator, sizes: int, repeats: int) -> Floats:
    """Up to 5 % of slow change over the run; odd rounds run from large to small."""
    position = np.arange(sizes)[:, None] / sizes
    forth = np.arange(repeats)[None, :] % 2 == 0
    when = (np.arange(repeats)[None, :] + np.where(forth, position, 1 - position)) / repeats
    return np.exp(rng.uniform(0, 0.05) * np.sin(3 * when + rng.uniform(0, 6.28)))


def score(curves: list[Planted]) -> dict[str, object]:
    """Precision and recall for cliffs of 10 %, and coverage of the knee, over curves that were not called too noisy."""
    found, missed, invented, covered, knees = Counter[int](), Counter[int](), 0, 0, 0
    reported = too_noisy = too_noisy_below_3 = 0
    for curve in curves:
        wanted, allowed = curve.with_excess(WANTED), curve.with_excess(LEAST)
        try:
            answer = explain(curve.profile)
        except TooNoisy:
            too_noisy += 1
            if curve.noise > 0.03:
                continue
            too_noisy_below_3 += 1
            missed.update(size_class(curve, size) for size in wanted)
            continue
        cliffs = {cliff.batch_size for cliff in answer.cliffs}
        reported += len(cliffs)
        invented += len(cliffs - allowed)
        found.update(size_class(curve, size) for size in wanted & cliffs)
        missed.update(size_class(curve, size) for size in wanted - cliffs)
        if answer.ridge.low is not None and answer.ridge.high is not None:
            knees += 1
            covered += answer.ridge.low <= curve.knee <= answer.ridge.high
    total = found.total() + missed.total()
    return {
        "curves": len(curves),
        "recall": found.total() / total if total else None,
        "precision": 1 - invented / reported if reported else None,
        "cliffs": total,
        "reported": reported,
        "knee_coverage": covered / knees if knees else None,
        "knees": knees,
        "too_noisy": too_noisy,
        "too_noisy_at_3_percent_or_less": too_noisy_below_3,
        "by_size": {
            f"{CLASSES[k]:.2f}-{CLASSES[k + 1]:.2f}": {"found": found[k], "of": found[k] + missed[k]}
            for k in range(len(CLASSES) - 1)
        },
    }


def size_class(curve: Planted, size: int) -> int:
    excess = curve.excess[curve.sizes.index(size)]
    return next(k for k in range(len(CLASSES) - 1) if CLASSES[k] <= excess < CLASSES[k + 1])


def smooth_without_cliff(curves: list[Planted]) -> dict[str, object]:
    """Curves with nothing planted: how many stay without a cliff."""
    clean = answered = 0
    for curve in curves:
        try:
            answer = explain(curve.profile)
        except TooNoisy:
            continue
        answered += 1
        clean += not answer.cliffs
    return {"answered": answered, "without_cliff": clean, "share": clean / answered}


def main() -> None:
    """Run and print; write the result when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    planted = [plant(rng) for _ in range(options.curves)]
    smooth = [plant(rng, smooth=True) for _ in range(options.curves // 2)]
    result = {
        "seed": options.seed,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "planted": score(planted),
        "smooth": smooth_without_cliff(smooth),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
