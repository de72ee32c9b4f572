"""What only a GPU can check, as one command: ``PYTHONPATH=src python benchmarks/gpu_check.py``.

Needs torch and numpy; a row whose further needs are not installed is skipped and says so. Writes
``benchmarks/results/gpu/<device>.json``. Exit status: 0 all rows passed or skipped, 1 a row failed, 3 no GPU here.
``--device cpu`` runs the same rows with tiny sizes, to try the script itself.

To add a row, write a function from `Setting` to what it found and put it into `ROWS`. It raises `AssertionError` when
the check fails and `Skipped` when it cannot be made here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "gpu"
GEMM = (4096, 22016)
"""K×N of the published tables: the up-projection of a 7B language model."""


@dataclass(frozen=True)
class Setting:
    """Where the rows run; `tiny` shrinks every size for a CPU."""

    device: str
    tiny: bool

    def size(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full

    @property
    def slack(self) -> float:
        """How much further a time may be off on a CPU that others use too."""
        return 2.0 if self.tiny else 1.0


class Skipped(Exception):
    """The row cannot be made here; the text says why."""


@dataclass(frozen=True)
class Outcome:
    """What one row found."""

    row: str
    status: str
    seconds: float
    found: dict[str, Any]
    reason: str = ""


def device_figures(setting: Setting) -> dict[str, Any]:
    """What the device says of itself, and whether the catalogue agrees."""
    import torch

    from microbatch.hardware.catalogue import load_device

    if setting.device == "cpu":
        return {"torch": torch.__version__, "threads": torch.get_num_threads()}
    seen = torch.cuda.get_device_properties(setting.device)
    found = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "multiprocessors": seen.multi_processor_count,
        "memory_bytes": seen.total_memory,
        "cache_bytes": getattr(seen, "L2_cache_size", None),
        "capability": f"{seen.major}.{seen.minor}",
    }
    name = catalogue_name(seen.name)
    if name is None:
        return found | {"catalogue": None}
    spec = load_device(name)
    assert spec.multiprocessors in (None, seen.multi_processor_count), (
        f"{name} lists {spec.multiprocessors} SMs: {found}"
    )
    if spec.memory_bytes:
        share = seen.total_memory / spec.memory_bytes
        assert 0.97 <= share <= 1.1, f"{name} lists {spec.memory_bytes} bytes, torch sees {share:.3f} of that"
    return found | {"catalogue": name}


def catalogue_name(reported: str) -> str | None:
    """``NVIDIA H100 80GB HBM3`` → ``h100-sxm``; None when no entry, or more than one, can be meant."""
    from microbatch.hardware.catalogue import device_names

    words = re.findall(r"[a-z0-9]+", reported.lower())
    kind = "pcie" if "pcie" in words else "nvl" if "nvl" in words else "sxm"
    names = [name for name in device_names() if name.removeprefix("rtx-").split("-")[0] in words]
    exact = [name for name in names if not {"sxm", "pcie", "nvl"} & set(name.split("-")) or kind in name.split("-")]
    memory = [name for name in exact if any(word.endswith("gb") and word in name.split("-") for word in words)]
    chosen = memory or exact
    return chosen[0] if len(chosen) == 1 else None


def timer(setting: Setting) -> dict[str, Any]:
    """Events agree with the wall clock, and twice the work takes twice as long."""
    import torch

    from microbatch.measure.timer import synchronize, time_call, warm_up

    n = setting.size(4096, 256)
    matrix = torch.randn(n, n, device=setting.device)

    def once() -> object:
        return matrix @ matrix

    def twice() -> object:
        return (matrix @ matrix, matrix @ matrix)

    warm_up(once, setting.device)
    warm_up(twice, setting.device)
    pairs = [(time_call(once, setting.device), time_call(twice, setting.device)) for _ in range(15)]
    one, two = (min(times) for times in zip(*pairs))
    synchronize(setting.device)
    start = time.perf_counter()
    for _ in range(20):
        once()
    synchronize(setting.device)
    wall = (time.perf_counter() - start) / 20
    assert one <= 1.15 * wall, f"{one} s by the timer, {wall} s by the wall clock"
    assert 1.5 / setting.slack <= two / one <= 2.7 * setting.slack, (
        f"twice the work takes {two / one:.2f} times as long"
    )
    return {"seconds": one, "wall_seconds": wall, "twice": two / one}


def update_apart(setting: Setting) -> dict[str, Any]:
    """The optimizer's update, timed inside of a training step, takes as long as the same update by itself."""
    from statistics import median

    import torch

    from microbatch.measure.timer import time_call
    from microbatch.profiling.workload import Workload

    width = setting.size(4096, 64)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
    with Workload(model, (torch.randn(8, width),), mode="training", device=setting.device) as workload:
        step = workload.prepare(8)
        pairs = [(time_call(step, setting.device), workload.update_seconds or 0.0) for _ in range(17)][2:]
    whole, update = (median(times) for times in zip(*pairs))
    model.to(setting.device)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    alone = median([time_call(optimizer.step, setting.device) for _ in range(17)][2:])
    assert 0 < update < whole, f"{update} s of a step of {whole} s"
    assert 0.5 / setting.slack <= update / alone <= 2 * setting.slack, f"{update} s in a step, {alone} s alone"
    return {"step_seconds": whole, "update_seconds": update, "alone_seconds": alone}


