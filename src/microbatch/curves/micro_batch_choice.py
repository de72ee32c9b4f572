"""Which micro-batch size a global batch is best cut into, from a profile of training. No torch, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from microbatch.curves.explanation import Binding
from microbatch.curves.micro_batches import MicroBatch, MicroBatches, StepTimes
from microbatch.curves.objective import NEAR_BEST, STILL_RISING
from microbatch.curves.profile import MemoryCurve, Point, Profile
from microbatch.errors import InvalidProfile
from microbatch.sizes import BatchSizes
from microbatch.units import format_bytes, format_number, format_percent

OPTIMIZER_BINDS = 0.5
"""Share of a step from which on what is paid beside the pieces binds."""
HELD = ("weights", "gradients", "optimizer", "buffers")
"""Parts of the memory that stand while a piece runs."""


def choose_micro_batches(
    profile: Profile, global_batch_size: int, *, points: Sequence[Binding] = (), memory_limit: int | None = None
) -> MicroBatches:
    """The step's time and memory by micro-batch size; chosen is the smallest within 2 % of the fastest that fits.

    Args:
        profile: of training, or a CSV of somebody's times of forward and backward.
        global_batch_size: items in one optimizer step.
        points: the profile's sizes as they were explained, for times without drift, intervals and what binds; without
            them each size takes the median of its samples.
        memory_limit: bytes; by default the limit that the profile was held to.

    Raises:
        InvalidBatchSizes: the global batch size is not a whole number of 1 or more.
        InvalidProfile: the profile is one of inference.
    """
    _check(profile, global_batch_size)
    cuts = [_cut(global_batch_size, size) for size in _sizes(profile, global_batch_size)]
    times = _times(profile, points)
    bounds = {point.batch_size: point.bound for point in points}
    rows = [_row(profile, cut, times, bounds.get(cut.micro_batch_size, ""), memory_limit) for cut in cuts]
    return _choose(profile, rows, global_batch_size, memory_limit)


def _check(profile: Profile, global_batch_size: int) -> None:
    _cut(global_batch_size, 1)
    if profile.mode != "training" and profile.source != "csv":
        raise InvalidProfile(
            f"The profile is one of {profile.mode}, which has no optimizer step for a global batch of "
            f"{global_batch_size}.",
            "Measure one with --mode training.",
        )


def _sizes(profile: Profile, global_batch_size: int) -> list[int]:
    """Every size of the profile up to the global batch, and the global batch itself where larger sizes are known."""
    sizes = [size for size in profile.batch_sizes if size < global_batch_size]
    return [*sizes, global_batch_size] if global_batch_size <= profile.batch_sizes[-1] else sizes


def _cut(global_batch_size: int, size: int) -> BatchSizes:
    return BatchSizes.of(global_batch_size=global_batch_size, micro_batch_size=size)


class _Times(NamedTuple):
    """What a step is made of: at the middle of the times' intervals, and at both ends where every size has one."""

    middle: StepTimes
    low: StepTimes | None = None
    high: StepTimes | None = None


def _times(profile: Profile, points: Sequence[Binding]) -> _Times:
    if not points:
        medians = {point.batch_size: median(point.samples) for point in profile.points if point.samples}
        return _Times(step_times(profile, medians))
    middle = step_times(profile, {point.batch_size: point.seconds for point in points})
    low = {point.batch_size: point.low for point in points if point.low is not None}
    high = {point.batch_size: point.high for point in points if point.high is not None}
    if not len(low) == len(high) == len(points):
        return _Times(middle)
    return _Times(middle, step_times(profile, low), step_times(profile, high))


def step_times(profile: Profile, seconds: Mapping[int, float]) -> StepTimes:
    """What a step is made of, from the seconds of a whole step of one piece by its size.

    The update is the share of each sample in which it ran, so that drift of the machine does not enter.
    """
    shares = {point.batch_size: _share_of_update(point) for point in profile.points}
    known = profile.prediction.optimizer if profile.prediction else None
    accumulation = known.accumulation if known else 1  # a predicted piece holds this part of an update
    return StepTimes(
        pieces={size: value * (1 - shares[size]) for size, value in seconds.items()},
        updates={size: accumulation * value * shares[size] for size, value in seconds.items()},
        adding=median(profile.adding_samples) if profile.adding_samples else 0.0,
    )


def _share_of_update(point: Point) -> float:
    pairs = zip(point.update_samples, point.samples, strict=False)  # no update samples: it was not timed apart
    return median([update / sample for update, sample in pairs] or [0.0])


def _row(profile: Profile, cut: BatchSizes, times: _Times, bound: str, memory_limit: int | None) -> MicroBatch:
    seconds, once = times.middle.step(cut), times.middle.once(cut)
    peak = peak_bytes(profile, cut)
    budget = _budget(profile.memory, memory_limit)
    return MicroBatch(
        micro_batch_size=cut.micro_batch_size,
        num_micro_batches=cut.num_micro_batches,
        tail=cut.tail,
        step_seconds=seconds,
        low=times.low.step(cut) if times.low else None,
        high=times.high.step(cut) if times.high else None,
        samples_per_second=cut.global_batch_size / seconds,
        peak_bytes=peak,
        fits=None if peak is None or budget is None else peak <= budget,
        bound="optimizer" if once > OPTIMIZER_BINDS * seconds else bound,
        measured=cut.micro_batch_size in profile.batch_sizes,
    )


