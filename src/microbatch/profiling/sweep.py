"""Measures a model's curve: which sizes, how often, in which order, until it is sure or the budget is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from microbatch.capture.count import Count
from microbatch.curves.cliffs import find_shape
from microbatch.curves.levels import find_levels
from microbatch.curves.objective import smallest_near_best
from microbatch.curves.profile import Environment, ExpertLoad, MemoryCurve, Peaks, Point, Profile
from microbatch.errors import ImplausibleResult, InvalidSettings
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.measure.load import LoadWatch
from microbatch.measure.peaks import measure_peaks
from microbatch.models.moe import measure_imbalance
from microbatch.profiling import gather
from microbatch.profiling.search import LARGEST_BATCH, Progress, Search, largest_that_fits, reach, refine
from microbatch.profiling.workload import Loss, MakeOptimizer, Workload
from microbatch.roofline.tiles import predicted_edges
from microbatch.units import format_rate

SMALL_EXAMPLE = 2
ENOUGH_ROWS = 128
"""So many different rows reach nearly every expert that they would reach if all were different."""
MOST_JUMPS = 4
PLAUSIBLE = 1.15
"""A measured peak may be missed by this much."""
WINOGRAD = 4.0
"""Convolutions of 3×3 can do their work in up to 4 times fewer operations (Winograd F(4×4, 3×3))."""


def profile(
    model: nn.Module,
    example: Any,
    *,
    mode: str = "inference",
    device: torch.device | str = "cpu",
    dtype: str | None = None,
    budget: float = 60.0,
    max_batch_size: int | None = None,
    sizes: Sequence[int] = (),
    memory_limit: int | None = None,
    batch_dimension: int | None = None,
    compile: bool = False,  # noqa: A002 (torch's own word)
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    name: str = "",
    unit: str = "rows",
    sequence: int | None = None,
) -> Profile:
    """Measures time and memory of a model by batch size on this machine. The model is left as it was.

    Args:
        model: any module.
        example: an input of any batch size: a tensor, a tuple of positional inputs or a dict of named ones. Or a
            function from a batch size to (positional inputs, named inputs), for models whose work depends on what
            the rows hold: else the rows of the example are repeated.
        mode: ``inference`` (one forward) or ``training`` (forward, backward, optimizer step); ``prefill`` and
            ``decode`` run as inference does, for a model and an example that do so.
        device: where torch runs.
        dtype: fp32, tf32, fp16, bf16 or fp64; by default as the model is.
        budget: seconds that the measurement may take, about.
        max_batch_size: try no larger size.
        sizes: further sizes to measure, within the range that is tried.
        memory_limit: bytes; by default what the control group or the machine allows, on CUDA what is free.
        batch_dimension: the inputs' batch dimension; found when left out.
        compile: measure under ``torch.compile``, one graph per size.
        loss: ``loss(output, batch) -> (sum, weight)``, for training.
        optimizer: makes an optimizer from parameters, for training; Adam when left out.
        seed: for torch's random state during the run.
        progress: called with the share done and what is being measured.
        name: of the model, for the report.
        unit: what one item is called.
        sequence: tokens of each item (in decode, those in the cache), for the report.

    Raises:
        InvalidSettings: an option outside its range.
        InvalidModel: an example without one clear batch.
        ModelFailed: the model raises at every size tried.
        ImplausibleResult: a time faster than the device can be.
    """
    _check(budget, max_batch_size, memory_limit)
    example_at = example if callable(example) else None
    args, kwargs = example_at(SMALL_EXAMPLE) if example_at else _split(example)
    watch = LoadWatch(device, settings={"torch.compile": "on" if compile else "off"})
    watch.start()
    with Workload(
        model, args, kwargs, mode=mode, device=device, dtype=dtype, compile=compile, loss=loss,
        optimizer=optimizer, batch_dimension=batch_dimension, example_at=example_at,
    ) as workload:  # fmt: skip
        torch.manual_seed(seed)
        peaks = measure_peaks(workload.dtype, device, seconds=min(2.0, budget / 15))
        memory = gather.predict_memory(workload, memory_limit)
        search = Search(workload, budget=budget, memory=memory, progress=progress)
        stopped_by = reach(search, max_batch_size or LARGEST_BATCH)
        watch.sample()
        refine(search, watch, _wave_edges(model, peaks, search.largest), sizes)
        peaks = measure_peaks(workload.dtype, device, seconds=min(2.0, budget / 15), again=True)
        environment = watch.stop()
        model_name = name or type(model).__name__
        measured = _assemble(search, workload, peaks, stopped_by, environment=environment, model=model_name, unit=unit)
        return replace(measured, sequence=sequence, warnings=_repeated_rows(workload, search.largest))


def _wave_edges(model: nn.Module, peaks: Peaks, up_to: int) -> tuple[int, ...]:
    """Sizes at which the widest linear layer needs one more wave; empty where there are no multiprocessors."""
    widths = [layer.out_features for layer in model.modules() if isinstance(layer, nn.Linear)]
    if not widths or peaks.multiprocessors is None:
        return ()
    spec = DeviceSpec(name="here", flops={}, bandwidth=0.0, multiprocessors=peaks.multiprocessors)
    return predicted_edges(spec, max(widths), up_to)


def _check(budget: float, max_batch_size: int | None, memory_limit: int | None) -> None:
    if not budget > 0:
        raise InvalidSettings(f"A budget of {budget} seconds is not above zero.", "Give at least a few seconds.")
    if max_batch_size is not None and max_batch_size < 1:
        raise InvalidSettings(f"A largest batch of {max_batch_size} leaves nothing to measure.", "Give 1 or more.")
    if memory_limit is not None and memory_limit < 1:
        raise InvalidSettings(f"A memory limit of {memory_limit} bytes is not above zero.", "Give one as in 8GB.")


def _split(example: Any) -> tuple[tuple[object, ...], dict[str, object]]:
    if isinstance(example, dict):
        return (), example
    return (example if isinstance(example, tuple) else (example,)), {}


def _assemble(
    search: Search,
    workload: Workload,
    peaks: Peaks,
    stopped_by: str,
    *,
    environment: Environment,
    model: str,
    unit: str,
) -> Profile:
    points = search.points()
    work = gather.counts(workload, [point.batch_size for point in points])
    points = gather.with_work(points, work)
    first = work(points[0].batch_size)
    _check_plausible(points, peaks, first)
    ends = _ends(points)
    looked_at = sorted({*ends, *_beside_jumps(points)})
    search.say(f"looking inside batches {', '.join(map(str, looked_at))}")
    points = gather.with_memory(points, workload, looked_at)
    points = gather.with_evidence(points, workload, looked_at)
    adding = workload.time_adding(ends[0]) if workload.trains else ()
    return Profile(
        points=points,
        model=model,
        mode=workload.mode,
        dtype=workload.dtype,
        unit=unit,
        structure=workload.structure,
        peaks=peaks,
        memory=_verified(search, stopped_by),
        layers=() if workload.compile_count else gather.layers(workload, ends),
        layer_batch_sizes=tuple(ends),
        routing=_routing(workload, ends),
        failures=tuple(search.failures),
        uncounted=first.uncounted if first else (),
        weight_bytes=first.weight_bytes if first else None,
        compile_count=workload.compile_count,
        compile_seconds=workload.compile_seconds,
        adding_samples=adding,
        timed_rows=search.timed_rows,
        wall_seconds=search.elapsed,
        stopped_by=stopped_by,
        environment=environment,
    )


def _ends(points: Sequence[Point]) -> list[int]:
    """The smallest size and the one that a reader will most likely use."""
    sizes = np.array([point.batch_size for point in points], dtype=float)
    seconds = np.array([np.median(point.samples) for point in points])
    return sorted({points[0].batch_size, points[smallest_near_best(sizes, seconds)].batch_size})


def _beside_jumps(points: Sequence[Point]) -> set[int]:
    """Sizes on both sides of the largest rises, for which a cause will be wanted."""
    if len(points) < 5:
        return set()
    shape = find_shape(find_levels(points))
    worst = sorted(shape.cliffs, key=lambda i: -shape.log_excess[i])[:MOST_JUMPS]
    return {points[j].batch_size for i in worst for j in (i - 1, i)}


def _routing(workload: Workload, sizes: Sequence[int]) -> tuple[ExpertLoad, ...]:
    """How mixture-of-experts layers spread the batch; empty for a model without any."""
    return tuple(
        load for size in sizes for load in measure_imbalance(workload.model, *workload.example(size), batch_size=size)
    )


def _repeated_rows(workload: Workload, largest: int) -> tuple[str, ...]:
    """A gate sends equal rows to equal experts, so an example repeated wakes too few of them."""
    router = gather.first_router(workload.model)
    enough = not workload.repeats_rows or workload.batch_size >= min(largest, ENOUGH_ROWS)
    if router is None or enough:
        return ()
    return (
        f"{router or 'The model'} sends rows to experts by what they hold, and the {workload.batch_size} rows of the "
        f"example were repeated to fill batches up to {largest}: give {min(largest, ENOUGH_ROWS)} different rows, or "
        f"a function from a batch size to an example.",
    )


def _verified(search: Search, stopped_by: str) -> MemoryCurve | None:
    """The memory curve with the largest size that fits, named only where that size ran."""
    if search.memory is None:
        return None
    return replace(search.memory, largest_that_fits=largest_that_fits(search, stopped_by))


def _check_plausible(points: Sequence[Point], peaks: Peaks, work: Count | None) -> None:
    if not peaks.flops or work is None:
        return
    convolves = any("Conv" in layer.kind for layer in work.layers)
    allowed = PLAUSIBLE * (WINOGRAD if convolves else 1.0) * peaks.flops
    for point in points:
        rate = (point.flops or 0.0) / min(point.samples)
        if rate > allowed:
            raise ImplausibleResult(
                f"Batch {point.batch_size} would run at {format_rate(rate, 'FLOP')}; the device reaches "
                f"{format_rate(peaks.flops, 'FLOP')}.",
                "The model may answer from a cache or return before the work is done; make each call do its work.",
            )
