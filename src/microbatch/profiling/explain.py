"""What a measured curve means: which sizes to use, which to avoid, and why. No torch: a saved profile is enough."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from microbatch.curves import objective as choose
from microbatch.curves.cliffs import EXACT_GAP, ONE_SIDED_90, Shape, find_shape
from microbatch.curves.codec import load_profile
from microbatch.curves.exact import exact_shape
from microbatch.curves.explanation import Binding, Cliff, Drop, Explanation, Fit, Padding, Recommendation, Ridge
from microbatch.curves.levels import Floats, Levels, find_levels
from microbatch.curves.micro_batch_choice import choose_micro_batches
from microbatch.curves.profile import Profile
from microbatch.curves.ridge import find_fit, find_ridge, fitted_seconds
from microbatch.errors import InvalidSettings, TooNoisy
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.profiling import binding, wording
from microbatch.profiling.causes import Jump, find_cause
from microbatch.roofline.ridge import ridge_with_activations, weights_ridge
from microbatch.units import DTYPE_BYTES, format_percent

OBJECTIVES = ("throughput", "balanced")
NOISIEST_LEVEL = 0.035
"""Standard error of a size's time above which a cliff of 10 % is found less than 9 times in 10; up to 0.029, as far as
benchmarks/planted_curves.py goes, 99 in 100 are."""
MEDIAN_PENALTY = 1.2533
"""Standard error of a median over that of a mean, for normal noise."""
OVERHEAD_BOUND = 0.3
FALL = 0.03
LEVEL_GROWTH = 0.25
"""Between the rises of a staircase the time may grow by this share of what it would grow without one."""


def explain(
    profile: Profile | str | Path,
    *,
    objective: str = "throughput",
    latency_target: float | None = None,
    device: DeviceSpec | None = None,
    gemm: tuple[int, int] | None = None,
    global_batch_size: int | None = None,
) -> Explanation:
    """Names the batch size to use and the ones to avoid, each with its reason.

    Args:
        profile: a `Profile`, or the path of a saved one or of a CSV with the columns batch_size,seconds.
        objective: ``throughput`` (the smallest size within 2 % of the best) or ``balanced`` (the largest
            throughput ÷ latency). With a latency target the highest throughput under it is chosen instead.
        latency_target: seconds that one call may take.
        device: the device's figures, for predicted ridges and, with `gemm`, tile and wave arithmetic.
        gemm: (K, N) of the weight, when the curve is one matrix product.
        global_batch_size: items of one optimizer step, for a profile of training: what micro-batches of each size take.

    Raises:
        InvalidProfile: the file cannot be used, or is not one of training where a global batch size is given.
        InvalidBatchSizes: a global batch size that is not a whole number of 1 or more.
        InvalidSettings: an unknown objective, a target that is not above zero, or `gemm` without `device`.
        TooNoisy: the times scatter so much that a cliff of 10 % could not be seen.
    """
    _check(objective, latency_target, device, gemm)
    profile = load_profile(profile)
    levels = find_levels(profile.points)
    _check_noise(levels)
    seconds, half_width = _display(profile, levels)
    shape = exact_shape(levels) if profile.source == "predicted" else find_shape(levels)
    ridge = _with_predictions(find_ridge(levels, shape), profile, device, gemm)
    fit = find_fit(levels, shape)
    points = _points(profile, seconds, half_width, fit)
    drops = _drops(levels, shape)
    period = _period(levels, shape)
    cliffs = _cliffs(profile, levels, shape, seconds, period, ridge, device, gemm)
    ridge = _overhead_bound(ridge, profile, fit.fixed_seconds if fit else None)
    sizes = levels.batch_sizes
    recommended = _recommend(profile, seconds, half_width, cliffs, objective, latency_target, levels)
    within = choose.within_target(seconds * np.exp(half_width), latency_target) if latency_target else []
    cut = choose_micro_batches(profile, global_batch_size, points=points) if global_batch_size is not None else None
    return Explanation(
        profile=profile,
        recommended=recommended,
        balanced=int(sizes[choose.most_balanced(sizes, seconds)]),
        b90=int(sizes[choose.first_at_share(sizes, seconds)]),
        latency_target=latency_target,
        largest_within_target=int(sizes[within[-1]]) if within else None,
        largest_that_fits=profile.memory.largest_that_fits if profile.memory else None,
        ridge=ridge,
        fit=fit,
        bound=next(point.bound for point in points if point.batch_size == recommended.batch_size),
        cliffs=cliffs,
        drops=drops,
        padding=_padding(levels, seconds),
        period=period,
        noise=levels.sigma,
        points=points,
        micro_batches=cut,
        utilisation=wording.utilisation(points, recommended.batch_size),
        warnings=(*wording.warnings(profile, levels), *(cut.warnings if cut else ())),
    )


def _check(
    objective: str, latency_target: float | None, device: DeviceSpec | None, gemm: tuple[int, int] | None
) -> None:
    if objective not in OBJECTIVES:
        raise InvalidSettings(f"{objective!r} is not an objective.", f"Choose {' or '.join(OBJECTIVES)}.")
    if latency_target is not None and not (latency_target > 0 and np.isfinite(latency_target)):
        raise InvalidSettings(
            f"A latency target of {latency_target} seconds is not above zero.", "Give a positive one."
        )
    if gemm is not None and device is None:
        raise InvalidSettings("The shape of a GEMM says nothing without a device.", "Name the device too.")


def _check_noise(levels: Levels) -> None:
    error = float(np.median(levels.standard_error))
    if error > NOISIEST_LEVEL and levels.sigma is not None:
        repeats = int(np.median([len(samples) for samples in levels.samples]))
        needed = int(np.ceil((levels.sigma / NOISIEST_LEVEL) ** 2))
        raise TooNoisy(
            f"One call varies by {format_percent(levels.sigma)}, and {repeats} repeats leave each time uncertain by "
            f"{format_percent(error)}: a cliff of 10 % could not be told from noise.",
            f"Measure each size at least {needed} times, or on a quieter machine.",
        )


def _display(profile: Profile, levels: Levels) -> tuple[Floats, Floats]:
    """The median of each size, drift taken out, and half of its 90 % interval in log units (0 with one sample each)."""
    medians = np.exp([median(samples.tolist()) for samples in levels.samples])
    if levels.sigma is None:
        return medians, np.zeros_like(medians)
    counts = np.array([len(point.samples) for point in profile.points])
    return medians, ONE_SIDED_90 * MEDIAN_PENALTY * levels.sigma / np.sqrt(counts)


def _points(profile: Profile, seconds: Floats, half_width: Floats, fit: Fit | None) -> tuple[Binding, ...]:
    sizes = np.array(profile.batch_sizes, dtype=float)
    fitted = fitted_seconds(fit, sizes) if fit else np.full(len(sizes), np.nan)
    return tuple(
        binding.bind(
            point,
            profile.peaks,
            seconds=float(t),
            interval=(float(t * np.exp(-w)), float(t * np.exp(w))) if len(point.samples) > 1 else None,
            fitted_seconds=float(f) if fit else None,
        )
        for point, t, w, f in zip(profile.points, seconds, half_width, fitted)
    )


def _period(levels: Levels, shape: Shape) -> int | None:
    if shape.smooth.period > 1:
        return shape.smooth.period
    sizes = [int(size) for size in levels.batch_sizes]
    return choose.common_period([(sizes[i - 1], sizes[i]) for i in shape.cliffs], sizes)


def _drops(levels: Levels, shape: Shape) -> tuple[Drop, ...]:
    """Sizes that take significantly less time than the next smaller one."""
    result = []
    for i in shape.edges:
        ratio = _ratio(levels, shape, i)
        if np.log(ratio) < np.log1p(-FALL) and np.log(ratio) + 2 * shape.standard_error[i] < 0:
            before, after = int(levels.batch_sizes[i - 1]), int(levels.batch_sizes[i])
            result.append(
                Drop(
                    batch_size=after, from_size=before, ratio=ratio, cause="kernel_switch",
                    evidence=f"{after} takes {format_percent(1 - ratio)} less time than {before}; within one kernel "
                    f"time never falls as the batch grows.",
                )
            )  # fmt: skip
    return tuple(result)


def _ratio(levels: Levels, shape: Shape, index: int) -> float:
    """t(b) / t(b⁻) at an index."""
    return float(np.exp(shape.log_excess[index]) * levels.batch_sizes[index] / levels.batch_sizes[index - 1])


def _cliffs(
    profile: Profile, levels: Levels, shape: Shape, seconds: Floats, period: int | None, ridge: Ridge,
    device: DeviceSpec | None, gemm: tuple[int, int] | None,
) -> tuple[Cliff, ...]:  # fmt: skip
    sizes = levels.batch_sizes
    result = []
    for i in shape.cliffs:
        before, after = int(sizes[i - 1]), int(sizes[i])
        pad = _pad(levels, seconds, i)
        cause, evidence = find_cause(
            Jump(
                profile=profile,
                before=profile.points[i - 1],
                after=profile.points[i],
                seconds_before=float(seconds[i - 1]),
                seconds_after=float(seconds[i]),
                falls_to=None if pad is None else (int(sizes[pad]), float(seconds[pad])),
                period=period if period and -(-before // period) * period < after else None,
                flat_within_period=_flat_between_rises(levels, shape),
                ridge=ridge.value,
                device=device,
                gemm=gemm,
            )
        )
        half = ONE_SIDED_90 * float(shape.standard_error[i])
        excess = float(np.exp(shape.log_excess[i]))
        exact = after / before <= EXACT_GAP or after - before == 1
        result.append(
            Cliff(
                batch_size=after,
                from_size=before,
                to_size=int(sizes[choose.zone_end(sizes, levels.seconds, i, pad)]),
                ratio=_ratio(levels, shape, i),
                excess=excess,
                excess_low=excess * float(np.exp(-half)) if levels.sigma is not None else None,
                excess_high=excess * float(np.exp(half)) if levels.sigma is not None else None,
                exact=exact,
                cause=cause,
                evidence=evidence,
                pad_to=None if pad is None else int(sizes[pad]),
                proposed=() if exact else _sizes_between(before, after),
            )
        )
    return tuple(result)


def _flat_between_rises(levels: Levels, shape: Shape) -> bool:
    """Does the time stay level between the edges, where the batch grows?"""
    inside = np.setdiff1d(np.arange(1, len(levels.batch_sizes)), shape.edges)
    if len(inside) < 3:
        return False
    growth = np.diff(levels.log_seconds)[inside - 1].sum()
    return bool(growth < LEVEL_GROWTH * np.diff(np.log(levels.batch_sizes))[inside - 1].sum())


def _sizes_between(before: int, after: int) -> tuple[int, ...]:
    """Up to three sizes that would narrow the place of an edge, multiples of 8 plus one first."""
    marks = [size + 1 for size in range(before - before % 8 + 8, after, 8) if before < size + 1 < after]
    if not marks:
        marks = list(range(before + 1, after))
    return tuple(marks[int(i)] for i in np.unique(np.linspace(0, len(marks) - 1, min(3, len(marks))).astype(int)))


def _pad(levels: Levels, seconds: Floats, index: int) -> int | None:
    """Index of the size to pad to, when the gain is more than noise."""
    times = seconds if levels.sigma is None else levels.seconds
    target = choose.pad_target(levels.batch_sizes, times, index)
    if target is None:
        return None
    error = float(np.hypot(levels.standard_error[index], levels.standard_error[target]))
    return target if np.log(times[index] / times[target]) > 2 * error else None


def _padding(levels: Levels, seconds: Floats) -> tuple[Padding, ...]:
    pairs = ((i, _pad(levels, seconds, i)) for i in range(len(seconds)))
    times = seconds if levels.sigma is None else levels.seconds
    return tuple(
        Padding(
            batch_size=int(levels.batch_sizes[i]),
            pad_to=int(levels.batch_sizes[j]),
            saves=float(1 - times[j] / times[i]),
        )
        for i, j in pairs
        if j is not None
    )


def _with_predictions(ridge: Ridge, profile: Profile, device: DeviceSpec | None, gemm: tuple[int, int] | None) -> Ridge:
    """The ridge with what the device's own figures predict for it."""
    if (known := profile.prediction) is not None:
        return replace(
            ridge,
            predicted_weights=known.ridge_weights,
            predicted_with_activations=known.ridge_with_activations,
            reason=ridge.reason if ridge.value is None else "Computed, so there is no interval.",
        )
    dtype = profile.dtype or ("fp16" if device and "fp16" in device.flops else "")
    if device is not None and dtype in device.flops:
        activations = ridge_with_activations(device, dtype, *gemm) if gemm else None
        return replace(ridge, predicted_weights=weights_ridge(device, dtype), predicted_with_activations=activations)
    peaks = profile.peaks
    if peaks.flops and peaks.bandwidth and dtype in DTYPE_BYTES:
        return replace(ridge, predicted_weights=DTYPE_BYTES[dtype] * peaks.flops / (2 * peaks.bandwidth))
    return ridge


