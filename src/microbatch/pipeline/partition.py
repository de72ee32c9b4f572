"""Layers cut into stages so that the slowest rank is as fast as it can be, within a memory limit.

Stages are stretches of layers, every layer in exactly one. With one stage per rank, or two in a V, the slowest *rank*
is made as fast as possible; with any other placement the slowest *stage*, which bounds the ranks. Both by dynamic
programmes over all cuts, so that no other cut is better. Where a rank holds several stages in a loop, each of them may
take an even share of the rank's memory; so a limit is kept, and a cut that is only just possible can be missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from microbatch.errors import DoesNotFit, InvalidSettings
from microbatch.pipeline.costs import Floats
from microbatch.pipeline.placement import Placement, stages_of, zigzag
from microbatch.units import format_bytes, format_number

Bounds = tuple[tuple[int, int], ...]
"""First layer and the one behind the last, per stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost:
    """What one layer costs; embeddings and the head are layers like others.

    Attributes:
        name: as in the model.
        seconds: forward, input gradient and weight gradient of one micro-batch.
        weight_bytes: weights, gradients and optimizer state.
        activation_bytes: what its forward keeps of one micro-batch.
        shares: the name of a weight that it shares with other layers (tied embeddings); a rank holds it once, and
            several ranks hold a copy each.
        shared_bytes: the part of ``weight_bytes`` that is shared.
    """

    name: str
    seconds: float
    weight_bytes: float = 0.0
    activation_bytes: float = 0.0
    shares: str = ""
    shared_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """Stages, and what each rank gets.

    Attributes:
        stages: layer names, per stage.
        bounds: the same as numbers of layers.
        placement: the rank of each stage.
        seconds_per_stage: of one micro-batch.
        seconds_per_rank: of one micro-batch through all stages of the rank.
        bytes_per_rank: weights once, activations as often as micro-batches are in flight.
        even_seconds: the slowest rank if every stage had the same number of layers.
    """

    stages: tuple[tuple[str, ...], ...]
    bounds: Bounds
    placement: Placement
    seconds_per_stage: tuple[float, ...]
    seconds_per_rank: tuple[float, ...]
    bytes_per_rank: tuple[float, ...]
    even_seconds: float

    @property
    def bottleneck(self) -> float:
        """Seconds of the slowest rank; the pipeline's rate is one micro-batch in that time."""
        return max(self.seconds_per_rank)

    @property
    def gain(self) -> float:
        """The factor over stages of equal layer counts that the costs promise."""
        return self.even_seconds / self.bottleneck

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "stages": [list(names) for names in self.stages], "placement": list(self.placement),
            "seconds_per_stage": list(self.seconds_per_stage), "seconds_per_rank": list(self.seconds_per_rank),
            "bytes_per_rank": list(self.bytes_per_rank), "bottleneck": self.bottleneck, "gain": self.gain,
        }  # fmt: skip


def partition(
    layers: Sequence[LayerCost],
    placement: Placement,
    *,
    in_flight: Sequence[float] | None = None,
    memory_limit_bytes: float | None = None,
) -> Partition:
    """The best cuts.

    Args:
        layers: in the order of the model.
        placement: the rank of each stage, as of `Schedule.placement`.
        in_flight: micro-batches that each rank holds at most (`Timeline.peak_activations`); 1 unless given.
        memory_limit_bytes: of each rank.

    Raises:
        InvalidSettings: fewer layers than stages.
        DoesNotFit: no cut keeps every rank within the limit; the rank that fails first is named.
    """
    held = _held(placement, in_flight)
    if len(layers) < len(placement):
        raise InvalidSettings(
            f"{len(layers)} layers cannot make {len(placement)} stages.",
            f"Nearest: {len(layers)} stages, or cut layers into smaller ones.",
        )
    limit = np.inf if memory_limit_bytes is None else float(memory_limit_bytes)
    ranks = 1 + max(placement)
    in_a_v = len(placement) == 2 * ranks and placement == zigzag(ranks)
    bounds = _cut_v(layers, ranks, held, limit) if in_a_v else _cut_stages(layers, placement, held, limit)
    if bounds is None:
        raise _no_cut(layers, placement, held, limit)
    return _described(layers, placement, bounds, held)


def partition_at(
    layers: Sequence[LayerCost], cuts: Sequence[str], placement: Placement, *, in_flight: Sequence[float] | None = None
) -> Partition:
    """Stages as the user cuts them: each name begins a new stage.

    Raises:
        InvalidSettings: a name that no layer has, out of order or given twice, or the wrong number of cuts.
    """
    names = [layer.name for layer in layers]
    unknown = [cut for cut in cuts if cut not in names]
    if unknown:
        raise InvalidSettings(f"No layer is called {unknown[0]!r}.", f"Layers are {', '.join(names[:12])}.")
    places = [names.index(cut) for cut in cuts]
    if len(cuts) != len(placement) - 1:
        raise InvalidSettings(
            f"{len(cuts)} cuts make {len(cuts) + 1} stages, not {len(placement)}.", f"Give {len(placement) - 1} cuts."
        )
    edges = [0, *places, len(layers)]
    if any(one >= two for one, two in pairwise(edges)):
        raise InvalidSettings(f"The cuts {', '.join(cuts)} do not follow the order of the layers.", "Sort them.")
    return _described(layers, placement, tuple(pairwise(edges)), _held(placement, in_flight))


