"""From a work and a device to a predicted profile. No torch: the arithmetic is in `microbatch.roofline`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from microbatch.curves.objective import smallest_near_best
from microbatch.curves.profile import Environment, MemoryCurve, Peaks, Point, Profile
from microbatch.errors import InvalidSettings
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.profiling.predict_clock import Clock, Settings
from microbatch.profiling.predict_layers import predict_layers
from microbatch.profiling.predict_limits import predict_limits, update_seconds
from microbatch.profiling.predict_memory import work_memory
from microbatch.profiling.predict_sizes import LARGEST_BATCH, choose_sizes, reach
from microbatch.profiling.predict_surface import predict_surface
from microbatch.roofline.balance import moved_bytes, with_rates
from microbatch.roofline.parallel import split_work
from microbatch.roofline.training import with_optimizer
from microbatch.units import format_bytes, format_percent
from microbatch.work.operators import Work

FORMULA = "from the operators: weights, state, cache, and what the operators read and write"


def predict_work(work: Work, spec: DeviceSpec, settings: Settings, *, memory: MemoryCurve | None = None) -> Profile:
    """The curve of a work on a device.

    Args:
        work: the whole model's operators.
        spec: the device.
        settings: what is asked for.
        memory: the memory curve where it is known better than from the operators.

    Raises:
        InvalidDevice: the device has no rate for a dtype of the work, or no link where several devices are asked for.
        InvalidSettings: a setting outside its range.
    """
    _check(work, settings)
    training = work.mode == "training"
    whole = with_rates(work, spec)
    sequence = float(settings.sequence or 1)
    own = split_work(whole, settings.devices, kv_heads=settings.kv_heads)
    own = with_optimizer(own, settings.optimizer, settings.accumulation) if training else own
    method = "on fake tensors" if memory else FORMULA
    memory = memory or work_memory(own, spec, settings)
    clock = Clock(own, spec, sequence, settings.launches)
    top, stopped_by = _range(clock, settings, memory)
    sizes = choose_sizes(clock.seconds, top, settings.sizes)
    points = tuple(_point(clock, size, memory, settings) for size in sizes)
    layer_sizes = sorted({*_ends(points), *(size for size in settings.layer_sizes if size in sizes)})
    return Profile(
        points=points,
        model=work.model,
        mode=work.mode,
        dtype=work.dtype,
        unit=work.unit,
        source="predicted",
        peaks=_peaks(spec, work.dtype),
        memory=memory,
        layers=predict_layers(clock, layer_sizes),
        layer_batch_sizes=tuple(layer_sizes),
        uncounted=work.uncounted,
        weight_bytes=own.weight_bytes,
        stopped_by=stopped_by,
        environment=Environment(device=_device_name(spec, settings.devices), memory_bytes=spec.memory_bytes),
        warnings=(*work.warnings, *_warnings(spec, settings, memory)),
        prediction=predict_limits(whole, clock, settings, points, method if memory else ""),
        surface=predict_surface(clock, settings),
    )


def _check(work: Work, settings: Settings) -> None:
    if settings.max_batch_size is not None and settings.max_batch_size < 1:
        raise InvalidSettings(f"A largest batch of {settings.max_batch_size} leaves nothing.", "Give 1 or more.")
    if settings.devices > 1 and work.mode == "training":
        raise InvalidSettings(
            "Training on several devices is not predicted here.", "Predict it on one device, with --mode training."
        )
    if settings.surface and not work.sequence_free:
        raise InvalidSettings(
            "The sizes of this model do not follow its sequence length, so there is no surface.",
            "Predict one length at a time with --sequence.",
        )


def _range(clock: Clock, settings: Settings, memory: MemoryCurve | None) -> tuple[int, str]:
    """The largest size worth a look, and what ends there."""
    fits = memory.largest_that_fits if memory else None
    given = settings.max_batch_size or LARGEST_BATCH
    most = given if fits is None else max(1, min(fits, given))
    top, ended = reach(clock.seconds, most)
    if ended == "limit" and most < given:
        ended = "memory"
    return max(top, min(most, max(settings.sizes, default=1))), ended


def _point(clock: Clock, size: int, memory: MemoryCurve | None, settings: Settings) -> Point:
    call, work = clock.call(size), clock.work
    overhead = sum(o.repeat * t.overhead_seconds for o, t in zip(work.operators, call.operators, strict=True))
    return Point(
        batch_size=size,
        samples=(call.seconds,),
        update_samples=(update_seconds(clock, size, settings),) if work.mode == "training" else (),
        flops=work.flops(size, clock.sequence),
        moved_bytes=moved_bytes(work, size, clock.sequence),
        overhead_seconds=overhead,
        predicted_peak_bytes=round(memory.fixed_bytes + memory.bytes_per_item * size) if memory else None,
    )


def _ends(points: Sequence[Point]) -> tuple[int, int]:
    """The smallest size and the one that a reader will most likely use."""
    sizes = np.array([point.batch_size for point in points], dtype=float)
    best = smallest_near_best(sizes, np.array([point.samples[0] for point in points]))
    return points[0].batch_size, points[best].batch_size


def _peaks(spec: DeviceSpec, dtype: str) -> Peaks:
    source = spec.sources.get(f"flops.{dtype}", "")
    return Peaks(
        flops=spec.flops.get(dtype), bandwidth=spec.bandwidth, source=f"{spec.name}: {source}" if source else spec.name,
        cache_bytes=spec.cache_bytes, multiprocessors=spec.multiprocessors,
    )  # fmt: skip


def _device_name(spec: DeviceSpec, devices: int) -> str:
    return spec.name if devices == 1 else f"{devices} x {spec.name}"


def _warnings(spec: DeviceSpec, settings: Settings, memory: MemoryCurve | None) -> tuple[str, ...]:
    found = [f"Computed from the figures of {spec.name}; no size was run."]
    if settings.devices > 1:
        found.append(f"FLOPs, bytes and memory are those of one of {settings.devices} devices.")
    if memory is None:
        found.append(f"The memory of {spec.name} is not known, so nothing says which sizes fit.")
    elif memory.largest_that_fits == 0:
        found.append(
            f"It does not fit: {format_bytes(memory.fixed_bytes)} before the first item, of "
            f"{format_bytes(memory.limit_bytes)} less {format_percent(memory.margin)} kept free."
        )
    return tuple(found)
