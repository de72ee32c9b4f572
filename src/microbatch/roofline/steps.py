"""Why the predicted time rises between two sizes: the operators that rise most, and what their time is made of."""

from __future__ import annotations

import re
from dataclasses import dataclass

from microbatch.roofline.operator_time import OperatorTime
from microbatch.roofline.time import CallTime
from microbatch.units import format_percent
from microbatch.work.operators import Operator, Work

_TILES = re.compile(r"(\d+) tiles? in (\d+) waves? of (\d+)x(\d+)")
"""What a time of tiles says of itself, see `OperatorTime.evidence`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rise:
    """What makes the call slower: cause (tile, wave, kernel_switch, overhead or unknown), evidence, layer."""

    cause: str
    evidence: str
    layer: str


def explain_rise(work: Work, before: CallTime, after: CallTime) -> Rise:
    """What rises most from one call to another, and why."""
    gains = [
        operator.repeat * (slow.seconds - fast.seconds)
        for operator, fast, slow in zip(work.operators, before.operators, after.operators, strict=True)
    ]
    worst = max(range(len(gains)), key=gains.__getitem__)
    operator, fast, slow = work.operators[worst], before.operators[worst], after.operators[worst]
    cause, told = _cause(fast, slow)
    share = gains[worst] / (after.seconds - before.seconds) if after.seconds > before.seconds else 1.0
    part = f", {format_percent(min(share, 1.0))} of the rise" if share < 0.995 else ""
    return Rise(cause=cause, evidence=f"{told} ({_name(operator)}{part}).", layer=operator.layer)


def _cause(fast: OperatorTime, slow: OperatorTime) -> tuple[str, str]:
    one, other = _TILES.search(fast.evidence), _TILES.search(slow.evidence)
    if one and other:
        return _tiles([int(group) for group in one.groups()], [int(group) for group in other.groups()])
    if slow.overhead_seconds - fast.overhead_seconds > 0.5 * (slow.seconds - fast.seconds):
        return "overhead", "more time around the kernel"
    if fast.evidence != slow.evidence:
        return "kernel_switch", f"{fast.evidence or 'one way'} before, {slow.evidence or 'another'} after"
    return "unknown", fast.evidence or "the time of one operator rises"


def _tiles(before: list[int], after: list[int]) -> tuple[str, str]:
    tile = f"tile {after[2]}x{after[3]}"
    if before[2:] != after[2:]:
        return "kernel_switch", f"tiles of {after[2]}x{after[3]} instead of {before[2]}x{before[3]}"
    if after[1] == before[1] + 1:
        return "wave", f"wave {after[1]}: {before[0]} -> {after[0]} tiles, {tile}"
    rows = f"{before[0]} -> {after[0]} tiles in {before[1]} -> {after[1]} waves, {tile}"
    return "tile", f"a new row of tiles: {rows}"


def _name(operator: Operator) -> str:
    again = f", {operator.repeat} times" if operator.repeat > 1 else ""
    return f"{operator.layer or operator.name}{again}"
