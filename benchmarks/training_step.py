"""What does a training step cost above a loop written by hand that is as exact?

    python benchmarks/training_step.py [--pairs 120] [--out benchmarks/results/training_step.json]

The loop knows the weight of the whole batch beforehand and divides each piece's sum by it. Loop and `TrainStep` run in
alternating pairs, one thread, the same pieces, clipping included. glibc is told to keep freed memory: whether a free
of a few megabytes goes back to the system, to be faulted in again, depends on the accidental layout of the heap, and
costs either side up to 3 % (counted: 0 to 9000 page faults per step of the same code). Where the heap places tensors is
shuffled before every step: two loops of the same code differ by up to 5 % all the time if it is not (ten layouts: -4.6
to +4.6 %). The row "the loop itself" pairs the loop with itself and shows what the method can tell apart.

On a shared machine one step of 400 ms varies by 8 % (one standard deviation of a pair's difference), and hundreds of
pairs leave the median uncertain by half a percent. So each step also says how much of it was spent outside of the
model, the loss, the backward pass and the optimizer's step: there the two differ, and there noise is small.

Two jobs: a tiny model, where every microsecond shows, and a model with about 50 ms per piece. Each row gives the
median difference over the pairs and a bootstrapped upper 95 % bound of it.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import platform
import random
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

PIECES, CLASSES, MAX_NORM, WARM_PAIRS = 8, 10, 1.0, 5
SECONDS_PER_PIECE = 0.05
STEPS = 10
"""After which the weights of both are compared."""
ALLOWED_SECONDS, ALLOWED_SHARE = 0.2e-3, 0.01


class Inside:
    """Seconds spent in what a step has to call: the model, the loss, backward and the optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.seconds = self._began = 0.0
        model.register_forward_pre_hook(lambda *_: self._begins())
        model.register_forward_hook(lambda *_: self._ends())
        self._backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def __enter__(self) -> None:
        torch.autograd._engine_run_backward = self.timed(self._backward)  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        torch.autograd._engine_run_backward = self._backward  # type: ignore[attr-defined]

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def inner(*arguments: Any, **keywords: Any) -> Any:
            self._begins()
            try:
                return call(*arguments, **keywords)
            finally:
                self._ends()

        return inner

    def _begins(self) -> None:
        self._began = time.perf_counter()

    def _ends(self) -> None:
        self.seconds += time.perf_counter() - self._began


Maker = Callable[[nn.Module, int, Inside], Callable[[dict[str, Tensor]], object]]


