"""Which of the waiting items share a batch: the first in order of service and those that fit to it.

The head of the queue is always in, so nothing starves however rare its length. No torch, clock or thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from microbatch.serving.decisions.view import QueueView, Waiting

MOST_PADDED = 1.5
"""Padded work (items x longest) over real work, at most."""


def prefix(view: QueueView, limit: int) -> range:
    """The first `limit` items: for items that are all alike."""
    return range(min(limit, view.num_waiting, len(view.waiting)))


def fitting(view: QueueView, limit: int) -> Sequence[int]:
    """Places of up to `limit` items with the head among them: one key, padding and token budget within bounds.

    Under backlog these are the items nearest to the head in length: sorted by length, the largest run around the
    head whose padded work is at most `MOST_PADDED` x its real work and within the token budget. Items of one length
    are taken in order of service.
    """
    if view.uniform and view.token_budget is None:
        return prefix(view, limit)
    head = view.waiting[0]
    alike = [place for place, item in enumerate(view.waiting) if item.key == head.key]
    if all(view.waiting[place].length == head.length for place in alike):
        return _within_budget(view, alike, limit)
    return _around_head(view.waiting, alike, limit, view.token_budget)


def work_of(items: Sequence[Waiting]) -> int:
    """What a batch costs: each item padded to the longest, or the sum of the costs, whichever is more."""
    return max(len(items) * max(item.length for item in items), sum(item.cost for item in items))


def _within_budget(view: QueueView, alike: list[int], limit: int) -> list[int]:
    chosen = alike[:limit]
    if view.token_budget is None:
        return chosen
    spent = list(accumulate(max(view.waiting[place].length, view.waiting[place].cost) for place in chosen))
    fit = sum(total <= view.token_budget for total in spent)
    return chosen[: max(1, fit)]


def _around_head(waiting: Sequence[Waiting], alike: list[int], limit: int, budget: int | None) -> list[int]:
    """The largest run that fits, for each longest item. Of one longest, adding shorter items only raises the padding,
    so a run is made longer downwards until it does not fit; runs no longer than the best so far are passed over."""
    order = sorted(alike, key=lambda place: (waiting[place].length, place))
    sums = [0, *accumulate(waiting[place].length for place in order)]
    costs = [0, *accumulate(waiting[place].cost for place in order)]
    head = order.index(alike[0])
    best, start = 1, head
    for high in range(head, len(order)):
        longest = waiting[order[high]].length
        low = min(head, high - best)
        while low >= 0:
            count = high + 1 - low
            padded, real = count * longest, sums[high + 1] - sums[low]
            spent = max(padded, costs[high + 1] - costs[low])
            if count > limit or padded > MOST_PADDED * real or (budget is not None and spent > budget):
                break
            best, start = count, low
            low -= 1
    return sorted(order[start : start + best])
