"""How near the size that ``micro_batch_size="auto"`` takes is to the best of an exhaustive search, and what it cost.

    PYTHONPATH=src python benchmarks/auto_size.py > benchmarks/results/auto_size.txt

Each model trains on batches of 128. After auto has chosen, whole steps at every size that evens out the pieces are
timed in turn, many rounds; a size's time is the median of its rounds. Both lie in one run: noise hits all alike.

The best of eight noisy medians is too good: it is picked for its noise as well. So the best size is found in one half
of the rounds and its time read in the other, both ways round, and the share is the mean of the two.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn

from microbatch.training.memory.size_search import sizes_of
from microbatch.training.step import TrainStep

ITEMS, ROUNDS = 128, 30

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)), (512,)),
    "sequence": (lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), (64, 64)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)), (3, 24, 24)),
}


def loss(output: Tensor, _: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


def seconds(step: TrainStep, batch: Any, size: int) -> float:
    """One whole step at a size."""
    step.micro_batch_size = size
    start = time.perf_counter()
    step(batch)
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    print(
        f"{'model':10}{'auto':>6}{'best':>8}{'share of the best throughput':>30}"
        f"{'passes':>8}{'failures':>10}{'search':>12}"
    )
    for name, (make, shape) in MODELS.items():
        torch.manual_seed(0)
        model, batch = make(), torch.randn(ITEMS, *shape)
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=1e-6), loss)
        chosen = step(batch).micro_batch_size
        choice, sizes = step.choice, list(sizes_of(ITEMS, None))
        assert choice is not None
        times: dict[int, list[float]] = {size: [] for size in sizes}
        for number in range(ROUNDS):
            for size in random.Random(number).sample(sizes, len(sizes)):
                times[size].append(seconds(step, batch, size))
        halves = [{size: median(samples[half::2]) for size, samples in times.items()} for half in (0, 1)]
        best = [min(half, key=lambda size: half[size]) for half in halves]
        share = mean(halves[1 - at][best[at]] / halves[1 - at][chosen] for at in (0, 1))
        failures = sum(probe.seconds is None for probe in choice.probes)
        spent = sum(probe.pieces * (probe.seconds or 0) for probe in choice.probes)
        named = "/".join(map(str, sorted(set(best))))
        print(
            f"{name:10}{chosen:>6}{named:>8}{share:>30.3f}{len(choice.probes):>8}{failures:>10}{spent:>10.2f} s",
            flush=True,
        )
        print("  ms per step:", {size: round(median(samples) * 1e3, 2) for size, samples in times.items()}, flush=True)


if __name__ == "__main__":
    main()
