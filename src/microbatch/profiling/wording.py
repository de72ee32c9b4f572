"""Sentences about a curve: what limited the choice, what to doubt, why utilisation rises or not."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from microbatch.curves.cliffs import EXACT_GAP
from microbatch.curves.explanation import Binding
from microbatch.curves.levels import Floats, Levels
from microbatch.curves.objective import NEAR_BEST, STILL_RISING
from microbatch.curves.profile import Profile
from microbatch.units import format_percent, format_seconds

BUSY_ELSEWHERE = 0.15
STEALING = 0.05
FEW_SIZES = 8


def limit(profile: Profile, throughput: Floats) -> tuple[str, str]:
    """(limited_by, reason) of a choice by throughput."""
    if profile.memory and profile.memory.predicted_largest == 0 and profile.source == "predicted":
        return "memory", "It does not fit in memory, whatever the batch."
    sizes = np.array(profile.batch_sizes)
    half = throughput[sizes <= sizes[-1] / 2]
    rising = (
        len(half) > 0 and throughput[-1] > STILL_RISING * half.max() and throughput[-1] >= NEAR_BEST * throughput.max()
    )
    if not rising:
        return "saturated", "The smallest size within 2 % of the best throughput, outside the zones to avoid."
    largest = profile.batch_sizes[-1]
    ended = {
        "memory": ("memory", f"{largest} is the largest that fits in memory"),
        "budget": ("budget", f"the time budget ended at {largest}"),
        "limit": ("range", f"{largest} was the limit given"),
    }.get(profile.stopped_by, ("range", f"{largest} is the largest size tried"))
    return ended[0], f"Throughput still rises at the largest size tried: {ended[1]}."


def confidence(levels: Levels, index: int, profile: Profile) -> str:
    """high: each time is known within 1 % on a quiet machine; low: one time per size, or uncertain by over 2 %.

    A prediction is low from a datasheet alone, and medium where the device's file holds constants fitted to it.
    """
    if profile.prediction is not None:
        return "medium" if profile.prediction.fitted else "low"
    if levels.sigma is None:
        return "low"
    error = float(max(levels.standard_error[index], np.median(levels.standard_error)))
    environment = profile.environment
    disturbed = (environment.steal or 0) > STEALING or (environment.busy_elsewhere or 0) > BUSY_ELSEWHERE
    if error > 0.02:
        return "low"
    return "medium" if error > 0.01 or disturbed or len(levels.batch_sizes) < FEW_SIZES else "high"


def warnings(profile: Profile, levels: Levels) -> tuple[str, ...]:
    """What a reader must know before trusting the result."""
    uncounted = f"FLOPs of {', '.join(profile.uncounted)} are not counted: utilisation is a lower bound."
    if profile.source == "predicted":
        return (uncounted.replace("utilisation", "the time"),) if profile.uncounted else ()
    sizes = [int(size) for size in levels.batch_sizes]
    found: list[str] = []
    if levels.sigma is None:
        found.append("Each size has one time only, so nothing here has an interval; repeat the sizes to get one.")
    wide = [(a, b) for a, b in pairwise(sizes) if b / a > EXACT_GAP and b - a > 1]
    if len(sizes) < FEW_SIZES:
        found.append(f"{len(sizes)} sizes are too few to exclude cliffs between them.")
    elif wide:
        a, b = max(wide, key=lambda pair: pair[1] / pair[0])
        found.append(f"{len(wide)} gaps are wider than 15 %, the widest from {a} to {b}: a cliff inside one would show "
                     f"only in part.")  # fmt: skip
    environment = profile.environment
    if (environment.busy_elsewhere or 0) > BUSY_ELSEWHERE:
        found.append(f"Other processes used {format_percent(environment.busy_elsewhere or 0)} of the machine.")
    if (environment.steal or 0) > STEALING:
        found.append(f"The hypervisor withheld {format_percent(environment.steal or 0)} of the machine's time.")
    if environment.throttled:
        found.append("The clock was throttled during the run.")
    if profile.uncounted:
        found.append(uncounted)
    return tuple(found)


def utilisation(points: tuple[Binding, ...], recommended: int) -> str:
    """Why utilisation did or did not rise with the batch; empty where the peaks are unknown."""
    known = [point for point in points if point.bound]
    if not known:
        return ""
    first, last = known[0], known[-1]
    chosen = next((point for point in known if point.batch_size == recommended), last)
    parts = [_binds(point) for point in dict.fromkeys((first, chosen, last))]
    if chosen.compute_utilisation is not None and chosen.compute_utilisation >= 0.7:
        parts.append(f"A larger batch than {chosen.batch_size} has little left to gain.")
    busy = [p for p in known if p.overhead_share is not None and p.overhead_share > 0.3]
    if busy:
        share = busy[0].overhead_share or 0.0
        parts.append(
            f"At {busy[0].batch_size}, {format_percent(share)} of the time ({format_seconds(share * busy[0].seconds)}) "
            f"passes outside all operators: a larger batch shares it out, but does not remove it."
        )
    parts.append(
        "The utilisation that a driver reports is the share of time in which anything ran at all, not the share of "
        "the device's rate that was used."
    )
    return " ".join(parts)


def _binds(point: Binding) -> str:
    rates = [
        f"{format_percent(share)} of {name}"
        for name, share in (("peak FLOP/s", point.compute_utilisation), ("bandwidth", point.bandwidth_utilisation))
        if share is not None
    ]
    what = {"memory": "moving data binds", "compute": "arithmetic binds", "overhead": "overhead binds"}
    return f"At {point.batch_size} {what.get(point.bound, 'nothing binds alone')} ({', '.join(rates)})."
