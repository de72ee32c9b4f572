"""Why a cliff is there. Each cause is a function of one piece of evidence; without evidence the answer is unknown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from microbatch.curves.profile import Point, Profile
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.roofline.tiles import explain_jump
from microbatch.units import format_bytes, format_number, format_seconds

SHARE_THAT_EXPLAINS = 0.5
"""A part of the time is the cause when it grew by at least half of what the whole grew."""
SECONDS_PER_PAGE_FAULT = 2.5e-7
"""Least cost of a minor fault on current x86 servers; what clearing the 4 KiB page costs alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Jump:
    """A rise from one measured size to the next, with all that is known around it.

    Attributes:
        before, after: the points on both sides.
        seconds_before, seconds_after: their times.
        expected_seconds: the time after the jump if the time per item had stayed as it was, or less.
        falls_to: a larger size, at most twice this one, that takes less time, and its time; None when none does.
        period: the period of the curve's rises when this one belongs to it.
        flat_within_period: the time stays level between the rises.
        ridge: the fitted ridge; None where there is none.
    """

    profile: Profile
    before: Point
    after: Point
    seconds_before: float
    seconds_after: float
    falls_to: tuple[int, float] | None = None
    period: int | None = None
    flat_within_period: bool = False
    ridge: float | None = None
    device: DeviceSpec | None = None
    gemm: tuple[int, int] | None = None

    @property
    def extra_seconds(self) -> float:
        return self.seconds_after - self.seconds_before


Evidence = str | None
Cause = Callable[[Jump], tuple[str, str] | None]
"""A function from a jump to (cause, evidence), or None without evidence."""


def find_cause(jump: Jump) -> tuple[str, str]:
    """The first cause in `CAUSES` with evidence, else ``unknown`` and what is missing."""
    found = (cause(jump) for cause in CAUSES)
    return next((answer for answer in found if answer is not None), ("unknown", _missing(jump)))


def _computed(jump: Jump) -> tuple[str, str] | None:
    """A predicted curve knows its steps: the time model made them."""
    steps = jump.profile.prediction.steps if jump.profile.prediction else ()
    found = (step for step in steps if step.batch_size == jump.after.batch_size)
    return next(((step.cause, step.evidence) for step in found), None)


def _tile_or_wave(jump: Jump) -> tuple[str, str] | None:
    if jump.device is None or jump.gemm is None:
        return None
    k, n = jump.gemm
    size = jump.after.batch_size
    found = explain_jump(
        jump.before.batch_size,
        size,
        k=k,
        n=n,
        spec=jump.device,
        seconds_before=jump.seconds_before,
        seconds_after=jump.seconds_after,
        dtype=jump.profile.dtype,
        gemms=max(1.0, (jump.after.flops or 0.0) / (2.0 * size * k * n)),
    )
    return (found.kind, found.sentence) if found else None


def _allocator(jump: Jump) -> tuple[str, str] | None:
    before, after = jump.before, jump.after
    retries = (after.allocator_retries or 0) - (before.allocator_retries or 0)
    if retries > 0:
        return "allocator", f"The allocator emptied its cache and tried again {retries} more times."
    faults = (after.page_faults or 0.0) - (before.page_faults or 0.0)
    if faults * SECONDS_PER_PAGE_FAULT >= SHARE_THAT_EXPLAINS * jump.extra_seconds > 0:
        return "allocator", (
            f"{format_number(faults)} more page faults a call: memory is given back to the system and fetched again "
            f"at each call."
        )
    return None


def _overhead(jump: Jump) -> tuple[str, str] | None:
    if jump.before.overhead_seconds is None or jump.after.overhead_seconds is None:
        return None
    rise = jump.after.overhead_seconds - jump.before.overhead_seconds
    if rise < SHARE_THAT_EXPLAINS * jump.extra_seconds:
        return None
    return (
        "overhead",
        f"Time outside all operators rises by {format_seconds(rise)} of {format_seconds(jump.extra_seconds)}.",
    )


def _other_kernel(jump: Jump) -> tuple[str, str] | None:
    left, entered = set(jump.before.kernels), set(jump.after.kernels)
    if not left or not entered or left == entered:
        return None
    gone, new = sorted(left - entered), sorted(entered - left)
    return "kernel_switch", f"{', '.join(gone) or 'nothing'} is replaced by {', '.join(new) or 'fewer kernels'}."


def _fall(jump: Jump) -> tuple[str, str] | None:
    if jump.falls_to is None:
        return None
    size, seconds = jump.falls_to
    return "kernel_switch", (
        f"{size} takes {format_seconds(seconds)}, less than the {format_seconds(jump.seconds_after)} of "
        f"{jump.after.batch_size}; within one kernel time never falls as the batch grows, so the library uses "
        f"another kernel there."
    )


def _padding(jump: Jump) -> tuple[str, str] | None:
    if jump.period is None or not jump.flat_within_period:
        return None
    return "padding", (
        f"The time rises at every {jump.period} sizes and is level between: the work of the next full "
        f"{jump.period} is done whatever the batch."
    )


def _cache(jump: Jump) -> tuple[str, str] | None:
    cache = jump.profile.peaks.cache_bytes
    before, after = jump.before.moved_bytes, jump.after.moved_bytes
    if cache is None or before is None or after is None or not before <= cache < after:
        return None
    return "cache", (
        f"One call touches {format_bytes(before)} at {jump.before.batch_size} and {format_bytes(after)} at "
        f"{jump.after.batch_size}; the last-level cache holds {format_bytes(cache)}."
    )


def _compute(jump: Jump) -> tuple[str, str] | None:
    low, high = jump.before.batch_size, jump.after.batch_size
    if jump.ridge is None or not (low < jump.ridge <= high and high > 1.15 * low):
        return None
    return "compute", f"The ridge, {format_number(jump.ridge)}, lies between {low} and {high}: below it time is flat."


CAUSES: tuple[Cause, ...] = (
    _computed, _tile_or_wave, _allocator, _overhead, _other_kernel, _fall, _padding, _cache, _compute,
)  # fmt: skip
"""In the order in which they are tried: direct evidence first, the curve's shape after it."""


def _missing(jump: Jump) -> str:
    regular = f"It belongs to rises every {jump.period} sizes. " if jump.period else ""
    if jump.profile.source == "csv":
        return f"{regular}Times alone do not tell the cause; --device and --gemm KxN would tell tiles and waves apart."
    return f"{regular}Same operators, no more overhead, page faults or retries than before the jump."