class Heap:
    """Tensors that come and go, so that those of the next step lie elsewhere."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._held: list[Tensor] = []

    def shuffle(self) -> None:
        self._held += [torch.empty(self._rng.randrange(1, 1 << 20)) for _ in range(8)]
        self._held = self._rng.sample(self._held, min(len(self._held), 16))


@dataclass(frozen=True)
class Row:
    """One job.

    Attributes:
        job: its name.
        pieces: micro-batches per step.
        loop_seconds: median time of a step of the loop.
        extra_per_piece: seconds per piece above the loop, and its upper 95 % bound.
        extra_share: the same over the loop's time.
        outside_share: the same, counting only time outside of model, loss, backward and the optimizer's step.
        difference: largest difference of the weights after `STEPS` steps of each, over the largest weight.
    """

    job: str
    pieces: int
    loop_seconds: float
    extra_per_piece: tuple[float, float]
    extra_share: tuple[float, float]
    outside_share: tuple[float, float]
    difference: float


def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return cross_entropy(output, batch["y"], reduction="sum"), batch["y"].numel()


def mlp(width: int, depth: int) -> nn.Module:
    torch.manual_seed(0)
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, CLASSES))


def batch_of(rows: int, width: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, width), "y": torch.randint(CLASSES, (rows,))}


def optimizer_of(model: nn.Module, inside: Inside) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer.step = inside.timed(optimizer.step)  # type: ignore[method-assign]
    return optimizer


def by_hand(model: nn.Module, rows: int, inside: Inside) -> Callable[[dict[str, Tensor]], object]:
    optimizer, timed_loss = optimizer_of(model, inside), inside.timed(loss)

    def step(batch: dict[str, Tensor]) -> float:
        optimizer.zero_grad()
        number, total = len(batch["y"]), 0.0
        for start in range(0, number, rows):
            piece = {name: value[start : start + rows] for name, value in batch.items()}
            losses, _ = timed_loss(model(piece["x"]), piece)
            (losses / number).backward()
            total += losses.item()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        return total / number

    return step


def by_library(model: nn.Module, rows: int, inside: Inside) -> Callable[[dict[str, Tensor]], object]:
    return TrainStep(
        model,
        optimizer_of(model, inside),
        inside.timed(loss),
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
        model = mlp(width, depth)
        step, batch = by_hand(model, rows, Inside(model)), batch_of(rows, width)
        step(batch)
        rows = max(1, round(rows * SECONDS_PER_PIECE / min(seconds(lambda: step(batch)) for _ in range(3))))  # noqa: B023
    return rows


def compare(job: str, make: Maker, width: int, depth: int, rows: int, pairs: int) -> Row:
    # One model for both: two of the same weights differ by some percent in speed alone, by where they lie in memory.
    batch, model = batch_of(rows * PIECES, width), mlp(width, depth)
    inside = Inside(model)
    steps = (by_hand(model, rows, inside), make(model, rows, inside))
    heap = Heap(random.Random(0))
    times: list[tuple[float, float]] = []
    outside: list[tuple[float, float]] = []
    for pair in range(WARM_PAIRS + pairs):
        took, out = {}, {}
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            heap.shuffle()
            inside.seconds = 0.0
            with inside:
                took[side] = seconds(lambda side=side: steps[side](batch))  # type: ignore[misc]
            out[side] = took[side] - inside.seconds
        times.append((took[0], took[1]))
        outside.append((out[0], out[1]))
    del times[:WARM_PAIRS], outside[:WARM_PAIRS]
    loop = statistics.median(hand for hand, _ in times)
    extra, apart = (bounded([library - hand for hand, library in both]) for both in (times, outside))
    return Row(
        job=job,
        pieces=PIECES,
        loop_seconds=loop,
        extra_per_piece=(extra[0] / PIECES, extra[1] / PIECES),
        extra_share=(extra[0] / loop, extra[1] / loop),
        outside_share=(apart[0] / loop, apart[1] / loop),
        difference=difference(make, width, depth, rows, batch),
    )


def difference(make: Maker, width: int, depth: int, rows: int, batch: dict[str, Tensor]) -> float:
    """Between the weights of the two after some steps, over the largest."""
    models = mlp(width, depth), mlp(width, depth)
    for step in (by_hand(models[0], rows, Inside(models[0])), make(models[1], rows, Inside(models[1]))):
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
    parser.add_argument("--pairs", type=int, default=120)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    slow = rows_for(1024, 4)
    rows = [
        compare("tiny", by_library, 16, 1, 4, 10 * options.pairs),
        compare("50 ms per piece", by_library, 1024, 4, slow, options.pairs),
        compare("50 ms per piece, the loop itself", by_hand, 1024, 4, slow, options.pairs // 2),
    ]
    for row in rows:
        (extra, most), (share, most_share) = row.extra_per_piece, row.extra_share
        print(f"{row.job}: loop {row.loop_seconds * 1e3:.2f} ms; per piece {extra * 1e6:.1f} µs more", end="")
        print(f" (at most {most * 1e6:.1f}), {share:.2%} (at most {most_share:.2%}); outside of the model ", end="")
        print(f"{row.outside_share[0]:.2%} (at most {row.outside_share[1]:.2%}); weights {row.difference:.1e} apart")
    tiny, heavy = rows[0], rows[1]
    met = {
        "0.2 ms per piece, tiny": tiny.extra_per_piece[1] <= ALLOWED_SECONDS,
        "1 % at 50 ms per piece, whole steps": heavy.extra_share[1] <= ALLOWED_SHARE,
        "1 % at 50 ms per piece, outside of the model": heavy.outside_share[1] <= ALLOWED_SHARE,
    }
    for bar, holds in met.items():
        print(f"{bar}: {'holds' if holds else 'not shown'}")
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
