"""What this machine can do at most: FLOP/s of a matrix product, byte/s of streamed weights."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import torch
from torch import Tensor
from torch.nn import functional

from microbatch.curves.profile import Peaks
from microbatch.measure.dtypes import precision, torch_dtype
from microbatch.measure.timer import time_call, warm_up

_PRODUCT_SIZES = (256, 512, 1024, 2048, 4096, 8192)
_BATCHES = (1, 2, 4, 8)
_COLUMNS = 4096
_SMALLEST_WEIGHTS = 64 << 20
_LARGEST_WEIGHTS = 512 << 20
_CACHE_FOLDER = Path("/sys/devices/system/cpu/cpu0/cache")

_measured: dict[tuple[str, str, int], Peaks] = {}


def measure_peaks(
    dtype: str, device: torch.device | str = "cpu", *, seconds: float = 1.0, again: bool = False
) -> Peaks:
    """The best rates that were reached here; the same answer for the rest of the process unless asked again.

    FLOP/s: square matrix products of several sizes. byte/s: a linear layer whose weights are far larger than the
    last-level cache at batches 1 to 8, and a plain sum over the same bytes; the best of them, since a roof is wanted
    that no model of the run passes. Both are effective rates, not a datasheet's: on a CPU a datasheet's bandwidth
    puts the ridge 2.5 to 2.7 times too low.

    Args:
        dtype: our spelling, as in ``"bf16"``.
        device: torch's name of a device.
        seconds: how long to measure, about; each kind gets at least two calls.
        again: measure once more and keep the better of both, since a busy moment makes a peak look low.
    """
    key = (dtype, str(device), torch.get_num_threads())
    if key not in _measured or again:
        before = _measured.get(key, Peaks())
        with torch.no_grad(), precision(dtype):
            found = Peaks(
                flops=_best_product(torch_dtype(dtype), device, seconds / 2),
                bandwidth=_best_stream(torch_dtype(dtype), device, seconds / 2),
                source="measured here",
                cache_bytes=cache_bytes(device),
                multiprocessors=_multiprocessors(device),
            )
        _measured[key] = replace(
            found,
            flops=max(found.flops or 0.0, before.flops or 0.0),
            bandwidth=max(found.bandwidth or 0.0, before.bandwidth or 0.0),
        )
    return _measured[key]


def cache_bytes(device: torch.device | str = "cpu", *, folder: Path = _CACHE_FOLDER) -> int | None:
    """Bytes of the last-level cache; None where the system does not tell."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = cache_levels(folder=folder)
    return sizes[max(sizes)] if sizes else None


def cache_levels(*, folder: Path = _CACHE_FOLDER) -> dict[int, int]:
    """Bytes of one core's data cache of each level, in order; empty where the system does not tell."""
    found = [(_text(index / "level"), _text(index / "size"), _text(index / "type")) for index in folder.glob("index*")]
    sizes = {int(level): _bytes(size) for level, size, kind in found if level.isdigit() and kind != "Instruction"}
    return dict(sorted(sizes.items()))


def _best_product(dtype: torch.dtype, device: torch.device | str, seconds: float) -> float:
    """Grows the size while one product still takes a small part of the time, and repeats the best size."""
    end = time.perf_counter() + seconds
    best_rate = 0.0
    best: tuple[float, Callable[[], object]] = (0.0, lambda: None)
    for size in _PRODUCT_SIZES:
        work = 2.0 * size**3
        if best_rate and work / best_rate > seconds / 8:
            break
        for call in _products(size, dtype, device):
            rate = work / _fastest(call, device, 0.0, at_least=2)
            if rate > best_rate:
                best_rate, best = rate, (work, call)
    work, call = best
    return max(best_rate, work / _fastest(call, device, end, at_least=2))


def _products(size: int, dtype: torch.dtype, device: torch.device | str) -> list[Callable[[], object]]:
    """Both orders of the right matrix: for some dtypes the library has a fast kernel for one of them only."""
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return [lambda: left @ right, lambda: functional.linear(left, right)]


def _best_stream(dtype: torch.dtype, device: torch.device | str, seconds: float) -> float:
    end = time.perf_counter() + seconds
    weights = torch.ones(_weight_rows(dtype, device), _COLUMNS, dtype=dtype, device=device)
    calls = [_linear(weights, batch) for batch in _BATCHES] + [weights.sum]
    share = max(0.0, end - time.perf_counter()) / len(calls)
    times = [_fastest(call, device, time.perf_counter() + share, at_least=2) for call in calls]
    return weights.numel() * weights.element_size() / min(times)


def _linear(weights: Tensor, batch: int) -> Callable[[], object]:
    rows = torch.ones(batch, _COLUMNS, dtype=weights.dtype, device=weights.device)
    return lambda: functional.linear(rows, weights)


def _weight_rows(dtype: torch.dtype, device: torch.device | str) -> int:
    """Rows of a matrix of four times the last-level cache, within what the memory has room for."""
    wanted = 4 * (cache_bytes(device) or _SMALLEST_WEIGHTS)
    room = psutil.virtual_memory().available // 8
    count = min(max(wanted, _SMALLEST_WEIGHTS), _LARGEST_WEIGHTS, room)
    return max(1, int(count // (_COLUMNS * dtype.itemsize)))


def _fastest(call: Callable[[], object], device: torch.device | str, end: float, *, at_least: int) -> float:
    """The least time of a call, repeated until `end` on the clock and `at_least` so often."""
    warm_up(call, device)
    best = min(time_call(call, device) for _ in range(at_least))
    while time.perf_counter() < end:
        best = min(best, time_call(call, device))
    return best


def _multiprocessors(device: torch.device | str) -> int | None:
    if torch.device(device).type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _bytes(size: str) -> int:
    """``"32768K"`` → 33 554 432, as the kernel writes the sizes of caches."""
    match = re.fullmatch(r"(\d+)([KMG]?)", size)
    return int(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[match[2]] if match else 0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