def _overhead_bound(ridge: Ridge, profile: Profile, fixed_seconds: float | None) -> Ridge:
    """Marks a ridge whose fixed part is mostly overhead: it then says nothing about moving weights."""
    known = [point.overhead_seconds for point in profile.points if point.overhead_seconds is not None]
    if not known or not fixed_seconds:
        return ridge
    return replace(ridge, overhead_bound=min(known) > OVERHEAD_BOUND * fixed_seconds)


def _recommend(
    profile: Profile, seconds: Floats, half_width: Floats, cliffs: tuple[Cliff, ...],
    objective: str, latency_target: float | None, levels: Levels,
) -> Recommendation:  # fmt: skip
    sizes = levels.batch_sizes
    throughput = sizes / seconds
    if latency_target is not None:
        index, limited_by, reason = _under_target(sizes, seconds, half_width, latency_target)
        objective = "latency"
    elif objective == "balanced":
        index = choose.most_balanced(sizes, seconds)
        limited_by, reason = "none", "The most throughput for the latency: it lies at the ridge."
    else:
        avoid = {int(s) for cliff in cliffs for s in sizes if cliff.batch_size <= s <= cliff.to_size}
        index = choose.smallest_near_best(sizes, seconds, avoid)
        limited_by, reason = wording.limit(profile, throughput)
    return Recommendation(
        batch_size=int(sizes[index]),
        objective=objective,
        reason=reason,
        limited_by=limited_by,
        measured=profile.source != "predicted",
        seconds=float(seconds[index]),
        throughput=float(throughput[index]),
        share_of_best=float(throughput[index] / throughput.max()),
        confidence=wording.confidence(levels, index, profile),
    )


def _under_target(sizes: Floats, seconds: Floats, half_width: Floats, target: float) -> tuple[int, str, str]:
    within = choose.within_target(seconds * np.exp(half_width), target)
    if not within:
        return 0, "target", f"No size answers within the target; {int(sizes[0])} comes nearest."
    index = max(within, key=lambda i: float(sizes[i] / seconds[i]))
    return index, "target", "The highest throughput whose upper interval stays under the target."
