"""Is a planted gradient noise scale found, and what does measuring it cost?

    PYTHONPATH=src:. python benchmarks/noise_scale.py [--pairs 50] [--out benchmarks/results/noise_scale.json]

First quadratics whose noise scale is known, for several batches, pieces and seeds: the error after 200 to 1000 steps,
and how often the 90 % interval holds the truth. Then a step with and without ``noise_scale=True`` in alternating
pairs, one thread, on a tiny model and at about 50 ms per piece: median difference and its upper 95 % bound.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch

from benchmarks.training_step import PIECES, batch_of, bounded, keep_freed_memory, loss, mlp, rows_for, seconds
from microbatch.training.step import TrainStep
from tests.training.planted_noise import PLANTED

SPLITS = ((32, 4), (30, 9), (64, 16))
SEEDS = 5
STEPS = {"much noise": 1000}


@dataclass(frozen=True)
class Found:
    """One planted noise scale.

    Attributes:
        name, items, micro_batch_size, seed: the case.
        value: found after all its steps.
        error: relative.
        held: whether the 90 % interval holds the truth.
    """

    name: str
    items: int
    micro_batch_size: int
    seed: int
    value: float
    error: float
    held: bool


@dataclass(frozen=True)
class Cost:
    """What measuring adds to a step.

    Attributes:
        job: its name.
        seconds: of a step without.
        extra_per_piece: seconds per piece, and their upper 95 % bound.
        extra_share: of the step.
    """

    job: str
    seconds: float
    extra_per_piece: tuple[float, float]
    extra_share: tuple[float, float]


def planted(steps: int) -> Iterator[Found]:
    for name, (items, size), seed in product(PLANTED, SPLITS, range(SEEDS)):
        case = PLANTED[name]
        step, generator = case.step(case.model(), size), torch.Generator().manual_seed(seed)
        for _ in range(max(1, STEPS.get(name, 200) * steps // 200)):
            result = step(case.batch(items, generator))
        found = result.noise_scale
        assert found is not None
        low, high = found.low or 0.0, found.high or 0.0
        error = found.value / case.expected() - 1
        yield Found(name, items, size, seed, found.value, error, low <= case.expected() <= high)


def cost(job: str, width: int, depth: int, rows: int, pairs: int) -> Cost:
    batch, steps = batch_of(rows * PIECES, width), []
    for noise_scale in (False, True):
        model = mlp(width, depth)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        steps.append(
            TrainStep(
                model, optimizer, loss, forward=lambda m, b: m(b["x"]), micro_batch_size=rows, max_norm=1.0,
                noise_scale=noise_scale,
            )
        )  # fmt: skip
    for step in steps * 3:
        step(batch)
    times = []
    for pair in range(pairs):
        took = {side: seconds(lambda side=side: steps[side](batch)) for side in ((0, 1), (1, 0))[pair % 2]}  # type: ignore[misc]
        times.append((took[0], took[1]))
    without = statistics.median(one for one, _ in times)
    extra = bounded([two - one for one, two in times])
    return Cost(job, without, (extra[0] / PIECES, extra[1] / PIECES), (extra[0] / without, extra[1] / without))


def main() -> None:
    """Run and print; write the result when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=50)
    parser.add_argument("--steps", type=int, default=200, help="of each planted case")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    found = list(planted(options.steps))
    for name in PLANTED:
        errors = [one.error for one in found if one.name == name]
        held = [one.held for one in found if one.name == name]
        print(f"{name}: largest error {max(map(abs, errors)):.1%}, mean {statistics.mean(errors):+.1%}", end="")
        print(f"; {sum(held)} of {len(held)} intervals hold it")
    costs = [
        cost("tiny", 16, 1, 4, 10 * options.pairs),
        cost("50 ms per piece", 1024, 4, rows_for(1024, 4), options.pairs),
    ]
    for one in costs:
        (extra, most), (share, most_share) = one.extra_per_piece, one.extra_share
        print(f"{one.job}: {extra * 1e6:.1f} µs per piece (at most {most * 1e6:.1f}), {share:.2%} (at most ", end="")
        print(f"{most_share:.2%})")
    if options.out:
        document = {
            "planted": [asdict(one) for one in found],
            "costs": [asdict(one) for one in costs],
            "machine": {"cpus": os.cpu_count(), "load": os.getloadavg(), "platform": platform.platform()},
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
