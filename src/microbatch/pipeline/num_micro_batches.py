"""Into how many micro-batches a pipeline cuts a batch: many fill it, few keep pieces large enough to be fast.

Costs are measured at a few sizes of pieces; what a whole step takes, and holds, follows from them by simulation. No
torch, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from microbatch.errors import DoesNotFit
from microbatch.pipeline.costs import Costs
from microbatch.pipeline.schedule import Schedule
from microbatch.pipeline.simulate import simulate
from microbatch.units import format_bytes, format_seconds

MOST_PER_RANK = 16
"""Micro-batches per rank beyond which nothing is won: 1F1B then waits (p − 1)/(17p − 1) of a step, 6 % at most."""
IN_A_TRIAL = 2
"""Micro-batches per rank in a trial: each rank is seen at its start, in the middle and at its end."""
STILL_PAYS = 1.25
"""Fewer micro-batches are tried while the fewest so far take up to this many times the best time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """A number of micro-batches, and what is known of it.

    Attributes:
        num_micro_batches: m.
        micro_batch_size: items of the largest.
        seconds: of a step, simulated with measured costs; the slowest replica's.
        peak_bytes: of the rank with the least room.
        fits: whether every rank stays within its memory.
    """

    num_micro_batches: int
    micro_batch_size: int
    seconds: float
    peak_bytes: int
    fits: bool

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def numbers(items: int, ranks: int, most: int | None = None) -> list[int]:
    """Numbers to try, the most first: each has pieces of about twice the size of those before.

    >>> numbers(64, 2)
    [32, 16, 8, 4, 2, 1]
    >>> numbers(5, 2)
    [5, 3, 2, 1]
    """
    found = [most or min(items, MOST_PER_RANK * ranks)]
    while found[-1] > 1:
        found.append(-(-found[-1] // 2))
    return found


def is_over(tried: Sequence[Tried]) -> bool:
    """Whether fewer micro-batches, in larger pieces, cannot be better than what was tried: they neither fit nor pay."""
    if not tried:
        return False
    fitting = [one.seconds for one in tried if one.fits]
    return not tried[-1].fits or tried[-1].seconds > STILL_PAYS * min(fitting)


def larger(costs: Costs, factor: float) -> Costs:
    """What is held with pieces so many times as large, before they are run: at most so many times as much."""
    return replace(costs, activation_bytes=np.asarray(costs.activation_bytes, dtype=float) * factor)


def held(schedule: Schedule, costs: Costs, limits: Sequence[int]) -> tuple[int, bool]:
    """The peak of the rank with the least room, and whether every rank stays within its own limit."""
    peaks = simulate(schedule, costs).peak_bytes
    assert peaks is not None
    _, peak, limit = max((peak / limit, peak, limit) for peak, limit in zip(peaks, limits, strict=True))
    return peak, peak <= limit


def best(tried: Sequence[Tried], limit: int, source: str) -> Tried:
    """The shortest step of those that fit.

    Raises:
        DoesNotFit: none does.
    """
    fitting = [one for one in tried if one.fits]
    if not fitting:
        least = min(tried, key=lambda one: one.peak_bytes)
        raise DoesNotFit(
            f"{least.num_micro_batches} micro-batches of {least.micro_batch_size} need "
            f"{format_bytes(least.peak_bytes)} on one rank, which is too much for {format_bytes(limit)} ({source}).",
            "Take more ranks, a schedule that holds fewer micro-batches, a smaller batch, or recompute activations.",
        )
    return min(fitting, key=lambda one: one.seconds)


def reason(tried: Sequence[Tried], chosen: Tried, limit: int, source: str) -> str:
    """Why it was chosen, in one sentence."""
    listed = ", ".join(f"{one.num_micro_batches} {format_seconds(one.seconds)}" for one in tried if one.fits)
    text = f"the shortest step by measured costs of pieces of {chosen.micro_batch_size} ({listed})"
    beyond = [one for one in tried if not one.fits]
    if beyond:
        text += (
            f"; {beyond[0].num_micro_batches} would hold {format_bytes(beyond[0].peak_bytes)}, too much for "
            f"{format_bytes(limit)} ({source})"
        )
    return text
