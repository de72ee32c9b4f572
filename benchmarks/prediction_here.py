"""Is a curve predicted from `devices --measure` alone the curve that is measured here?

    python benchmarks/prediction_here.py [--device FILE] [--models MODEL ...] [--out FILE]

The machine is measured afresh unless a device file is given. Each model is captured without running it, predicted, and
then measured: its sizes in rounds of alternating order, lower quartile of each. Printed are both times and the error
by size, and each model's median error.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from statistics import median

import torch

from microbatch.batch.example import with_batch_size
from microbatch.capture.work import capture_work
from microbatch.hardware.catalogue import load_device
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.measure.calibrate import measure_device
from microbatch.measure.load import LoadWatch
from microbatch.measure.timer import time_call
from microbatch.models.load import load_model
from microbatch.models.loaded import Loaded
from microbatch.profiling.workload import Workload
from microbatch.roofline.time import time_call as predict_call
from microbatch.work.operators import Work

MODELS = ("mlp", "cnn", "transformer", "decoder", "moe")
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
QUANTILE, FEWEST_ROUNDS = 0.25, 5
LONGEST = 0.04
"""Share of a model's time that one call may take, so that every size gets its rounds."""


def work_of(loaded: Loaded) -> Work:
    """The model's operators as functions of the batch."""

    def example(batch: int, _: int | None) -> tuple[tuple[object, ...], dict[str, object]]:
        return with_batch_size(loaded.args, loaded.kwargs, batch)

    return capture_work(loaded.model, example, name=loaded.name, unit=loaded.unit)


def measured_seconds(loaded: Loaded, sizes: tuple[int, ...], budget: float) -> dict[int, float]:
    """Lower quartile of each size's times over interleaved rounds."""
    samples: dict[int, list[float]] = {size: [] for size in sizes}
    with Workload(loaded.model, loaded.args, loaded.kwargs) as workload:
        end, turn = time.perf_counter() + budget, 0
        while turn < FEWEST_ROUNDS or time.perf_counter() < end:
            for size in sizes if turn % 2 == 0 else reversed(sizes):
                step = workload.prepare(size)
                step()
                samples[size].append(time_call(step))
            turn += 1
    return {size: sorted(times)[int(QUANTILE * len(times))] for size, times in samples.items()}


def one_model(name: str, spec: DeviceSpec, budget: float) -> dict[str, object]:
    """Predicted against measured, printed as it comes."""
    loaded = load_model(name)
    work = work_of(loaded)
    predicted = {size: predict_call(work, spec, batch=size).seconds for size in SIZES}
    watch = LoadWatch()
    watch.start()
    sizes = tuple(size for size in SIZES if predicted[size] <= LONGEST * budget)
    measured = measured_seconds(loaded, sizes, budget)
    busy = watch.stop().busy_elsewhere or 0.0
    errors = {size: predicted[size] / measured[size] - 1 for size in sizes}
    print(f"\n{name}: median error {median(map(abs, errors.values())):.1%} (others used {busy:.0%} of the cores)")
    for size in sizes:
        print(f"  {size:5d} {measured[size] * 1e3:9.3f} ms {predicted[size] * 1e3:9.3f} ms {errors[size]:+7.1%}")
    return {
        "model": name,
        "median_error": median(map(abs, errors.values())),
        "busy_elsewhere": busy,
        "sizes": sizes,
        "measured": [measured[size] for size in sizes],
        "predicted": [predicted[size] for size in sizes],
    }


def main() -> None:
    """Run and print; write the result when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=Path, help="a file of devices --measure, instead of measuring now")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=15.0, help="for each model")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    spec = load_device(options.device) if options.device else measure_device()[0]
    result = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "device": spec.to_json(),
        "load_before": load_before,
        "models": [one_model(name, spec, options.seconds) for name in options.models],
        "load_after": os.getloadavg()[0],
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