def even_bounds(layers: int, stages: int) -> Bounds:
    """Stages of the same number of layers, the first ones a layer longer where they do not divide."""
    size, longer = divmod(layers, stages)
    edges = np.cumsum([0, *(size + (stage < longer) for stage in range(stages))]).tolist()
    return tuple(pairwise(edges))


def _held(placement: Placement, in_flight: Sequence[float] | None) -> tuple[float, ...]:
    ranks = 1 + max(placement)
    if in_flight is None:
        return (1.0,) * ranks
    if len(in_flight) != ranks:
        raise InvalidSettings(f"in_flight has {len(in_flight)} values for {ranks} ranks.", "Give one for each rank.")
    return tuple(float(number) for number in in_flight)


def _bytes(layers: Sequence[LayerCost], pieces: Sequence[tuple[int, int]], held: float) -> float:
    """What a rank with these stretches needs; a weight that several of its layers share counts once."""
    mine = [layer for first, last in pieces for layer in layers[first:last]]
    shared = {layer.shares: layer.shared_bytes for layer in mine if layer.shares}
    own = sum(layer.weight_bytes - (layer.shared_bytes if layer.shares else 0.0) for layer in mine)
    return own + sum(shared.values()) + held * sum(layer.activation_bytes for layer in mine)


def _seconds(layers: Sequence[LayerCost]) -> Floats:
    """Seconds of all layers before each, so that a stretch is a difference."""
    return np.concatenate(([0.0], np.cumsum([layer.seconds for layer in layers])))


def _cut_stages(
    layers: Sequence[LayerCost], placement: Placement, held: Sequence[float], limit: float
) -> Bounds | None:
    """The cut whose slowest stage is fastest: best[s][j] = min over i of max(best[s−1][i], seconds of i..j)."""
    count, stages = len(layers), len(placement)
    sums = _seconds(layers)
    best = np.full((stages + 1, count + 1), np.inf)
    came = np.zeros((stages + 1, count + 1), dtype=int)
    best[0, 0] = 0.0
    for stage in range(1, stages + 1):
        allowed = _stretches_within(layers, held[placement[stage - 1]], limit / placement.count(placement[stage - 1]))
        for last in range(stage, count - (stages - stage) + 1):
            slowest = np.maximum(best[stage - 1, :last], sums[last] - sums[:last])
            slowest[~allowed[:last, last]] = np.inf
            came[stage, last] = int(slowest.argmin())
            best[stage, last] = slowest[came[stage, last]]
    if not np.isfinite(best[stages, count]):
        return None
    edges = [count]
    for stage in range(stages, 0, -1):
        edges.append(int(came[stage, edges[-1]]))
    return tuple(zip(edges[::-1], edges[-2::-1]))


def _stretches_within(layers: Sequence[LayerCost], held: float, limit: float) -> np.ndarray:
    """For each first layer and the one behind the last, whether the stretch stays within the limit."""
    count = len(layers)
    allowed = np.ones((count + 1, count + 1), dtype=bool)
    if np.isfinite(limit):
        for first in range(count):
            for last in range(first + 1, count + 1):
                if _bytes(layers, ((first, last),), held) > limit:
                    allowed[first, last:] = False
                    break
    return allowed


def _cut_v(layers: Sequence[LayerCost], ranks: int, held: Sequence[float], limit: float) -> Bounds | None:
    """Two stages per rank in a V, by halving the bound on the slowest rank until only one cut is left below it."""
    sums = _seconds(layers)
    best = _v_within(layers, sums, ranks, held, limit, float(sums[-1]))
    if best is None:
        return None
    low, high = float(sums[-1]) / ranks, _slowest_of_v(sums, best, ranks)
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        found = _v_within(layers, sums, ranks, held, limit, middle)
        slowest = np.inf if found is None else _slowest_of_v(sums, found, ranks)
        if found is not None and slowest < high:
            best, high = found, slowest
        else:
            low = middle
    return _levelled(layers, sums, ranks, held, limit, best)


def _levelled(
    layers: Sequence[LayerCost], sums: Floats, ranks: int, held: Sequence[float], limit: float, best: Bounds
) -> Bounds:
    """Of all cuts whose slowest rank is as fast, the one whose slowest stage is fastest: micro-batches then follow each
    other without waiting for a long stage."""
    most = _slowest_of_v(sums, best, ranks)
    low, high = float(sums[-1]) / (2 * ranks), _slowest_stage(sums, best)
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        found = _v_within(layers, sums, ranks, held, limit, most, middle)
        slowest = np.inf if found is None else _slowest_stage(sums, found)
        if found is not None and slowest < high:
            best, high = found, slowest
        else:
            low = middle
    return best


