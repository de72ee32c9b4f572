"""What does a training step cost above a loop written by hand that is as exact?

    python benchmarks/training_step.py [--pairs 50] [--out benchmarks/results/training_step.json]

The loop knows the weight of the whole batch beforehand and divides each piece's sum by it. Loop and `TrainStep` run in
alternating pairs, one thread, the same pieces, clipping included. glibc is told to keep freed memory: whether a free
of a few megabytes goes back to the system, to be faulted in again, depends on the accidental layout of the heap, and
costs either side up to 3 % (counted: 0 to 9000 page faults per step of the same code).

Two jobs: a tiny model, where every microsecond shows, and a model with about 50 ms per piece. Each row gives the
median difference over the pairs and a bootstrapped upper 95 % bound of it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from microbatch.training.step import TrainStep

PIECES, CLASSES, MAX_NORM = 8, 10, 1.0
SECONDS_PER_PIECE = 0.05
STEPS = 10
"""After which the weights of both are compared."""
ALLOWED_SECONDS, ALLOWED_SHARE = 0.2e-3, 0.01


@dataclass(frozen=True)
class Row:
    """One job.

    Attributes:
        job: its name.
        pieces: micro-batches per step.
        loop_seconds: median time of a step of the loop.
        extra_per_piece: seconds per piece above the loop, and its upper 95 % bound.
        extra_share: the same over the loop's time.
        difference: largest difference of the weights after `STEPS` steps of each, over the largest weight.
    """

    job: str
    pieces: int
    loop_seconds: float
    extra_per_piece: tuple[float, float]
    extra_share: tuple[float, float]
    difference: float


def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return cross_entropy(output, batch["y"], reduction="sum"), batch["y"].numel()


def mlp(width: int, depth: int) -> nn.Module:
    torch.manual_seed(0)
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, CLASSES))


def batch_of(rows: int, width: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, width), "y": torch.randint(CLASSES, (rows,))}


def by_hand(model: nn.Module, rows: int) -> Callable[[dict[str, Tensor]], object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(batch: dict[str, Tensor]) -> float:
        optimizer.zero_grad()
        number, total = len(batch["y"]), 0.0
        for start in range(0, number, rows):
            piece = {name: value[start : start + rows] for name, value in batch.items()}
            losses, _ = loss(model(piece["x"]), piece)
            (losses / number).backward()
            total += losses.item()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        return total / number

    return step


def by_library(model: nn.Module, rows: int) -> Callable[[dict[str, Tensor]], object]:
    return TrainStep(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        loss,
        forward=lambda m, b: m(b["x"]),
        micro_batch_size=rows,
        max_norm=MAX_NORM,
    )


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def rows_for(width: int, depth: int) -> int:
    """Rows per piece that take about `SECONDS_PER_PIECE`."""
    rows = 64
    for _ in range(3):
        step, batch = by_hand(mlp(width, depth), rows), batch_of(rows, width)
        step(batch)
        rows = max(1, round(rows * SECONDS_PER_PIECE / min(seconds(lambda: step(batch)) for _ in range(3))))  # noqa: B023
    return rows


def compare(job: str, width: int, depth: int, rows: int, pairs: int) -> Row:
    # One model for both: two of the same weights differ by some percent in speed alone, by where they lie in memory.
    batch, model = batch_of(rows * PIECES, width), mlp(width, depth)
    steps = (by_hand(model, rows), by_library(model, rows))
    for step in steps * 3:
        step(batch)
    times: list[tuple[float, float]] = []
    for pair in range(pairs):
        order = (0, 1) if pair % 2 == 0 else (1, 0)
        took = {side: seconds(lambda side=side: steps[side](batch)) for side in order}  # type: ignore[misc]
        times.append((took[0], took[1]))
    loop = statistics.median(hand for hand, _ in times)
    extra = bounded([library - hand for hand, library in times])
    return Row(
        job=job,
        pieces=PIECES,
        loop_seconds=loop,
        extra_per_piece=(extra[0] / PIECES, extra[1] / PIECES),
        extra_share=(extra[0] / loop, extra[1] / loop),
        difference=difference(width, depth, rows, batch),
    )


def difference(width: int, depth: int, rows: int, batch: dict[str, Tensor]) -> float:
    """Between the weights of the two after some steps, over the largest."""
    models = mlp(width, depth), mlp(width, depth)
    for step in (by_hand(models[0], rows), by_library(models[1], rows)):
        for _ in range(STEPS):
            step(batch)
    one, other = (torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models)
    return ((one - other).abs().max() / one.abs().max()).item()


def bounded(differences: list[float]) -> tuple[float, float]:
    """Median, and the upper end of its 95 % interval over 2000 resamplings."""
    generator = np.random.default_rng(0)
    drawn = generator.choice(np.array(differences), (2000, len(differences)))
    return statistics.median(differences), float(np.quantile(np.median(drawn, axis=1), 0.95))


def keep_freed_memory() -> None:
    """The two thresholds of ``mallopt`` (malloc.h), where the C library is glibc."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
        ctypes.CDLL(None).mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, at its largest


def main() -> None:
    """Run and print; write the result when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=50)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    rows = [
        compare("tiny", 16, 1, 4, 10 * options.pairs),
        compare("50 ms per piece", 1024, 4, rows_for(1024, 4), options.pairs),
    ]
    for row in rows:
        (extra, most), (share, most_share) = row.extra_per_piece, row.extra_share
        print(f"{row.job}: loop {row.loop_seconds * 1e3:.2f} ms; per piece {extra * 1e6:.1f} µs more", end="")
        print(
            f" (at most {most * 1e6:.1f}), {share:.2%} (at most {most_share:.2%}); weights {row.difference:.1e} apart"
        )
    met = rows[0].extra_per_piece[1] <= ALLOWED_SECONDS and rows[1].extra_share[1] <= ALLOWED_SHARE
    print("Within" if met else "Beyond", "0.2 ms per piece on the tiny model and 1 % at 50 ms per piece.")
    if options.out:
        document: dict[str, Any] = {
            "rows": [asdict(row) for row in rows],
            "met": met,
            "pairs": options.pairs,
            "machine": {"cpus": os.cpu_count(), "load": os.getloadavg(), "platform": platform.platform()},
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
