"""Step times that ``profile --global-batch`` tells, against steps that are really taken, and the size that it picks.

    PYTHONPATH=src python benchmarks/global_batch.py > benchmarks/results/global_batch.txt

Each model is profiled in training; then whole steps of the global batch in micro-batches of each even size are timed in
turn, several rounds, with Adam: by TrainStep and by a loop of a few lines. A size's time is the median of its rounds.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from microbatch.curves.micro_batch_choice import choose_micro_batches
from microbatch.curves.micro_batches import even_sizes
from microbatch.profiling.sweep import profile
from microbatch.training.step import TrainStep

Model = tuple[Callable[[], nn.Module], tuple[int, ...]]
MODELS: dict[str, Model] = {
    "mlp, mostly weights": (lambda: nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)), (512,)),
    "sequence": (lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), (64, 64)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)), (3, 24, 24)),
}


def squares(output: Tensor, _: object) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


def loop_of(model: nn.Module, batch: Tensor) -> Callable[[int], None]:
    """The step as anybody writes it."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-9)

    def step(size: int) -> None:
        for piece in batch.split(size):
            (model(piece).square().sum() / len(batch)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def train_step_of(model: nn.Module, batch: Tensor) -> Callable[[int], None]:
    train = TrainStep(model, torch.optim.Adam(model.parameters(), lr=1e-9), squares)

    def step(size: int) -> None:
        train.micro_batch_size = size
        train(batch)

    return step


def timed(step: Callable[[int], None], sizes: list[int], rounds: int) -> dict[int, float]:
    samples: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(-1, rounds):
        for size in random.Random(number).sample(sizes, len(sizes)):
            start = time.perf_counter()
            step(size)
            if number >= 0:
                samples[size].append(time.perf_counter() - start)
    return {size: median(found) for size, found in samples.items()}


def compare(name: str, model: Model, items: int, rounds: int, budget: float) -> None:
    """One model's rows, and the picked size against the best of all."""
    make, shape = model
    torch.manual_seed(0)
    measured = profile(
        make(), torch.randn(8, *shape), mode="training", budget=budget, max_batch_size=items, sizes=even_sizes(items),
        loss=squares,
    )  # fmt: skip
    found = choose_micro_batches(measured, items)
    told = {row.micro_batch_size: row for row in found.rows}
    sizes = [size for size in even_sizes(items) if size in told]
    batch = torch.randn(items, *shape)
    loop, train = (timed(start(make(), batch), sizes, rounds) for start in (loop_of, train_step_of))
    print(f"{name}: a step of {items}\n{'size':>6}{'told ms':>10}{'loop ms':>10}{'told/loop':>11}{'TrainStep ms':>14}")
    for size in sizes:
        told_seconds = told[size].step_seconds
        print(f"{size:>6}{told_seconds * 1e3:>10.2f}{loop[size] * 1e3:>10.2f}{told_seconds / loop[size]:>11.3f}"
              f"{train[size] * 1e3:>14.2f}")  # fmt: skip
    errors = [abs(told[size].step_seconds / loop[size] - 1) for size in sizes]
    chosen = found.chosen.micro_batch_size if found.chosen else 0
    near = min(sizes, key=lambda size: abs(size - chosen))
    print(f"error: median {median(errors):.1%}, largest {max(errors):.1%}")
    print(
        f"picked {chosen}: {min(loop.values()) / loop[near]:.3f} of the best throughput (timed at {near})\n", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--items", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget", type=float, default=30.0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for name, model in MODELS.items():
        compare(name, model, chosen.items, chosen.rounds, chosen.budget)


if __name__ == "__main__":
    main()