def _slowest_stage(sums: Floats, bounds: Bounds) -> float:
    return max(float(sums[last] - sums[first]) for first, last in bounds)


def _slowest_of_v(sums: Floats, bounds: Bounds, ranks: int) -> float:
    stage = [float(sums[last] - sums[first]) for first, last in bounds]
    return max(stage[rank] + stage[2 * ranks - 1 - rank] for rank in range(ranks))


def _v_within(
    layers: Sequence[LayerCost],
    sums: Floats,
    ranks: int,
    held: Sequence[float],
    limit: float,
    most: float,
    longest: float = np.inf,
) -> Bounds | None:
    """A cut in which no rank takes longer than ``most``, and no stage longer than ``longest``, or None.

    From the outside in: with the first i layers given to ranks 0..r, give as many of the last layers as possible to
    the same ranks, since more at the outside never makes the inside harder.
    """
    count, slack, cap = len(layers), most * (1 + 1e-12), longest * (1 + 1e-12)
    reach: dict[int, tuple[int, Bounds]] = {0: (0, ())}
    for rank in range(ranks - 1):
        left = 2 * (ranks - 1 - rank)
        following: dict[int, tuple[int, Bounds]] = {}
        for taken, (behind, pieces) in reach.items():
            for first in range(taken + 1, count - behind - left):
                spent = sums[first] - sums[taken]
                if spent > min(slack, cap):
                    break
                tail = _longest_tail(layers, sums, (taken, first), count - behind, min(slack - spent, cap),
                                     first + left, held[rank], limit)  # fmt: skip
                if tail and tail + behind > following.get(first, (0, ()))[0]:
                    both = ((taken, first), (count - behind - tail, count - behind))
                    following[first] = (behind + tail, (*pieces, *both))
        reach = following
    for taken, (behind, pieces) in reach.items():
        inner = (taken, count - behind)
        if sums[inner[1]] - sums[inner[0]] <= slack and _bytes(layers, (inner,), held[-1]) <= limit:
            middle = _halve(sums, inner)
            if max(sums[middle] - sums[inner[0]], sums[inner[1]] - sums[middle]) > cap:
                continue
            return (*pieces[0::2], (taken, middle), (middle, inner[1]), *pieces[1::2][::-1])
    return None


def _longest_tail(
    layers: Sequence[LayerCost],
    sums: Floats,
    head: tuple[int, int],
    end: int,
    room: float,
    least: int,
    held: float,
    limit: float,
) -> int:
    """How many layers before ``end`` the rank that has ``head`` can take as well; 0 for none."""
    first = max(int(np.searchsorted(sums, sums[end] - room * (1 + 1e-12) - 1e-300)), least)
    while first < end and _bytes(layers, (head, (first, end)), held) > limit:
        first += 1
    return max(end - first, 0)


def _halve(sums: Floats, inner: tuple[int, int]) -> int:
    """Where to cut the last rank's stretch in two stages of about the same time."""
    first, last = inner
    return int(np.abs(sums[first + 1 : last] - (sums[first] + sums[last]) / 2).argmin()) + first + 1


def _described(layers: Sequence[LayerCost], placement: Placement, bounds: Bounds, held: Sequence[float]) -> Partition:
    sums = _seconds(layers)
    ranks = 1 + max(placement)
    per_stage = [float(sums[last] - sums[first]) for first, last in bounds]
    even = even_bounds(len(layers), len(placement))
    return Partition(
        stages=tuple(tuple(layer.name for layer in layers[first:last]) for first, last in bounds),
        bounds=bounds,
        placement=placement,
        seconds_per_stage=tuple(per_stage),
        seconds_per_rank=_per_rank(per_stage, placement),
        bytes_per_rank=tuple(
            _bytes(layers, [bounds[stage] for stage in stages_of(placement, rank)], held[rank]) for rank in range(ranks)
        ),
        even_seconds=max(_per_rank([float(sums[last] - sums[first]) for first, last in even], placement)),
    )


def _per_rank(per_stage: Sequence[float], placement: Placement) -> tuple[float, ...]:
    return tuple(sum(per_stage[stage] for stage in stages_of(placement, rank)) for rank in range(1 + max(placement)))


def _no_cut(layers: Sequence[LayerCost], placement: Placement, held: Sequence[float], limit: float) -> DoesNotFit:
    least = _bytes(layers, ((0, len(layers)),), min(held)) / (1 + max(placement))
    return DoesNotFit(
        f"No cut of {len(layers)} layers into {len(placement)} stages keeps every rank within {format_bytes(limit)}; "
        f"an even share alone is {format_bytes(least)}, with up to {format_number(max(held))} micro-batches in flight.",
        "Take more ranks, smaller micro-batches, a schedule that holds fewer, or recompute activations.",
    )
