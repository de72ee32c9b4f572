"""Why the predicted time rises between two sizes: the operators that rise most, and what their time is made of."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from math import ceil

from microbatch.hardware.device_spec import DeviceSpec
from microbatch.roofline.cpu import FRESH
from microbatch.roofline.operator_time import OperatorTime
from microbatch.roofline.time import CallTime
from microbatch.units import format_percent, format_seconds
from microbatch.work.operators import Operator, Work

_TILES = re.compile(
    r"(?P<count>\d+) (?P<what>tile|block)s?(?: in (?P<waves>\d+) waves?)?(?: of (?P<shape>\d+x\d+))?"
    r"(?:, k in (?P<parts>\d+) parts)?"
)
"""What a time of tiles or blocks says of itself, see `OperatorTime.evidence`."""
_TILED = ("matmul", "convolution")
"""Kinds whose rows grow evenly with the batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """One size of a work, and the time of each operator there."""

    size: int
    sequence: float
    call: CallTime


@dataclass(frozen=True, kw_only=True, slots=True)
class Rise:
    """What makes the call slower: cause (a word of `curves.explanation`, or unknown), evidence, layer."""

    cause: str
    evidence: str
    layer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pair:
    """One operator at both sizes."""

    operator: Operator
    fast: OperatorTime
    slow: OperatorTime
    rows: tuple[float, float]
    multiprocessors: int | None


@dataclass(frozen=True, slots=True)
class _Found:
    """A cause, what shows it, and what comes of it."""

    cause: str
    told: str
    then: str = ""


def explain_rise(work: Work, spec: DeviceSpec, before: Moment, after: Moment) -> Rise:
    """What rises most from one size to another, and why; operators that differ in their layer only count together."""
    gains: defaultdict[Operator, float] = defaultdict(float)
    members: defaultdict[Operator, list[int]] = defaultdict(list)
    for index, operator in enumerate(work.operators):
        alike = replace(operator, layer="", repeat=1)
        gains[alike] += operator.repeat * _gain(before, after, index)
        members[alike].append(index)
    worst = max(gains, key=gains.__getitem__)
    first = members[worst][0]
    found = _cause(_pair(work.operators[first], spec, before, after, first))
    total = after.call.seconds - before.call.seconds
    share = gains[worst] / total if total > 0 else 1.0
    part = f", {format_percent(min(share, 1.0))} of the rise" if share < 0.995 else ""
    name = _name([work.operators[index] for index in members[worst]])
    then = f"; {found.then}" if found.then else ""
    return Rise(cause=found.cause, evidence=f"{found.told} ({name}{part}){then}.", layer=work.operators[first].layer)


def _gain(before: Moment, after: Moment, index: int) -> float:
    return after.call.operators[index].seconds - before.call.operators[index].seconds


def _pair(operator: Operator, spec: DeviceSpec, before: Moment, after: Moment, index: int) -> _Pair:
    gemm = operator.gemm
    tiled = gemm is not None and operator.kind in _TILED
    rows = tuple(gemm.m(moment.size, moment.sequence) if gemm and tiled else 0.0 for moment in (before, after))
    return _Pair(
        operator=operator,
        fast=before.call.operators[index],
        slow=after.call.operators[index],
        rows=(rows[0], rows[1]),
        multiprocessors=spec.multiprocessors,
    )


def _cause(pair: _Pair) -> _Found:
    fast, slow = pair.fast, pair.slow
    one, other = _TILES.fullmatch(fast.evidence), _TILES.fullmatch(slow.evidence)
    if FRESH in slow.evidence and FRESH not in fast.evidence:
        return _Found("allocator", "blocks that large get fresh pages, which the system clears first")
    if one and other and one["what"] == other["what"]:
        told = _new_row(pair, one, other) or _tiles(one, other)
        if told is not None:
            return told
    elif fast.evidence != slow.evidence:
        return _Found("kernel_switch", f"{fast.evidence or 'one way'} before, {slow.evidence or 'another'} after")
    if slow.overhead_seconds - fast.overhead_seconds > 0.5 * (slow.seconds - fast.seconds):
        return _Found("overhead", "more time around the kernel")
    return _Found("unknown", _part(fast, slow))


def _new_row(pair: _Pair, one: re.Match[str], other: re.Match[str]) -> _Found | None:
    """Waves that the kernel from before the rise would need after it, whether or not another is taken there."""
    if not (one["shape"] and one["waves"] and pair.rows[0] and pair.multiprocessors):
        return None
    height = int(one["shape"].split("x")[0])
    before, after = (ceil(rows / height - 1e-6) for rows in pair.rows)
    if after <= before:
        return None
    tiles = round(int(one["count"]) * after / before)
    waves = ceil(tiles * int(one["parts"] or 1) / pair.multiprocessors)
    if waves <= int(one["waves"]):
        return None
    parts = f", k in {one['parts']} parts," if one["parts"] else ""
    counts = f"{one['count']} -> {tiles} tiles of {one['shape']}{parts} on {pair.multiprocessors} multiprocessors"
    same = (one["shape"], one["parts"]) == (other["shape"], other["parts"])
    cause = "wave" if waves == int(one["waves"]) + 1 else "tile"
    return _Found(cause, f"{counts}, {one['waves']} -> {waves} waves", "" if same else f"{other[0]} is then faster")


def _tiles(one: re.Match[str], other: re.Match[str]) -> _Found | None:
    """A wave more, a row of tiles more, or another kernel; None where tiles and waves stay as they were."""
    what, shape = other["what"], f" of {other['shape']}" if other["shape"] else ""
    if one["shape"] != other["shape"]:
        return _Found("kernel_switch", f"{what}s{shape} instead of {one['shape']}")
    if one["parts"] != other["parts"]:
        told = f"{what}s{shape}, k in {other['parts'] or 1} parts instead of {one['parts'] or 1}"
        return _Found("kernel_switch", told)
    counts = f"{one['count']} -> {other['count']} {what}s{shape}"
    before, after = int(one["waves"] or 0), int(other["waves"] or 0)
    if after > before:
        return _Found("wave" if after == before + 1 else "tile", f"{counts}, {before} -> {after} waves")
    return _Found("tile", counts) if one["count"] != other["count"] and not after else None


def _part(fast: OperatorTime, slow: OperatorTime) -> str:
    """Which part of one operator's time rises most."""
    parts = {
        "computing": slow.compute_seconds - fast.compute_seconds,
        "moving data": slow.memory_seconds - fast.memory_seconds,
        "overhead": slow.overhead_seconds - fast.overhead_seconds,
    }
    name = max(parts, key=lambda part: parts[part])
    return f"{name} takes {format_seconds(max(parts[name], 0.0))} more in one operator"


def _name(alike: list[Operator]) -> str:
    """``layers.0.mlp.up and 31 like it``"""
    others = sum(operator.repeat for operator in alike) - 1
    return f"{alike[0].layer or alike[0].name}{f' and {others} like it' if others else ''}"