def peaks(setting: Setting) -> dict[str, Any]:
    """Measured FLOP/s and byte/s lie within what the datasheet allows."""
    import torch

    from microbatch.hardware.catalogue import load_device
    from microbatch.measure.peaks import measure_peaks

    name = None if setting.device == "cpu" else catalogue_name(torch.cuda.get_device_name(setting.device))
    spec = load_device(name) if name else None
    found: dict[str, Any] = {}
    for dtype in ("fp32", "bf16"):
        seen = measure_peaks(dtype, setting.device, seconds=setting.size(10, 2) / 10)
        assert seen.flops and seen.bandwidth
        found[dtype] = {"flops": seen.flops, "bandwidth": seen.bandwidth}
        for value, listed in (
            (seen.flops, spec.flops.get(dtype) if spec else None),
            (seen.bandwidth, spec.bandwidth if spec else None),
        ):
            assert listed is None or 0.4 <= value / listed <= 1.1, f"{dtype}: {value:.3g} against {listed:.3g} listed"
    return found


def profiled(model: str, tiny_model: str, dtype: str) -> Callable[[Setting], dict[str, Any]]:
    """A row that sweeps a built-in model and explains its curve."""

    def row(setting: Setting) -> dict[str, Any]:
        from microbatch.errors import TooNoisy
        from microbatch.models.load import load_model
        from microbatch.profiling.explain import explain
        from microbatch.profiling.sweep import profile

        loaded = load_model(tiny_model if setting.tiny else model)
        seen = profile(
            loaded.model,
            loaded.args or loaded.kwargs,
            device=setting.device,
            dtype=dtype,
            budget=setting.size(10, 1),
            max_batch_size=setting.size(4096, 16),
            name=loaded.name,
            unit=loaded.unit,
        )
        try:
            meaning = explain(seen)
        except TooNoisy as error:
            if setting.tiny:  # a busy CPU says nothing about the code; a GPU of one's own must be quiet enough
                raise Skipped(str(error)) from error
            raise
        assert len(seen.points) >= 4, f"only sizes {seen.batch_sizes} were measured"
        assert meaning.recommended.batch_size in seen.batch_sizes
        assert all(sample > 0 for point in seen.points for sample in point.samples)
        return {
            "sizes": len(seen.points),
            "recommended": meaning.recommended.batch_size,
            "throughput": meaning.recommended.throughput,
            "ridge": meaning.ridge.value,
            "bound": meaning.bound,
            "cliffs": [[cliff.batch_size, cliff.excess, cliff.cause] for cliff in meaning.cliffs],
            "noise": meaning.noise,
            "stopped_by": seen.stopped_by,
            "failures": [failure.text[:200] for failure in seen.failures],
            "wall_seconds": seen.wall_seconds,
        }

    return row


def memory(setting: Setting) -> dict[str, Any]:
    """Predicted peak against the allocator's, training with Adam and inference.

    On a GPU libraries keep workspaces of their own (cuBLAS up to some 32 MiB a stream), which no model holds.
    """
    from microbatch.models.load import load_model
    from microbatch.profiling.workload import Workload

    loaded = load_model("mlp:depth=2,width=128" if setting.tiny else "mlp:depth=8,width=4096")
    found: dict[str, Any] = {}
    for mode in ("inference", "training"):
        for size in (1, setting.size(1024, 16)):
            with Workload(loaded.model, loaded.args, loaded.kwargs, mode=mode, device=setting.device) as workload:
                predicted, measured = workload.predict_peak(size).peak_bytes, workload.measure_peak_bytes(size)
            found[f"{mode} {size}"] = {"predicted": predicted, "measured": measured}
            room = 0.05 * measured + (0 if setting.device == "cpu" else 64 * 2**20)
            assert abs(predicted - measured) <= room, f"{mode} at {size}: {predicted} predicted, {measured} measured"
    return found


