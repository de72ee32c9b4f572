"""A size against itself: how often does it win?

    python benchmarks/against_itself.py [--tries 100] [--out benchmarks/results/against_itself.json]

Each try times the built-in MLP at four sizes under two names, interleaved in alternating order, and compares the two
as `microbatch compare` would. A regression or an improvement is a false alarm.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path

import torch

from microbatch.curves.profile import Point, Profile
from microbatch.measure.timer import time_call
from microbatch.models.load import load_model
from microbatch.profiling.compare import compare
from microbatch.profiling.workload import Workload

SIZES, ROUNDS = (8, 16, 32, 64), 7


def one_try(work: Workload) -> bool:
    """Whether anything is said to have changed."""
    samples: dict[tuple[str, int], list[float]] = {(name, size): [] for name in "AB" for size in SIZES}
    times: dict[tuple[str, int], list[float]] = {key: [] for key in samples}
    steps = {key: work.prepare(key[1]) for key in samples}
    for turn in range(ROUNDS):
        keys = list(samples)
        for key in keys if turn % 2 == 0 else reversed(keys):
            steps[key]()
            samples[key].append(time_call(steps[key]))
            times[key].append(time.perf_counter())
    first, second = (
        Profile(
            points=tuple(
                Point(
                    batch_size=size,
                    samples=tuple(samples[name, size]),
                    rounds=tuple(range(ROUNDS)),
                    times=tuple(times[name, size]),
                )
                for size in SIZES
            )
        )
        for name in "AB"
    )
    result = compare(first, second)
    return bool(result.regressions or result.improvements)


def main() -> None:
    """Run and print; write the result when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=100)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    loaded = load_model("mlp")
    before = os.getloadavg()[0]
    with Workload(loaded.model, loaded.args, loaded.kwargs) as work:
        alarms = sum(one_try(work) for _ in range(options.tries))
    result = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "load_before": before,
        "load_after": os.getloadavg()[0],
        "tries": options.tries,
        "false_alarms": alarms,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
