"""Seconds of one call."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

SHORTEST_SECONDS = 50e-6
"""A call below this is repeated inside one reading: the clock and its two calls cost up to a microsecond."""

_Clock = Callable[[], int]


def time_call(
    call: Callable[[], object], device: torch.device | str = "cpu", *, clock: _Clock = time.perf_counter_ns
) -> float:
    """Seconds of one call, its work on the device included.

    On a CPU a call shorter than 50 µs is repeated until a reading lasts about that long, and the mean is given.
    On CUDA two events around the call are read after both have passed, so that queued work of before is left out.

    Args:
        call: the step to time; warm it up first.
        device: where it runs.
        clock: nanoseconds; replaced in tests.
    """
    if torch.device(device).type == "cuda":
        return _cuda_seconds(call)
    first = _seconds(call, 1, clock)
    if first >= SHORTEST_SECONDS:
        return first
    return _seconds(call, math.ceil(SHORTEST_SECONDS / max(first, 1e-7)), clock)


def warm_up(
    call: Callable[[], object], device: torch.device | str = "cpu", *, clock: _Clock = time.perf_counter_ns
) -> float:
    """Seconds of the first call at a shape: kernel selection, allocation, compilation, and the work itself.

    Wall time from an idle device to an idle device, since compilation happens on the host.
    """
    synchronize(device)
    start = clock()
    call()
    synchronize(device)
    return (clock() - start) * 1e-9


def synchronize(device: torch.device | str) -> None:
    """Wait until the device has done all queued work; nothing to wait for on a CPU."""
    kind = torch.device(device).type
    if kind != "cpu":
        torch.get_device_module(kind).synchronize(device)


def _seconds(call: Callable[[], object], repeats: int, clock: _Clock) -> float:
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) * 1e-9 / repeats


def _cuda_seconds(call: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


class Stopwatch:
    """Seconds of a part of a call, taken while the whole of it is timed.

    On CUDA two events of the same stream, which cost the host a few microseconds and wait for nothing.
    """

    def __init__(self, device: torch.device | str = "cpu", *, clock: _Clock = time.perf_counter_ns) -> None:
        self._on_cuda = torch.device(device).type == "cuda"
        self._clock = clock
        self._marks: list[Any] = []

    def start(self) -> None:
        """The part begins."""
        self._marks = [self._mark()]

    def stop(self) -> None:
        """The part is over."""
        self._marks.append(self._mark())

    @property
    def seconds(self) -> float | None:
        """Of the last part that was taken; None before the first."""
        if len(self._marks) < 2:
            return None
        start, end = self._marks
        if not self._on_cuda:
            return float(end - start) * 1e-9
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    def _mark(self) -> Any:
        if not self._on_cuda:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
