"""Sequence × batch: throughput at powers of two for each length, as far as memory allows. No torch."""

from __future__ import annotations

from dataclasses import replace

from microbatch.curves.prediction import SurfacePoint
from microbatch.curves.profile import MemoryCurve
from microbatch.profiling.grid import is_saturated
from microbatch.profiling.predict_clock import Clock, Settings
from microbatch.profiling.predict_memory import work_memory
from microbatch.profiling.predict_sizes import LARGEST_BATCH


def predict_surface(clock: Clock, settings: Settings) -> tuple[SurfacePoint, ...]:
    """Every length of `settings.surface`, in ascending order."""
    return tuple(point for length in sorted(set(settings.surface)) for point in _row(clock, settings, length))


def _row(clock: Clock, settings: Settings, sequence: int) -> list[SurfacePoint]:
    """Doubles until throughput is saturated, the largest size given, or the memory ends."""
    memory = work_memory(clock.work, clock.spec, replace(settings, sequence=sequence))
    sizes: list[int] = []
    seconds: list[float] = []
    size, top = 1, _largest(settings, memory)
    while size <= top and not (sizes and is_saturated(sizes, seconds)):
        sizes.append(size)
        seconds.append(clock.call(size, float(sequence)).seconds)
        size *= 2
    fits = memory.largest_that_fits if memory else None
    return [
        SurfacePoint(
            sequence=sequence,
            batch_size=size,
            seconds=taken,
            throughput=size / taken,
            fits=None if memory is None else fits is None or size <= fits,
        )
        for size, taken in zip(sizes, seconds, strict=True)
    ]


def _largest(settings: Settings, memory: MemoryCurve | None) -> int:
    given = settings.max_batch_size or LARGEST_BATCH
    fits = memory.largest_that_fits if memory else None
    return given if fits is None else max(1, min(given, fits))
