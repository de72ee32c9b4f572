"""The sizes to avoid in words: what each costs, why, how sure its edge is, and what to do instead."""

from __future__ import annotations

from itertools import pairwise
from math import log

from microbatch.curves.explanation import Cliff, Explanation
from microbatch.reporting.wording import clean, phrase, short, sizes
from microbatch.units import format_number, format_percent

CAUSES = {
    "tile": "Tile edge",
    "wave": "Another wave",
    "kernel_switch": "Kernel switch",
    "cache": "Out of cache",
    "compute": "Compute-bound",
    "overhead": "Overhead",
    "allocator": "Memory allocator",
    "padding": "Padded to a bucket",
    "unknown": "Cause unknown",
}
"""What each cause of a cliff is called."""

LINES_OF_CLIFFS = 4
"""A summary names at most so many zones to avoid; with more of them it names the three worst and the number."""

_CLOSE = 1.15
"""Sizes further apart than this may hide a cliff between them."""


def avoid(cliff: Cliff, unit: str) -> str:
    """``Avoid 129-160: +31 % time for +6 % rows. Cause, evidence. Pad to 168 or stay at 128.``

    Of the evidence only the first clause; the table of sizes to avoid has all of it.
    """
    zone = f"Avoid {sizes(cliff.batch_size, cliff.to_size)}: {price(cliff, unit)}."
    reason = because(cliff.cause, cliff.evidence.split("; ")[0])
    return " ".join(part for part in (zone, reason, edge(cliff), advice(cliff)) if part)


def price(cliff: Cliff, unit: str) -> str:
    """``+31 % time for +6 % rows``"""
    more = cliff.batch_size / cliff.from_size - 1
    time = f"{'+' if cliff.ratio >= 1 else '-'}{format_percent(abs(cliff.ratio - 1))}"
    return f"{time} time for +{format_percent(more)} {short(unit, 20)}"


def because(cause: str, evidence: str) -> str:
    """``Another wave: 86 -> 172 tiles on 108 multiprocessors.``"""
    named = CAUSES.get(cause, clean(cause))
    told = phrase(evidence)
    return f"{named}{'.' if told[0].isupper() else ':'} {told}." if told else f"{named}."


def edge(cliff: Cliff) -> str:
    """Where the edge lies when it was not found exactly; empty when it was."""
    if cliff.exact:
        return ""
    more = ", ".join(format_number(size) for size in cliff.proposed)
    span = f"The edge lies after {format_number(cliff.from_size)}, up to {format_number(cliff.batch_size)}"
    return f"{span}: measure {more} to find it." if more else f"{span}."


def advice(cliff: Cliff) -> str:
    """``Pad to 168 or stay at 128.``"""
    stay = f"tay at {format_number(cliff.from_size)}."
    return f"S{stay}" if cliff.pad_to is None else f"Pad to {format_number(cliff.pad_to)} or s{stay}"


def zones(explanation: Explanation) -> list[str]:
    """One line per zone to avoid, the three worst and a count when there are many, or that none was found."""
    cliffs = explanation.cliffs
    if not cliffs:
        return [no_zone(explanation)]
    shown = worst(cliffs)
    lines = [avoid(cliff, explanation.profile.unit) for cliff in shown]
    left = len(cliffs) - len(shown)
    return [*lines, f"{left} smaller cliffs are listed in the details."] if left else lines


def worst(cliffs: tuple[Cliff, ...]) -> list[Cliff]:
    """All cliffs when they are few, else the three with the largest excess, in order of batch size."""
    if len(cliffs) <= LINES_OF_CLIFFS:
        return list(cliffs)
    return sorted(sorted(cliffs, key=lambda cliff: -cliff.excess)[:3], key=lambda cliff: cliff.batch_size)


def no_zone(explanation: Explanation) -> str:
    """That no cliff was found, and whether the sizes were close enough together to say so."""
    if len(explanation.profile.points) == 1:
        return "One size cannot show a cliff: nothing is known about others."
    gap = widest_gap(explanation.profile.batch_sizes)
    if gap is None:
        return "No zone to avoid: no cliff of 5 % or more was found."
    return f"No cliff was found, but there are too few sizes to exclude one: nothing was run between {gap}."


def widest_gap(measured: tuple[int, ...]) -> str | None:
    """The widest gap, ``64 and 128``, when less than half of the range (in doublings) was sampled closely."""
    gaps = [(large / small, small, large) for small, large in pairwise(measured)]
    wide = [gap for gap in gaps if gap[0] > _CLOSE and gap[2] > gap[1] + 1]
    if sum(log(gap[0]) for gap in wide) <= log(measured[-1] / measured[0]) / 2:
        return None
    _, small, large = max(wide)
    return f"{format_number(small)} and {format_number(large)}"