def peak_bytes(profile: Profile, cut: BatchSizes) -> int | None:
    """Most bytes alive at once: one piece's, and from the second piece on the gradients of those before it."""
    point = next((point for point in profile.points if point.batch_size == cut.micro_batch_size), None)
    memory = profile.memory
    line = None if memory is None else memory.fixed_bytes + memory.bytes_per_item * cut.micro_batch_size
    found = [None if line is None else round(line)]
    if point is not None and (alone := point.predicted_peak_bytes if point.peak_bytes is None else point.peak_bytes):
        found = [alone]
    if cut.num_micro_batches > 1 and point is not None and point.beside_gradients_bytes is not None:
        found.append(point.beside_gradients_bytes)
    elif cut.num_micro_batches > 1 and memory is not None and line is not None:
        found.append(round(line) + _gradients_left_out(memory))
    return max((size for size in found if size is not None), default=None)


def _gradients_left_out(memory: MemoryCurve) -> int:
    """A step of one piece has its peak before its gradients exist, so that its fixed part may be without them."""
    held = sum(memory.parts.get(name, 0) for name in HELD)
    return 0 if memory.fixed_bytes >= held else memory.parts.get("gradients", 0)


def _budget(memory: MemoryCurve | None, memory_limit: int | None) -> float | None:
    if memory is None:
        return memory_limit
    return (memory.limit_bytes if memory_limit is None else memory_limit) * (1 - memory.margin)


def _choose(
    profile: Profile, rows: Sequence[MicroBatch], global_batch_size: int, memory_limit: int | None
) -> MicroBatches:
    fitting = [row for row in rows if row.fits is not False]
    chosen = smallest_near_fastest(fitting)
    if chosen is None:
        limited_by, reason = "none", _nothing_fits(profile, rows[0], memory_limit)
    else:
        limited_by, reason = _limit(profile, rows, fitting, chosen)
    return MicroBatches(
        global_batch_size=global_batch_size,
        rows=tuple(replace(row, chosen=row is chosen) for row in rows),
        limited_by=limited_by,
        reason=reason,
        warnings=_warnings(profile),
    )


def smallest_near_fastest(rows: Sequence[MicroBatch]) -> MicroBatch | None:
    """The first whose step takes at most 2 % longer than the fastest; None without rows."""
    fastest = min((row.step_seconds for row in rows), default=0.0)
    return next((row for row in rows if NEAR_BEST * row.step_seconds <= fastest), None)


def _nothing_fits(profile: Profile, smallest: MicroBatch, memory_limit: int | None) -> str:
    budget = _budget(profile.memory, memory_limit) or 0
    return (
        f"No micro-batch of the profile fits: one of {format_number(smallest.micro_batch_size)} needs "
        f"{format_bytes(smallest.peak_bytes or 0)}, and {format_bytes(budget)} are allowed."
    )


def _limit(
    profile: Profile, rows: Sequence[MicroBatch], fitting: Sequence[MicroBatch], chosen: MicroBatch
) -> tuple[str, str]:
    """What keeps the pieces from being larger, and the same in a sentence."""
    largest = fitting[-1]
    if chosen.num_micro_batches == 1:
        return "batch", "The whole batch in one piece is the fastest."
    if not _still_falling(fitting):
        return "saturated", f"Larger pieces gain less than {format_percent(1 - NEAR_BEST)}."
    size = format_number(largest.micro_batch_size)
    if largest is not rows[-1]:
        return "memory", f"Larger pieces would be faster, but {size} is the largest that fits in memory."
    ended = {"memory": ("memory", f"{size} is the largest that fits in memory"),
             "budget": ("budget", f"the time to measure ended at {size}")}  # fmt: skip
    limited_by, why = ended.get(profile.stopped_by, ("range", f"{size} is the largest size that is known"))
    return limited_by, f"Larger pieces would be faster, but {why}."


def _still_falling(fitting: Sequence[MicroBatch]) -> bool:
    """Whether the step still gets faster with the largest pieces: at the last doubling by 5 % or more."""
    largest = fitting[-1]
    half = [row.step_seconds for row in fitting if 2 * row.micro_batch_size <= largest.micro_batch_size]
    fastest = min(row.step_seconds for row in fitting)
    return not half or (STILL_RISING * largest.step_seconds < min(half) and NEAR_BEST * largest.step_seconds <= fastest)


def _warnings(profile: Profile) -> tuple[str, ...]:
    if any(point.update_samples for point in profile.points):
        return ()
    if profile.source == "csv":
        return ("The times are taken as those of forward and backward of one piece; the update is not known.",)
    return (
        "The profile did not time the optimizer's update apart, so every piece counts one: small micro-batches look "
        "slower than they are. Measure it again.",
    )
