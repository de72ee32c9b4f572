"""Lays a prediction beside a measurement of the same model, and says where they differ and why. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from microbatch.curves.beside import Beside, BesidePoint
from microbatch.curves.codec import load_profile
from microbatch.curves.explanation import Cliff, Explanation
from microbatch.curves.levels import find_levels
from microbatch.curves.profile import Profile
from microbatch.errors import InvalidProfile, NoAnswer
from microbatch.profiling.beside_layers import layer_finding
from microbatch.profiling.explain import explain
from microbatch.units import format_bytes, format_number, format_percent, format_rate, format_seconds

NOTABLE = 0.10
"""Differences smaller than this are not put into words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A prediction and a measurement, each with what it means; `told` is None where the measurement is too noisy."""

    predicted: Explanation
    measured: Profile
    told: Explanation | None
    points: tuple[BesidePoint, ...]


def lay_beside(predicted: Explanation, measured: Profile | str | Path) -> Explanation:
    """The prediction with a `Beside` in it.

    Args:
        predicted: what a predicted profile means; best computed at the measured sizes too (`predict(sizes=...)`).
        measured: a measured profile of the same model in the same mode, or the path of one, or of a CSV.

    Raises:
        InvalidProfile: the file cannot be used, is a prediction itself, was measured in another mode, or has no size
            in the prediction's range.
    """
    profile = load_profile(measured)
    _check(predicted.profile, profile)
    try:
        told = explain(profile)
    except NoAnswer:
        told = None
    points = _points(predicted, profile, told)
    pair = Pair(predicted=predicted, measured=profile, told=told, points=points)
    errors = np.array([point.error for point in points])
    return replace(
        predicted,
        beside=Beside(
            model=profile.model,
            device=profile.environment.device,
            median_error=float(np.median(np.abs(errors))),
            p90_error=float(np.percentile(np.abs(errors), 90)),
            bias=float(np.median(errors)),
            points=points,
            findings=tuple(finding for finding in (find(pair) for find in FINDINGS) if finding),
        ),
    )


def _check(predicted: Profile, measured: Profile) -> None:
    if measured.source == "predicted":
        raise InvalidProfile(f"{measured.model or 'That profile'} was predicted, not measured.", "Give a measured one.")
    modes = {measured.mode, predicted.mode}
    if measured.source != "csv" and len(modes) == 2 and modes != {"inference", "prefill"}:
        raise InvalidProfile(
            f"{measured.model or 'That profile'} was measured in mode {measured.mode}, and {predicted.mode} is "
            f"predicted.",
            f"Add --mode {measured.mode}.",
        )


def _points(predicted: Explanation, measured: Profile, told: Explanation | None) -> tuple[BesidePoint, ...]:
    """Measured sizes within the predicted range, read between neighbours on straight lines in logarithms."""
    sizes = [point.batch_size for point in predicted.points]
    seconds = [point.seconds for point in predicted.points]
    taken = _times(measured, told)
    found = tuple(
        _point(size, time, float(np.exp(np.interp(np.log(size), np.log(sizes), np.log(seconds)))), size in sizes)
        for size, time in taken.items()
        if sizes[0] <= size <= sizes[-1]
    )
    if not found:
        raise InvalidProfile(
            f"{measured.model or 'That profile'} holds sizes {min(taken)} to {max(taken)}; the prediction holds "
            f"{sizes[0]} to {sizes[-1]}.",
            "Predict those sizes too, with a larger --max-batch.",
        )
    return found


def _times(measured: Profile, told: Explanation | None) -> dict[int, float]:
    """Median times, the machine's drift taken out where it is known."""
    if told is not None:
        return {point.batch_size: point.seconds for point in told.points}
    levels = find_levels(measured.points)
    return {int(size): float(np.exp(np.median(x))) for size, x in zip(levels.batch_sizes, levels.samples)}


def _point(size: int, measured: float, predicted: float, computed: bool) -> BesidePoint:
    error = predicted / measured - 1
    return BesidePoint(batch_size=size, measured=measured, predicted=predicted, error=error, computed=computed)


def _identity(pair: Pair) -> str:
    """Profiles of another model or dtype are laid beside all the same, but never silently."""
    here, there = pair.predicted.profile, pair.measured
    for name, one, other in (
        ("model", here.model, there.model), ("dtype", here.dtype, there.dtype),
    ):  # fmt: skip
        if one and other and one != other and there.source != "csv":
            return f"The {name} differs: {one} is predicted, {other} was measured."
    return ""


