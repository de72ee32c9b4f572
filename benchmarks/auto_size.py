"""How near the size that ``micro_batch_size="auto"`` takes is to the best of an exhaustive search, and what it cost.

    PYTHONPATH=src python benchmarks/auto_size.py > benchmarks/results/auto_size.txt

Each model trains on batches of 128. After auto has chosen, whole steps at every size that evens out the pieces are
timed in turn, several rounds; a size's time is the median of its rounds. Both lie in one run: noise hits all alike.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from microbatch.training.memory.size_search import sizes_of
from microbatch.training.step import TrainStep

ITEMS, ROUNDS = 128, 7

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
    print(f"{'model':10}{'auto':>6}{'best':>6}{'share of the best throughput':>30}{'passes':>8}{'failures':>10}")
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
        level = {size: median(samples) for size, samples in times.items()}
        best = min(level, key=lambda size: level[size])
        failures = sum(probe.seconds is None for probe in choice.probes)
        share = f"{level[best] / level[chosen]:.3f}"
        print(f"{name:10}{chosen:>6}{best:>6}{share:>30}{len(choice.probes):>8}{failures:>10}", flush=True)


if __name__ == "__main__":
    main()