def out_of_memory(setting: Setting) -> dict[str, Any]:
    """A real allocation failure is known as one, and the device works on after it."""
    import torch

    from microbatch.batch.oom import is_out_of_memory, release

    caught: Exception | None = None
    held: list[torch.Tensor] = []
    # A CPU refuses only what no address space holds; a GPU is filled until it is full.
    piece = 2**50 if setting.device == "cpu" else torch.cuda.get_device_properties(setting.device).total_memory // 5
    try:
        for _ in range(8):
            held.append(torch.empty(piece, dtype=torch.uint8, device=setting.device))
    except (RuntimeError, MemoryError) as error:
        caught = error.with_traceback(None)
    assert caught is not None, "nothing was refused"
    assert is_out_of_memory(caught), f"not seen as out of memory: {caught!r}"
    pieces = len(held)
    held.clear()
    release(setting.device)
    assert float(torch.ones(1024, device=setting.device).sum()) == 1024
    return {"pieces": pieces, "error": repr(caught)[:200]}


def overhead(setting: Setting) -> dict[str, Any]:
    """A planted pause of 5 ms is found as overhead."""
    import torch

    from microbatch.measure.evidence import measure_overhead
    from microbatch.measure.timer import warm_up

    n = setting.size(4096, 256)
    matrix = torch.randn(n, n, device=setting.device)

    def plain() -> object:
        return matrix @ matrix

    def pausing() -> object:
        time.sleep(0.005)
        return matrix @ matrix

    warm_up(plain, setting.device)
    before, after = measure_overhead(plain, setting.device), measure_overhead(pausing, setting.device)
    assert 0.9 * 0.005 <= after - before <= 1.3 * setting.slack * 0.005, (
        f"{before} s before, {after} s with a pause of 0.005 s"
    )
    return {"before": before, "after": after}


def kernels(setting: Setting) -> dict[str, Any]:
    """The profiler names kernels at a small and at a large batch."""
    import torch

    from microbatch.measure.evidence import kernel_names

    k, n = (256, 512) if setting.tiny else GEMM
    dtype = torch.float32 if setting.device == "cpu" else torch.bfloat16
    weight = torch.randn(k, n, device=setting.device, dtype=dtype)
    found = {}
    for batch in (1, setting.size(1024, 32)):
        rows = torch.randn(batch, k, device=setting.device, dtype=dtype)
        names = kernel_names(lambda rows=rows: rows @ weight, setting.device)  # type: ignore[misc]
        if setting.device != "cpu":  # a CPU's library may keep its implementations to itself
            assert names, f"no kernel seen at batch {batch}"
        found[str(batch)] = list(names[:3])
    return found


def wave_edges(setting: Setting) -> dict[str, Any]:
    """Times on both sides of each predicted wave edge, and what the tile arithmetic makes of them."""
    import torch

    from microbatch.hardware.catalogue import load_device
    from microbatch.measure.timer import time_call, warm_up
    from microbatch.roofline.tiles import explain_jump, predicted_edges

    name = None if setting.device == "cpu" else catalogue_name(torch.cuda.get_device_name(setting.device))
    if name is None or load_device(name).multiprocessors is None:
        raise Skipped("needs a GPU whose multiprocessors the catalogue lists")
    spec, (k, n) = load_device(name), GEMM
    weight = torch.randn(k, n, device=setting.device, dtype=torch.bfloat16)

    def seconds(batch: int) -> float:
        rows = torch.randn(batch, k, device=setting.device, dtype=torch.bfloat16)
        warm_up(lambda: rows @ weight, setting.device)
        return min(time_call(lambda: rows @ weight, setting.device) for _ in range(20))

    found = {}
    for edge in predicted_edges(spec, n, 1100):
        before, after = seconds(edge), seconds(edge + 1)
        jump = explain_jump(
            edge, edge + 1, k=k, n=n, spec=spec, seconds_before=before, seconds_after=after, dtype="bf16"
        )
        found[str(edge)] = {"before": before, "after": after, "explained": jump.sentence if jump else None}
    return found