def _ends(pair: Pair) -> str:
    """Which end of the curve is off: below the ridge the weights' way binds, above it arithmetic."""
    ridge = pair.told.ridge.value if pair.told else None
    if ridge is None:
        return ""
    small = [point.error for point in pair.points if point.batch_size <= ridge / 2]
    large = [point.error for point in pair.points if point.batch_size >= 2 * ridge]
    if not small or not large:
        return ""
    below, above = median(small), median(large)
    if abs(below - above) < NOTABLE and max(abs(below), abs(above)) < NOTABLE:
        return ""
    part = "time that does not grow with the batch (weights, overhead)"
    other = "time for each item (arithmetic, activations)"
    worse = part if abs(below) > abs(above) else other
    return (
        f"Below the measured ridge ({format_number(round(ridge))}) it is {_signed(below)}, above it {_signed(above)}: "
        f"the {worse} is what is misjudged most."
    )


def _worst(pair: Pair) -> str:
    worst = max(pair.points, key=lambda point: abs(point.error))
    if abs(worst.error) < NOTABLE:
        return f"No size is off by {format_percent(NOTABLE)} or more."
    return (
        f"Furthest off at {format_number(worst.batch_size)}, {_signed(worst.error)}: "
        f"{format_seconds(worst.predicted)} predicted, {format_seconds(worst.measured)} measured."
    )


def _overhead(pair: Pair) -> str:
    computed = {point.batch_size: point for point in pair.predicted.profile.points}
    both = [
        (point.batch_size, float(median(point.samples)), point.overhead_seconds, here.overhead_seconds)
        for point in pair.measured.points
        if point.overhead_seconds is not None
        and (here := computed.get(point.batch_size)) is not None
        and here.overhead_seconds is not None
    ]
    if not both:
        return ""
    size, seconds, measured, predicted = max(both, key=lambda row: abs(row[2] - row[3]) / row[1])
    if abs(measured - predicted) < NOTABLE * seconds:
        return ""
    return (
        f"Overhead at {format_number(size)}: {format_seconds(predicted)} predicted, {format_seconds(measured)} "
        f"measured, {format_percent(abs(measured - predicted) / seconds)} of the measured time."
    )


def _layers(pair: Pair) -> str:
    return layer_finding(pair.predicted.profile, pair.measured, NOTABLE)


def _cliffs(pair: Pair) -> str:
    if pair.told is None:
        return ""
    top = pair.points[-1].batch_size
    here = [cliff for cliff in pair.predicted.cliffs if cliff.batch_size <= top]
    there = list(pair.told.cliffs)
    only_there = [cliff.batch_size for cliff in there if not any(_meet(cliff, other) for other in here)]
    only_here = [cliff.batch_size for cliff in here if not any(_meet(cliff, other) for other in there)]
    told = [
        f"{name}: {_list(sizes)}"
        for name, sizes in (
            ("cliffs measured but not predicted", only_there), ("predicted but not measured", only_here),
        )
        if sizes
    ]  # fmt: skip
    if told:
        sentence = "; ".join(told)
        return f"{sentence[0].upper()}{sentence[1:]}."
    return f"The same cliffs, {_list([cliff.batch_size for cliff in there])}." if there else ""


def _meet(one: Cliff, other: Cliff) -> bool:
    """Two cliffs are the same when their edges, each in (from, at], may be."""
    return one.from_size < other.batch_size and other.from_size < one.batch_size


def _list(sizes: list[int]) -> str:
    shown = ", ".join(map(str, sizes[:6]))
    return f"{shown} and {len(sizes) - 6} more" if len(sizes) > 6 else shown


def _memory(pair: Pair) -> str:
    computed = {point.batch_size: point.predicted_peak_bytes for point in pair.predicted.profile.points}
    both = [(p.batch_size, p.peak_bytes, computed.get(p.batch_size)) for p in pair.measured.points if p.peak_bytes]
    off = [(size, there, here) for size, there, here in both if here and there]
    if not off:
        return ""
    size, there, here = max(off, key=lambda row: abs(row[2] / row[1] - 1))
    if abs(here / there - 1) < NOTABLE:
        return ""
    return f"Memory at {format_number(size)}: {format_bytes(here)} predicted, {format_bytes(there)} measured."


def _peaks(pair: Pair) -> str:
    here, there = pair.predicted.profile.peaks, pair.measured.peaks
    rows = (("FLOP", "peak", here.flops, there.flops), ("B", "bandwidth", here.bandwidth, there.bandwidth))
    told = [
        f"{name} {format_rate(one, unit)} in the prediction, {format_rate(other, unit)} measured"
        for unit, name, one, other in rows
        if one and other and abs(one / other - 1) >= NOTABLE
    ]
    return f"The device differs: {'; '.join(told)}." if told else ""


def _signed(error: float) -> str:
    if abs(error) < 0.005:
        return "right"
    return f"{format_percent(abs(error))} too {'slow' if error > 0 else 'fast'}"


FINDINGS = (_identity, _worst, _ends, _layers, _overhead, _cliffs, _memory, _peaks)
"""What is looked at, in the order in which it is told."""
