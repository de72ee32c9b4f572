"""The order of one rank from its three queues: forwards to warm up, then forward, backward and weights in turn."""

from __future__ import annotations

import numpy as np

from microbatch.pipeline.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Integers,
    Schedule,
    encode,
    is_joined,
    joined,
)

_NOTHING = -1
Visits = tuple[Integers, Integers]
"""Stages and micro-batches, in the order in which a rank goes through them."""


def one_each(forwards: Visits, backwards: Visits, warm_up: int, count: int, *, delay: int | None = None) -> Integers:
    """A rank's actions: ``warm_up`` forwards, then one forward and one backward in turn, then what is left.

    Args:
        forwards: stages and micro-batches in the order of their forwards.
        backwards: the same in the order of their backwards.
        warm_up: forwards before the first pair; more than there are means all.
        count: micro-batches of the schedule.
        delay: None for full backwards B. Otherwise I, and from the pair of this number on also the oldest W.
    """
    first = encode(FORWARD, *forwards, count)
    warm_up = min(warm_up, len(first))
    if delay is None:
        return _in_turn(first, warm_up, encode(BACKWARD, *backwards, count))
    inputs, weights = (encode(kind, *backwards, count) for kind in (INPUT_GRADIENT, WEIGHT_GRADIENT))
    return _in_turn(first, warm_up, inputs, np.concatenate((np.full(delay, _NOTHING), weights)))


def _in_turn(forwards: Integers, warm_up: int, *queues: Integers) -> Integers:
    columns = (forwards[warm_up:], *queues)
    rows = np.full((max(map(len, columns)), len(columns)), _NOTHING, dtype=np.int64)
    for column, queue in enumerate(columns):
        rows[: len(queue), column] = queue
    flat = rows.ravel()
    return np.concatenate((forwards[:warm_up], flat[flat != _NOTHING]))


def in_groups(stages: tuple[int, ...], sizes: list[int]) -> Visits:
    """Depth first: a group of micro-batches through all stages of the rank, then the next group."""
    starts = np.cumsum([0, *sizes])
    stage = [np.repeat(stages, size) for size in sizes]
    micro_batch = [np.tile(np.arange(start, start + size), len(stages)) for start, size in zip(starts, sizes)]
    return np.concatenate(stage), np.concatenate(micro_batch)


def group_sizes(ranks: int, count: int) -> list[int]:
    """Micro-batches in groups of at least p, larger ones first; all in one where there are fewer than 2·p.

    A group of fewer than p would make the ranks wait for each other in a circle, since the last rank hands a
    micro-batch back to the first for its next stage.
    """
    rounds = max(1, count // ranks)
    size, larger = divmod(count, rounds)
    return [size + 1] * larger + [size] * (rounds - larger)


def renumber(orders: list[Integers], new: Integers, count: int) -> list[Integers]:
    """Orders with only the micro-batches kept that have a new number: what is left needs none of the others.

    Args:
        orders: of all ranks, made for ``len(new)`` micro-batches.
        new: the new number of each micro-batch; below zero for one that is left out.
        count: micro-batches that are kept. Half of a joined pair goes on alone.
    """
    return [_renumbered(order, new, count) for order in orders]


def _renumbered(order: Integers, new: Integers, count: int) -> Integers:
    stage, micro_batch = np.divmod(order >> 3, len(new))
    kept = new[micro_batch] >= 0
    goes_on = is_joined(order) & np.append(kept[1:], False)
    codes = encode(0, stage, new[micro_batch], count) | (order & 3)
    return np.where(goes_on, joined(codes), codes)[kept]


def first_of(made: int, count: int) -> Integers:
    """New numbers that keep the first ``count`` of ``made`` micro-batches."""
    return np.where(np.arange(made) < count, np.arange(made), -1)


def slots_of(schedule: Schedule) -> list[int]:
    """When each action would start if all took one slot and messages none."""
    needs, rank = schedule.needs.tolist(), schedule.rank.tolist()
    free, start = [0] * schedule.ranks, [0] * len(needs)
    for index in schedule.turns:
        needed = needs[index]
        start[index] = max(free[rank[index]], start[needed] + 1 if needed >= 0 else 0)
        free[rank[index]] = start[index] + 1
    return start