def resume(setting: Setting) -> dict[str, Any]:
    """A run with dropout, fused Adam and loss scaling goes on from its checkpoint bit for bit."""
    import tempfile

    import torch

    from microbatch.training.step import TrainStep

    if importlib.util.find_spec("safetensors") is None:
        raise Skipped("safetensors is not installed")
    width = setting.size(1024, 16)

    def step_of() -> TrainStep:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(width, width), torch.nn.Dropout(0.1), torch.nn.Linear(width, 1)]
        model = torch.nn.Sequential(*layers).to(setting.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
        scaler = torch.amp.GradScaler(setting.device.split(":")[0], init_scale=1024.0)
        return TrainStep(
            model, optimizer, lambda output, batch: (output.float().square().sum(), len(batch)), scaler=scaler,
            autocast=torch.float16 if not setting.tiny else torch.bfloat16, micro_batch_size=16, noise_scale=True,
        )  # fmt: skip

    def run(step: TrainStep, steps: range) -> list[Any]:
        batches = [torch.randn(64, width, generator=torch.Generator().manual_seed(seed)) for seed in steps]
        results = [step(batch) for batch in batches]
        return [results[-1].noise_scale, *(p.detach().cpu() for p in step.model.parameters())]

    first, second = step_of(), step_of()
    with tempfile.TemporaryDirectory() as folder:
        run(first, range(3))
        first.save(folder)
        expected = run(first, range(3, 6))
        second.load(folder)
        found = run(second, range(3, 6))
    differences = [(a - b).abs().max().item() for a, b in zip(found[1:], expected[1:])]
    assert max(differences) == 0.0, f"weights differ by {differences} after going on"
    assert found[0] == expected[0], f"{found[0]} is not {expected[0]}"
    return {"noise_scale": found[0].to_json() if hasattr(found[0], "to_json") else found[0].value}


Row = Callable[[Setting], dict[str, Any]]


def in_file(name: str) -> Row:
    """The row of that name in ``gpu_<name>.py``: from the device, and whether sizes are tiny, to what it found."""

    def row(setting: Setting) -> dict[str, Any]:
        sys.path.append(str(Path(__file__).parents[1]))  # run as a file, only its own folder is known
        found: dict[str, Any] = getattr(importlib.import_module(f"benchmarks.gpu_{name}"), name)(
            setting.device, tiny=setting.tiny
        )
        return found

    return row


ROWS: dict[str, Row] = {
    "device": device_figures,
    "timer": timer,
    "update": update_apart,
    "peaks": peaks,
    "profile mlp fp32": profiled("mlp:depth=8,width=1024", "mlp:depth=2,width=32", "fp32"),
    "profile mlp bf16": profiled("mlp:depth=8,width=1024", "mlp:depth=2,width=32", "bf16"),
    "profile cnn fp32": profiled("cnn", "cnn", "fp32"),
    "profile cnn bf16": profiled("cnn", "cnn", "bf16"),
    "memory": memory,
    "out of memory": out_of_memory,
    "overhead": overhead,
    "kernels": kernels,
    "wave edges": wave_edges,
    "resume": resume,
    "serving": in_file("serving"),
    "sentences": in_file("sentences"),
    "whole batch": in_file("whole_batch"),
    "offline": in_file("offline"),
    "pipeline": in_file("pipeline"),
    "generation": in_file("generation"),
}


def run(name: str, row: Row, setting: Setting) -> Outcome:
    """One row, whatever it raises."""
    start = time.perf_counter()
    status, found, reason = "passed", {}, ""
    try:
        found = row(setting)
    except Skipped as why:
        status, reason = "skipped", str(why)
    except ModuleNotFoundError as missing:
        inside = (missing.name or "").split(".")[0] == "microbatch"
        status, reason = ("failed" if inside else "skipped"), f"{missing.name} is not installed here"
    except Exception as error:
        status, reason = "failed", f"{type(error).__name__}: {error}"
        traceback.print_exc()
    return Outcome(row=name, status=status, seconds=time.perf_counter() - start, found=found, reason=reason)


def main(arguments: list[str] | None = None) -> int:
    """Runs the rows, prints one line for each, writes the file; returns the exit status."""
    options = _options(arguments)
    import torch

    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("There is no CUDA device here. --device cpu tries the script itself with tiny sizes.")
        return 3
    setting = Setting(device=options.device, tiny=options.device == "cpu")
    device = "cpu" if setting.tiny else torch.cuda.get_device_name(options.device)
    outcomes = []
    for name, row in ROWS.items():
        if options.only in (None, name):
            outcomes.append(run(name, row, setting))
            print(f"{outcomes[-1].status:8}{name:18}{outcomes[-1].seconds:7.1f} s  {outcomes[-1].reason}", flush=True)
    path = options.out / f"{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"device": device, "torch": torch.__version__, "rows": [asdict(outcome) for outcome in outcomes]}
    path.write_text(json.dumps(document, indent=1, default=str) + "\n", encoding="utf-8")
    print(f"{device}: written to {path}")
    return int(any(outcome.status == "failed" for outcome in outcomes))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu to try the script with tiny sizes")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON file")
    parser.add_argument("--only", choices=list(ROWS), help="one row")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
