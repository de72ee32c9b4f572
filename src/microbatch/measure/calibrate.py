"""This machine as a `DeviceSpec`: its rates, and the constants of the time model, from small measurements of torch.

Nothing is taken from a model: each figure comes from a few operators of shapes chosen for it, and says which.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import torch

from microbatch.curves.profile import Environment
from microbatch.errors import InvalidSettings, TooNoisy
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.measure import calibrate_cpu, calibrate_cuda
from microbatch.measure.findings import Findings
from microbatch.measure.load import LoadWatch, device_name
from microbatch.measure.peaks import cache_bytes, cache_levels, measure_peaks
from microbatch.units import format_bytes, format_rate

DTYPES = {"cpu": ("fp32", "bf16", "fp16", "fp64"), "cuda": ("fp32", "tf32", "fp16", "bf16", "fp64")}
BUDGET = 50.0
TOO_BUSY = 0.6, 0.1
"""Cores, and share of all cores, that other processes may use beyond those left free. From the larger of the two on
the figures say nothing about the machine: its threads wait for each other at every barrier, up to 64 ms each time."""
PEAKS_SHARE = 0.25
"""Of the budget for the rates of products; the rest is for the constants."""

Progress = Callable[[float, str], None]


def measure_device(
    device: torch.device | str = "cpu",
    *,
    threads: int | None = None,
    budget: float = BUDGET,
    name: str | None = None,
    progress: Progress | None = None,
) -> tuple[DeviceSpec, tuple[str, ...]]:
    """The machine's figures, and sentences that its user must know, as that it was busy.

    Args:
        device: cpu or a CUDA device.
        threads: of torch; by default as many as it would take.
        budget: seconds that the measurement may take, about.
        name: of the device; by default its processor's, lower case with dashes.
        progress: called with the share done and what is being measured.

    Raises:
        InvalidSettings: an unknown device, threads below 1, or a budget that is not above zero.
        TooNoisy: other processes needed cores that the measurement used.
    """
    device = _checked(device, threads, budget)
    say = progress or _silent
    watch = LoadWatch(device)
    with _threads(threads), torch.no_grad():
        watch.start()
        found = Findings(conditions=_conditions(device))
        _rates(found, device, budget * PEAKS_SHARE, say)
        find_constants = calibrate_cuda.find_constants if device.type == "cuda" else calibrate_cpu.find_constants
        for done, what in find_constants(found, device, budget * (1 - PEAKS_SHARE)):
            say(PEAKS_SHARE + done * (1 - PEAKS_SHARE), what)
        environment = watch.stop()
        busy = _bearable(environment)
        _plain_figures(found, device)
    found.sources = {key: f"{source}; other processes {busy:.0%} of the cores" for key, source in found.sources.items()}
    return _spec(found, device, name or slug(device_name(device))), tuple(_warnings(busy, environment.steal or 0.0))


def _bearable(environment: Environment) -> float:
    """Share of the cores that other processes used."""
    share, cores = environment.busy_elsewhere or 0.0, environment.cores or 1
    free = max(0, cores - (environment.threads or cores))
    if share * cores - free > max(TOO_BUSY[0], TOO_BUSY[1] * cores):
        raise TooNoisy(
            f"Other processes used {share:.0%} of the cores while this machine was measured.", "Measure it alone."
        )
    return share


def slug(text: str) -> str:
    """``"AMD EPYC 7763 64-Core Processor"`` → ``amd-epyc-7763-64-core-processor``."""
    return "-".join(re.findall(r"[a-z0-9]+", text.lower().replace("(r)", "").replace("(tm)", ""))) or "this-machine"


def _checked(device: torch.device | str, threads: int | None, budget: float) -> torch.device:
    if threads is not None and threads < 1:
        raise InvalidSettings(f"{threads} threads cannot run anything.", "Give 1 or more.")
    if not budget > 0:
        raise InvalidSettings(f"A budget of {budget} seconds is not above zero.", "Give at least a few seconds.")
    kind = str(device).partition(":")[0]
    if kind not in DTYPES or (kind == "cuda" and not torch.cuda.is_available()):
        raise InvalidSettings(f"There is no {kind} device here to measure.", "Measure cpu.")
    return torch.device(device)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _conditions(device: torch.device) -> str:
    day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    where = "" if device.type == "cuda" else f", {torch.get_num_threads()} threads"
    return f"measured {day}{where}, torch {torch.__version__}"


def _rates(found: Findings, device: torch.device, seconds: float, say: Progress) -> None:
    """GEMM peaks by dtype, and the bandwidth, see `microbatch.measure.peaks`."""
    dtypes = DTYPES[device.type]
    for number, dtype in enumerate(dtypes):
        say(PEAKS_SHARE * number / len(dtypes), f"products in {dtype}")
        peaks = measure_peaks(dtype, device, seconds=seconds / (len(dtypes) + 1), again=True)
        if peaks.flops:
            found.add(f"flops.{dtype}", peaks.flops, "best of square matrix products" + _one_thread(dtype, device))
        if dtype == dtypes[0] and peaks.bandwidth:
            how = "streaming: the better of a sum and a Linear at batch 1 to 8 over weights larger than the caches"
            found.add("bandwidth", peaks.bandwidth, how)


def _one_thread(dtype: str, device: torch.device) -> str:
    """The same rate with a single thread, for the source."""
    if device.type == "cuda" or torch.get_num_threads() == 1:
        return ""
    with _threads(1):
        flops = measure_peaks(dtype, device, seconds=0.2).flops
    return f" (with 1 thread {format_rate(flops, 'FLOP')})" if flops else ""


def _silent(_: float, __: str) -> None:
    """Nobody wants to know."""


def _plain_figures(found: Findings, device: torch.device) -> None:
    """What the system tells."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found.add("memory_bytes", int(properties.total_memory), "reported by the device")
        found.add("multiprocessors", int(properties.multi_processor_count), "reported by the device")
    else:
        found.add("memory_bytes", int(psutil.virtual_memory().total), "reported by the system")
        found.add("multiprocessors", torch.get_num_threads(), f"threads used, of {psutil.cpu_count()} cores")
    size = cache_bytes(device)
    if size:
        levels = ", ".join(f"L{level} {format_bytes(count)}" for level, count in cache_levels().items())
        found.add("cache_bytes", size, "last level" + ("" if device.type == "cuda" else f" of {levels}"))


def _spec(found: Findings, device: torch.device, name: str) -> DeviceSpec:
    plain = {key: value for key, value in found.values.items() if "." not in key}
    return DeviceSpec(
        name=name,
        kind="cpu" if device.type == "cpu" else "gpu",
        flops=found.table("flops"),
        constants=found.table("constants"),
        sources=found.sources,
        **plain,  # type: ignore[arg-type]
    )


def _warnings(busy: float, steal: float) -> Iterator[str]:
    if busy > 0.1:
        yield f"Other processes used {busy:.0%} of the cores meanwhile: the rates are too low. Measure again alone."
    if steal > 0.05:
        yield f"The hypervisor took {steal:.0%} of the time for other guests: the rates are too low."
