"""Claim: peak memory is predicted within 5 % of live tensor bytes, and within 15 % of the process's high-water mark.

    python benchmarks/memory_prediction.py            # every model, both modes; writes results/memory_prediction.json
    python benchmarks/memory_prediction.py --models mlp --modes training --sizes 1 64 --out /tmp/one.json

Each row runs in a fresh process: what glibc keeps of earlier sizes would count otherwise. The high-water mark (VmHWM)
is compared with the resident memory before the model was built (after the imports and one call of a tiny model of the
same kind) plus the predicted bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODELS = {
    "mlp": "mlp:depth=1,width=8",
    "cnn": "cnn:width=8,image=16",
    "transformer": "transformer:depth=1",
    "decoder": "decoder:depth=1,context=8",
}
"""Built-in models, and a tiny one of the same kind that loads the libraries."""
MODES = ("inference", "training")
SIZES = (1, 4, 16, 64)
TENSOR_BAR, PROCESS_BAR = 0.05, 0.15


def main() -> None:
    options = parse()
    if options.child:
        model, mode, size = options.child
        print(json.dumps(measure(model, mode, int(size))))
        return
    rows = []
    for model, mode, size in itertools.product(options.models, options.modes, options.sizes):
        rows.append(in_process(model, mode, size))
        print(as_text(rows[-1]), flush=True)
    worst = {key: max(abs(row[key]) for row in rows) for key in ("tensor_error", "process_error")}
    print(f"worst: tensor bytes {worst['tensor_error']:.1%} (bar 5 %), process {worst['process_error']:.1%} (bar 15 %)")
    options.out.write_text(json.dumps({"environment": environment(), "worst": worst, "rows": rows}, indent=1) + "\n")
    sys.exit(worst["tensor_error"] > TENSOR_BAR or worst["process_error"] > PROCESS_BAR)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "memory_prediction.json")
    parser.add_argument("--child", nargs=3, metavar=("MODEL", "MODE", "SIZE"), help=argparse.SUPPRESS)
    return parser.parse_args()


def in_process(model: str, mode: str, size: int) -> dict[str, Any]:
    """One row, measured in a fresh process with one thread."""
    command = [sys.executable, __file__, "--child", model, mode, str(size)]
    single = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, env=os.environ | single, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def measure(model: str, mode: str, size: int) -> dict[str, Any]:
    """The high-water mark first, since profiler and fake tensors bring memory of their own."""
    with workload(MODELS[model], mode) as tiny:
        tiny.prepare(2)()
    base = status("VmRSS")
    with workload(model, mode) as load:
        step = load.prepare(size)
        for _ in range(3):
            step()
        mark = status("VmHWM")
        predicted, tensors = load.predict_peak(size).peak_bytes, load.measure_peak_bytes(size)
    return {
        "model": model,
        "mode": mode,
        "batch_size": size,
        "predicted_bytes": predicted,
        "measured_tensor_bytes": tensors,
        "tensor_error": predicted / tensors - 1,
        "base_bytes": base,
        "high_water_bytes": mark,
        "process_error": (base + predicted) / mark - 1,
    }


def workload(text: str, mode: str) -> Any:
    from microbatch.models.built_in import build
    from microbatch.profiling.workload import Workload

    loaded = build(text)
    loss = loaded.loss if mode == "training" else None
    return Workload(loaded.model, loaded.args, loaded.kwargs, mode=mode, loss=loss)


def status(name: str) -> int:
    """Bytes of one line of this process's status, as in ``VmHWM:   123456 kB``."""
    match = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise SystemExit(f"this system does not tell {name}")
    return int(match[1]) * 1024


def environment() -> dict[str, Any]:
    import msgspec

    from microbatch.measure.load import LoadWatch

    watch = LoadWatch()
    watch.start()
    found: dict[str, Any] = msgspec.to_builtins(watch.stop())
    return found


def as_text(row: dict[str, Any]) -> str:
    million = {key: row[f"{key}_bytes"] / 1e6 for key in ("predicted", "measured_tensor", "base", "high_water")}
    return (
        f"{row['model']:12} {row['mode']:10} {row['batch_size']:3}  "
        f"predicted {million['predicted']:8.2f} MB  measured {million['measured_tensor']:8.2f} MB "
        f"({row['tensor_error']:+6.2%})  base {million['base']:6.1f} MB  "
        f"high water {million['high_water']:7.1f} MB ({row['process_error']:+6.2%})"
    )


if __name__ == "__main__":
    main()
