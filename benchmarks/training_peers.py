"""Steps in micro-batches beside a loop by hand, Accelerate, Lightning and HF Trainer, in one run.

    PYTHONPATH=src:. python benchmarks/training_peers.py --out benchmarks/results/training_peers.json
    python -m scripts.compare_training      # writes docs/compare-training.md from it

Four questions, each to every way of `peer_loops`:

- gradients: the first update's, of 64 sequences in 8 pieces, against one pass over the whole batch in float64;
- out_of_memory: memory holds 8 rows a piece, from the 21st piece on only 5. How many rows stand behind each update?
- search: one batch of 128, memory for 20. Passes and failures before the first update, or before the search ends;
- time: a step of the framework and one of the loop by hand, in turn, 50 times (every framework runs in a thread of its
  own that waits for its turn after each update). Medians, and the paired difference with its upper 95 % bound.

Gradients, rows and passes do not depend on the machine; times do. The loop by hand is exact and does nothing else.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.composer_peer import FOLDER
from benchmarks.peer_job import Memory, Run, error, full_batch_gradients, sequences
from benchmarks.peer_loops import HAND, LOOPS, RECOVERING, SEARCHES, Loop, by_hand, prepare
from benchmarks.training_step import bounded, keep_freed_memory

ROWS, PIECES, LONGEST = 8, 8, 64
SECONDS_PER_PIECE, WIDE = 0.05, 1024
WARM_UP = 3
PARTS = ("gradients", "out_of_memory", "search", "time")

Row = dict[str, Any]


def gradients() -> list[Row]:
    """Errors by precision and by the order of the data."""
    rows = []
    for name, loop in LOOPS.items():
        row: Row = {"name": name}
        for precision, dtype in (("float64", torch.float64), ("float32", torch.float32)):
            for order in ("as drawn", "sorted"):
                batch = sequences(ROWS * PIECES, LONGEST, in_order=order == "sorted")
                run = Run(ROWS, PIECES, 1, batch, dtype=dtype)
                loop(run)
                row[f"{precision}, {order}"] = error(run.watch.gradients, full_batch_gradients(run))
        rows.append(row)
    return rows


def out_of_memory() -> list[Row]:
    """Rows behind each of five updates of 64 when memory shrinks in the third."""
    rows = []
    for name, loop in RECOVERING.items():
        run = Run(ROWS, PIECES, 5, _batch(), memory=Memory(rows=5, after=20))
        died = _error_of(loop, run)
        rows.append({"name": name, "samples": run.watch.samples, "failures": run.memory.failures, "died": died})
    return rows


def search() -> list[Row]:
    """From 128 to a true limit of 20."""
    rows = []
    for name, loop in SEARCHES.items():
        run = Run(128, 1, 3, sequences(128, LONGEST, in_order=False), memory=Memory(rows=20))
        died = _error_of(loop, run)
        passes, failures = run.watch.before or (run.memory.passes, run.memory.failures)
        found = {"size": run.watch.size, "samples": run.watch.samples[:1]}
        rows.append({"name": name, "passes": passes, "failures": failures, "died": died, **found})
    return rows


def _batch() -> dict[str, torch.Tensor]:
    return sequences(ROWS * PIECES, LONGEST, in_order=False)


def _error_of(loop: Loop, run: Run) -> str | None:
    try:
        loop(run)
    except Exception as error:
        return f"{type(error).__name__}: {error}".split("\n")[0][:160]
    return None


class Turns(threading.Thread):
    """A training that takes one step each time it is told to."""

    def __init__(self, loop: Loop, run: Run) -> None:
        super().__init__(daemon=True)
        self._loop, self._run, self._left = loop, run, run.steps
        self._go, self._done = threading.Event(), threading.Event()
        self._failed: BaseException | None = None
        run.watch.after_step = self._after_step
        self.start()

    def step(self) -> float:
        """Seconds from the word to the end of the update."""
        self._done.clear()
        start = time.perf_counter()
        self._go.set()
        self._done.wait()
        seconds = time.perf_counter() - start
        if self._failed is not None:
            raise self._failed
        return seconds

    def run(self) -> None:
        torch.set_num_threads(1)
        self._wait()
        try:
            self._loop(self._run)
        except BaseException as error:
            self._failed = error
            self._done.set()

    def _after_step(self) -> None:
        self._left -= 1
        self._done.set()
        if self._left:
            self._wait()

    def _wait(self) -> None:
        self._go.wait()
        self._go.clear()


@dataclass(frozen=True)
class Size:
    """A model and its sequences: tiny, or so large that a piece takes `SECONDS_PER_PIECE`."""

    name: str
    width: int
    longest: int


def large() -> Size:
    longest = LONGEST
    for _ in range(3):
        longest = max(4, round(longest * SECONDS_PER_PIECE / _piece_seconds(longest)))
    return Size("50 ms per piece", WIDE, longest)


def _piece_seconds(longest: int) -> float:
    run, ends = Run(ROWS, 1, 5, sequences(ROWS, longest, in_order=False), width=WIDE), list[float]()
    run.watch.after_step = lambda: ends.append(time.perf_counter())
    by_hand(run)
    return min(after - before for before, after in pairwise(ends))


def times(pairs: int) -> list[Row]:
    """Each way and the loop by hand in turn, on a tiny model and at 50 ms per piece."""
    rows = []
    for size in (Size("tiny", 16, LONGEST), large()):
        for name, loop in LOOPS.items():
            if name != HAND:
                rows.append({"job": size.name, "name": name, **_paired(loop, size, pairs)})
                print(f"  {size.name}, {name}: {rows[-1]['step_over_hand']:.3f}", flush=True)
    return rows


def _paired(loop: Loop, size: Size, pairs: int) -> Row:
    steps = pairs + WARM_UP
    batch = sequences(ROWS * PIECES, size.longest, in_order=False)
    hand, other = (Turns(one, Run(ROWS, PIECES, steps, batch, width=size.width)) for one in (by_hand, loop))
    taken: list[tuple[float, float]] = []
    for pair in range(steps):
        if pair % 2:
            second, first = other.step(), hand.step()
        else:
            first, second = hand.step(), other.step()
        taken.append((first, second))
    for thread in (hand, other):
        thread.join(60)
    kept = taken[WARM_UP:]
    base = statistics.median(first for first, _ in kept)
    extra, most = bounded([second - first for first, second in kept])
    return {
        "hand_seconds": base,
        "seconds": statistics.median(second for _, second in kept),
        "step_over_hand": statistics.median(second for _, second in kept) / base,
        "extra_per_piece": [extra / PIECES, most / PIECES],
        "pairs": len(kept),
        "raw": [[round(first, 6), round(second, 6)] for first, second in kept],
    }


def versions() -> dict[str, str | None]:
    names = ("torch", "accelerate", "transformers", "pytorch-lightning", "mosaicml")
    return {"python": platform.python_version()} | {name: _version(name) for name in names}


def _version(name: str) -> str | None:
    found = [one.version for one in importlib.metadata.distributions(name=name)]
    found += [one.version for one in importlib.metadata.distributions(name=name, path=[str(FOLDER)])]
    return found[0] if found else None


def main() -> None:
    """Run the parts and print them; write the result when asked, other parts of it as they were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=50)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    prepare()
    keep_freed_memory()
    asked: dict[str, Callable[[], list[Row]]] = {
        "gradients": gradients, "out_of_memory": out_of_memory, "search": search, "time": lambda: times(options.pairs)
    }  # fmt: skip
    document: Row = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    for part in options.parts:
        document[part] = asked[part]()
        print(part)
        for row in document[part]:
            print("  ", {name: value for name, value in row.items() if name != "raw"}, flush=True)
    document["machine"] = {"cpus": os.cpu_count(), "load": os.getloadavg(), "platform": platform.platform()}
    document["versions"] = versions()
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
