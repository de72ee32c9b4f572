"""The machine while something is measured: load, stolen time, clocks, versions, switches.

Nothing that tells who or where: no host name, user name or path is read.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import numpy
import psutil
import torch

from microbatch import __version__
from microbatch.curves.profile import Environment

_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_AFFINITY", "KMP_BLOCKTIME", "GOMP_CPU_AFFINITY",
             "OMP_PROC_BIND", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE",
             "ATEN_CPU_CAPABILITY", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_LAUNCH_BLOCKING",
             "NVIDIA_TF32_OVERRIDE", "LD_PRELOAD", "MALLOC_CONF")  # fmt: skip
"""Switches that change speed, recorded when set. LD_PRELOAD is reduced to library names (tcmalloc, jemalloc)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuTimes:
    """Seconds since the machine started, summed over its cores, and this process's own share of them."""

    busy: float
    steal: float
    total: float
    own: float


class LoadWatch:
    """Watches the machine from `start` to `stop`.

    >>> watch = LoadWatch("cpu")
    >>> watch.start()
    >>> environment = watch.stop()
    """

    def __init__(self, device: torch.device | str = "cpu", *, settings: dict[str, str] | None = None) -> None:
        """
        Args:
            device: where the work runs.
            settings: switches of the run that only the caller knows, as in ``{"torch.compile": "on"}``.
        """
        self._device = torch.device(device)
        self._settings = dict(settings or {})
        self._clocks: list[float] = []
        self._throttled: bool | None = None
        self._load_before: float | None = None
        self._times = read_cpu_times()

    def start(self) -> None:
        """Forget what was seen and begin."""
        self._clocks, self._throttled = [], None
        self._load_before = _load()
        self._times = read_cpu_times()
        self.sample()

    def sample(self) -> None:
        """Note clock and throttling now; call it between rounds, not while something is timed."""
        clock = _clock(self._device)
        if clock is not None:
            self._clocks.append(clock)
        throttled = _throttled(self._device)
        if throttled is not None:
            self._throttled = throttled or bool(self._throttled)

    def stop(self) -> Environment:
        """What was seen since `start`."""
        self.sample()
        elsewhere, steal = shares(self._times, read_cpu_times())
        return Environment(
            device=device_name(self._device),
            threads=torch.get_num_threads(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            memory_bytes=_memory_bytes(self._device),
            load_before=self._load_before,
            load_after=_load(),
            busy_elsewhere=elsewhere,
            steal=steal,
            clock_hz=tuple(self._clocks),
            throttled=self._throttled,
            versions=versions(),
            settings=_environment_settings() | self._settings,
        )


def read_cpu_times() -> CpuTimes:
    """The counters now."""
    times = psutil.cpu_times()
    steal = getattr(times, "steal", 0.0)
    # guest time is part of user time already (proc(5)), so it is left out of both sums
    busy = times.user + times.system + getattr(times, "nice", 0.0)
    busy += getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0)
    total = busy + times.idle + getattr(times, "iowait", 0.0) + steal
    own = psutil.Process().cpu_times()
    return CpuTimes(busy=busy, steal=steal, total=total, own=own.user + own.system)


def shares(before: CpuTimes, after: CpuTimes) -> tuple[float | None, float | None]:
    """Shares of the machine's CPU time between two readings: used by other processes, and stolen.

    None for a span below the counters' resolution (0.01 s per core).
    """
    span = after.total - before.total
    if span < 0.05:
        return None, None
    elsewhere = (after.busy - before.busy) - (after.own - before.own)
    return max(0.0, elsewhere / span), max(0.0, (after.steal - before.steal) / span)


def device_name(device: torch.device | str) -> str:
    """Name of the processor or accelerator, as in ``Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz``."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _processor_name(_read("/proc/cpuinfo")) or platform.processor() or platform.machine()


def _processor_name(cpuinfo: str) -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return match[1].strip() if match else ""


def versions() -> dict[str, str]:
    """Versions of what decides speed: Python, torch, numpy, microbatch, and the math libraries torch was built with."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": numpy.__version__}
    found["microbatch"] = __version__
    return found | _libraries(torch.__config__.show()) | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def _libraries(config: str) -> dict[str, str]:
    patterns = {
        "mkl": r"Math Kernel Library Version (\d[\d.]*)",
        "onednn": r"(?:MKL-DNN|oneDNN) v?(\S+)",
        "openmp": r"OpenMP (\d+)",
        "capability": r"CPU capability usage: (\S+)",
    }
    matches = {name: re.search(pattern, config) for name, pattern in patterns.items()}
    return {name: match[1] for name, match in matches.items() if match}


def _environment_settings() -> dict[str, str]:
    found = {name: os.environ[name] for name in _SETTINGS if os.environ.get(name)}
    if "LD_PRELOAD" in found:
        found["LD_PRELOAD"] = " ".join(Path(part).name for part in re.split(r"[\s:]+", found["LD_PRELOAD"]))
    return found


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total


def _clock(device: torch.device) -> float | None:
    """Hz now; None where neither the system nor the driver tells."""
    try:
        if device.type == "cuda":
            return torch.cuda.clock_rate(device) * 1e6  # needs the driver's management library
        frequency = psutil.cpu_freq()
        return frequency.current * 1e6 if frequency and frequency.current else None
    except Exception:  # a machine that hides its clocks fails in many ways; a missing clock must not end a run
        return None


def _throttled(device: torch.device) -> bool | None:
    """Whether the device slows itself down for heat or power, where it can be asked."""
    if device.type != "cuda":
        return None
    try:
        import pynvml  # type: ignore[import-not-found, unused-ignore]

        handle = torch.cuda._get_pynvml_handler(device)
        reasons: int = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    except Exception:  # the management library is optional, and old drivers lack the call
        return None
    # NVML: SwPowerCap 0x4, HwSlowdown 0x8, SwThermal 0x20, HwThermal 0x40, HwPowerBrake 0x80
    return bool(reasons & (0x4 | 0x8 | 0x20 | 0x40 | 0x80))


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
