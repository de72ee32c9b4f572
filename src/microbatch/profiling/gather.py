"""What is known about each size beside its time: work, memory, overhead, kernels, layers. Nothing here is timed
against another size, so it runs after the timed rounds.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import nn

from microbatch.capture.count import Count, LayerCount, count
from microbatch.curves.profile import Layer, MemoryCurve, Point
from microbatch.errors import MicrobatchError
from microbatch.measure import evidence
from microbatch.measure.memory import Prediction, memory_budget, memory_curve
from microbatch.profiling.workload import Workload

logger = logging.getLogger(__name__)

PREDICTED_AT = (8, 64)
AFFINE = 1e-6
_ROUTES = re.compile("moe|expert|router", re.IGNORECASE)

Counts = Callable[[int], Count | None]


def predict_memory(workload: Workload, memory_limit: int | None) -> MemoryCurve | None:
    """The memory curve from fake runs at two sizes; from small real ones where fake tensors cannot follow."""
    limit, source = memory_budget(memory_limit, workload.device)
    for predict, sizes in ((workload.predict_peak, PREDICTED_AT), (_measured_peak(workload), (2, 8))):
        try:
            return memory_curve([predict(size) for size in sizes], limit=limit, limit_source=source)
        except Exception as error:  # whatever the model does on fake tensors: then real ones are asked
            logger.info("memory at batch %s not found: %s", sizes, error)
    return None


def first_router(model: nn.Module) -> str | None:
    """Name of the first module that sends rows to experts, told by its class; None where there is none."""
    return next((name for name, part in model.named_modules() if _ROUTES.search(type(part).__name__)), None)


def _measured_peak(workload: Workload) -> Callable[[int], Prediction]:
    def measure(size: int) -> Prediction:
        return Prediction(batch_size=size, peak_bytes=workload.measure_peak_bytes(size), parts={})

    return measure


def counts(workload: Workload, sizes: Sequence[int]) -> Counts:
    """Work of one call at any of the sizes.

    The work of almost every model is a constant plus a slope times the batch: counted at the smallest and the
    largest size and checked at one between. Where the check fails (routing that depends on the data) each size is
    counted by itself.
    """
    ends = sizes[0], sizes[-1]
    first, last = (_count(workload, size) for size in ends)
    if first is None or last is None or sizes[0] == sizes[-1]:
        return lambda _: first
    middle = sizes[len(sizes) // 2]
    checked = _count(workload, middle)
    if checked is not None and _agree(_between(first, last, ends, middle), checked):
        return lambda size: _between(first, last, ends, size)
    return lambda size: _count(workload, size)


def _count(workload: Workload, size: int) -> Count | None:
    try:
        args, kwargs = workload.example(size)
        return count(workload.model, args, kwargs, mode="training" if workload.trains else "inference")
    except MicrobatchError as error:
        logger.info("work at batch %d not counted: %s", size, error)
        return None


def _between(first: Count, last: Count, ends: tuple[int, int], size: int) -> Count:
    share = (size - ends[0]) / (ends[1] - ends[0])
    return replace(
        last,
        flops=_mix(first.flops, last.flops, share),
        moved_bytes=_mix(first.moved_bytes, last.moved_bytes, share),
    )


def _mix(low: float, high: float, share: float) -> float:
    return (1 - share) * low + share * high


def _agree(guess: Count, truth: Count) -> bool:
    pairs = ((guess.flops, truth.flops), (guess.moved_bytes, truth.moved_bytes))
    return all(abs(a - b) <= AFFINE * max(abs(b), 1.0) for a, b in pairs)


def with_work(points: Sequence[Point], work: Counts) -> tuple[Point, ...]:
    """Points with the FLOPs and bytes of one call; unchanged where the work could not be counted."""

    def filled(point: Point) -> Point:
        found = work(point.batch_size)
        return replace(point, flops=found.flops, moved_bytes=found.moved_bytes) if found else point

    return tuple(map(filled, points))


def with_memory(points: Sequence[Point], workload: Workload, sizes: Sequence[int]) -> tuple[Point, ...]:
    """Points with the predicted peak, and the measured one at the given sizes.

    Predicted at `sizes` and at both ends, and between them on straight lines: the peak is a maximum of lines, so
    this errs on the safe side. In training also for a piece that finds the gradients of earlier ones.
    """
    asked = sorted({points[0].batch_size, *sizes, points[-1].batch_size})
    predicted = _predicted_peaks(workload, asked)
    beside_gradients = _predicted_peaks(workload, asked, beside_gradients=True) if workload.trains else {}

    def filled(point: Point) -> Point:
        size = point.batch_size
        peak = workload.measure_peak_bytes(size) if size in sizes else None
        return replace(
            point,
            predicted_peak_bytes=_on_lines(predicted, size),
            beside_gradients_bytes=_on_lines(beside_gradients, size),
            peak_bytes=peak,
        )

    return tuple(map(filled, points))


def _predicted_peaks(workload: Workload, sizes: Sequence[int], *, beside_gradients: bool = False) -> dict[int, int]:
    found = ((size, _predicted_peak(workload, size, beside_gradients)) for size in sizes)
    return {size: peak for size, peak in found if peak is not None}


def _on_lines(peaks: Mapping[int, int], size: int) -> int | None:
    return round(float(np.interp(size, list(peaks), list(peaks.values())))) if peaks else None


def _predicted_peak(workload: Workload, size: int, beside_gradients: bool) -> int | None:
    try:
        return workload.predict_peak(size, beside_gradients=beside_gradients).peak_bytes
    except Exception as error:  # whatever the model does on fake tensors
        logger.info("memory at batch %d not predicted: %s", size, error)
        return None


def with_evidence(points: Sequence[Point], workload: Workload, sizes: Sequence[int]) -> tuple[Point, ...]:
    """Points at the given sizes with overhead, kernels and page faults."""

    def filled(point: Point) -> Point:
        if point.batch_size not in sizes:
            return point
        step = workload.prepare(point.batch_size)
        step()
        return replace(
            point,
            overhead_seconds=evidence.measure_overhead(step, workload.device),
            kernels=evidence.kernel_names(step, workload.device),
            page_faults=evidence.count_page_faults(step) if workload.device.type == "cpu" else None,
            allocator_retries=evidence.count_allocator_retries(step, workload.device),
        )

    return tuple(map(filled, points))


def layers(workload: Workload, sizes: Sequence[int]) -> tuple[Layer, ...]:
    """The model's modules with their work per item and their measured seconds at each of the sizes."""
    found = [(_count(workload, size), _layer_seconds(workload, size)) for size in sizes]
    work = [counted for counted, _ in found]
    if any(counted is None for counted in work):
        return ()
    last = work[-1]
    assert last is not None
    timed = [seconds for _, seconds in found]
    return tuple(
        _layer(layer, sizes[-1], tuple(seconds.get(layer.name, 0.0) for seconds in timed))
        for layer in last.layers
        if any(layer.name in seconds for seconds in timed)
    )


def _layer(layer: LayerCount, size: int, seconds: tuple[float, ...]) -> Layer:
    return Layer(
        name=layer.name,
        kind=layer.kind,
        parameter_bytes=layer.parameter_bytes,
        flops_per_item=layer.flops / size,
        activation_bytes_per_item=max(0.0, layer.moved_bytes - layer.parameter_bytes) / size,
        seconds=seconds,
    )


def _layer_seconds(workload: Workload, size: int) -> dict[str, float]:
    """The median of three calls, by module."""
    step = workload.prepare(size)
    step()
    calls = [evidence.layer_seconds(workload.model, step, workload.device) for _ in range(3)]
    return {name: float(np.median([call.get(name, 0.0) for call in calls])) for name in calls[0]}
