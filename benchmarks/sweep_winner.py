"""Does our sweep find as good a batch size as measuring nearly everything, for a quarter of the work?

    python benchmarks/sweep_winner.py [--models mlp cnn transformer decoder] [--out FILE]

Reference: every integer to 32, multiples of 8 and ±1 around multiples of 32 up to 256, 7 interleaved rounds. Each
method names a size; each size is then re-timed against the reference's, 20 pairs in alternating order. Lightning's
finder looks for the largest batch that runs (of a data set of 256 rows; the package, where benchmarks/.envs/lightning
holds it); a doubling sweep times each power of two once and names the one with the most throughput.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from microbatch.curves.objective import smallest_near_best
from microbatch.measure.timer import time_call
from microbatch.models.load import load_model
from microbatch.models.loaded import Loaded
from microbatch.profiling.explain import explain
from microbatch.profiling.sweep import profile
from microbatch.profiling.workload import Workload

sys.path.append(str(Path(__file__).parents[1]))  # run as a file, only its own folder is known
from benchmarks import lightning_finder

TOP, ROUNDS, PAIRS = 256, 7, 20


def reference_sizes() -> list[int]:
    """About a hundred sizes up to 257."""
    around = {32 * k + shift for k in range(2, TOP // 32 + 1) for shift in (-1, 1)}
    return sorted({*range(1, 33), *range(40, TOP + 1, 8), *around})


Samples = dict[int, list[float]]


def timed(work: Workload, sizes: list[int], rounds: int) -> Samples:
    """Seconds by size over interleaved, order-alternating rounds."""
    samples: Samples = {size: [] for size in sizes}
    for turn in range(rounds):
        for size in sizes if turn % 2 == 0 else reversed(sizes):
            step = work.prepare(size)
            step()
            samples[size].append(time_call(step))
    return samples


def least(samples: Samples) -> dict[int, float]:
    """The least seconds of each size."""
    return {size: min(seconds) for size, seconds in samples.items()}


def rows(samples: Samples) -> int:
    """Items in all timed calls."""
    return sum(size * len(seconds) for size, seconds in samples.items())


def best(seconds: dict[int, float]) -> int:
    """The smallest size within 2 % of the best throughput."""
    sizes = np.array(sorted(seconds), dtype=float)
    return int(sizes[smallest_near_best(sizes, np.array([seconds[int(s)] for s in sizes]))])


def highest(seconds: dict[int, float]) -> int:
    """The size with the highest throughput."""
    return max(seconds, key=lambda size: size / seconds[size])


def paired(work: Workload, size: int, other: int) -> dict[str, float]:
    """Throughput of `size` over that of `other`: median and extremes of alternating pairs."""
    steps: dict[int, Callable[[], object]] = {s: work.prepare(s) for s in {size, other}}
    for step in steps.values():
        step()
    ratios = []
    for turn in range(PAIRS):
        order = (size, other) if turn % 2 == 0 else (other, size)
        found = {s: s / time_call(steps[s]) for s in order}
        ratios.append(found[size] / found[other])
    low, median, high = (float(x) for x in np.percentile(ratios, [5, 50, 95]))
    return {"median": median, "low": low, "high": high}


def example_of(loaded: Loaded) -> object:
    return loaded.kwargs or loaded.args


def lightning_winners(loaded: Loaded) -> dict[str, int]:
    """What Lightning's finder names in both of its modes; by its rule where the package is not installed."""
    if not lightning_finder.is_installed():
        return {"Lightning's finder (its rule)": TOP}
    return {f"Lightning's finder, {mode}": lightning_finder.find(loaded, TOP, mode) for mode in ("power", "binsearch")}


def one_model(name: str) -> dict[str, object]:
    """Every method on one model."""
    loaded = load_model(name)
    start = time.perf_counter()
    measured = profile(loaded.model, example_of(loaded), max_batch_size=TOP, name=name)
    ours = explain(measured).recommended.batch_size
    ours_wall = time.perf_counter() - start
    with Workload(loaded.model, loaded.args, loaded.kwargs) as work:
        start = time.perf_counter()
        reference = timed(work, reference_sizes(), ROUNDS)
        seconds, reference_wall = least(reference), time.perf_counter() - start
        doubling = timed(work, [2**k for k in range(9)], 1)
        winners = {
            "ours": ours,
            "reference, smallest within 2 %": best(seconds),
            "reference, highest": highest(seconds),
            "doubling sweep": highest(least(doubling)),
            **lightning_winners(loaded),
        }
        against = winners["reference, highest"]
        ratios = {method: paired(work, size, against) for method, size in winners.items()}
        same_rule = paired(work, ours, winners["reference, smallest within 2 %"])
    return {
        "model": name,
        "winners": winners,
        "throughput over the reference's highest": ratios,
        "ours over the reference's smallest within 2 %": same_rule,
        "timed_rows": {"ours": measured.timed_rows, "reference": rows(reference), "doubling": rows(doubling)},
        "share_of_rows": measured.timed_rows / rows(reference),
        "wall_seconds": {"ours": ours_wall, "reference": reference_wall},
        "samples": {"ours": {p.batch_size: p.samples for p in measured.points}, "reference": reference},
    }


def main() -> None:
    """Run and print; write the result when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn", "transformer", "decoder"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    models = [one_model(name) for name in options.models]
    result = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "load_before": load_before,
        "models": models,
        "load_after": os.getloadavg()[0],
    }
    print(json.dumps({**result, "models": [_without_samples(model) for model in models]}, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result) + "\n")


def _without_samples(model: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in model.items() if key != "samples"}


if __name__ == "__main__":
    main()
