"""Pieces of items of different lengths with the least padding that a budget of tokens allows. Loads no torch.

The items of a piece are padded to its longest, so a piece of n items costs n × longest tokens. Without a price for
pieces the least padding would be none, a piece per length; so a piece costs `piece_cost` tokens besides, what its
kernel launches and small matrices lose. After sorting by length some cheapest grouping consists of runs (exchange two
items that interleave: neither piece's longest grows), and a dynamic programme over the runs' ends finds it::

    best(end) = min over start of  best(start) + (end − start) × longest(start, end) + piece_cost

The costs fulfil the quadrangle inequality, also where a run above the budget costs infinity, so the best start never
falls and a queue of candidates finds it in n log n steps (Galil and Park 1992). No grouping in as few pieces has less
padding: it would be cheaper.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from microbatch.errors import InvalidBatchSizes

PIECE_SHARE = 32
"""A piece costs this part of its budget unless said otherwise: a full piece with more than about 6 % of padding is cut
in two, since that halves its padding."""


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Pieces by length: as many items as fit a number of tokens, items of like length together.

    Attributes:
        tokens: the items of a piece times its longest are at most this. A longer item is a piece of its own.
        length: ``length(item)``, where lengths cannot be read off the data (see `microbatch.batch.lengths`). An item
            is a sample of a list or data set, or one row of a batch, with its batch dimension.
        piece_cost: tokens of padding that one more piece has to save; a 32nd of `tokens` by default.
        trim: whether pieces lose the padding that all of their items have. By default it is first shown on a few items
            that neither outputs nor loss depend on it.

    >>> TokenBudget(8192).tokens
    8192
    """

    tokens: int
    length: Callable[[Any], int] | None = field(default=None, kw_only=True)
    piece_cost: int | None = field(default=None, kw_only=True)
    trim: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name, value, least in (("tokens", self.tokens, 1), ("piece_cost", self.piece_cost, 0)):
            wrong = isinstance(value, bool) or not isinstance(value, int) or value < least
            if wrong and not (name == "piece_cost" and value is None):
                raise InvalidBatchSizes(
                    f"TokenBudget: {name} must be a whole number of {least} or more, not {value!r}.",
                    "Write TokenBudget(8192).",
                )

    def cost_at(self, tokens: int) -> int:
        """What a piece costs besides its tokens when it may have so many."""
        return max(1, tokens // PIECE_SHARE) if self.piece_cost is None else self.piece_cost


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Indices by falling length; items of the same length stay in order."""
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])


def piece_sizes(descending: Sequence[int], tokens: int, piece_cost: int) -> list[int]:
    """Items of each piece, longest first, with the least ``padded tokens + pieces × piece_cost``.

    Args:
        descending: lengths, longest first.
        tokens: of a piece at most; what is longer is a piece of its own.

    >>> piece_sizes([9, 8, 3, 3, 2], 18, 1)
    [2, 3]
    """
    alone = next((place for place, length in enumerate(descending) if length <= tokens), len(descending))
    ends = _cheapest_cuts(list(descending[: alone - 1 if alone else None : -1]), tokens, piece_cost)
    return [1] * alone + [stop - start for start, stop in pairwise(ends)][::-1]


def filled(lengths: Sequence[int], tokens: int) -> list[int]:
    """Items of each piece where nothing is padded: in order, each piece as full as it gets.

    >>> filled([5, 5, 20, 1], 12)
    [2, 1, 1]
    """
    sizes: list[int] = []
    held = 0
    for length in lengths:
        if sizes and held + length <= tokens:
            sizes[-1] += 1
            held += length
        else:
            sizes.append(1)
            held = length
    return sizes


def padded_tokens(descending: Sequence[int], sizes: Sequence[int]) -> int:
    """Tokens that run, padding included: every piece's items times its longest."""
    total = start = 0
    for size in sizes:
        total += size * descending[start]
        start += size
    return total


def _cheapest_cuts(ascending: list[int], tokens: int, piece_cost: int) -> list[int]:
    """Where the runs of the cheapest grouping begin, and the end; every length is within the budget."""
    items = len(ascending)
    reach = _reach(ascending, tokens)
    best, cut = [0] * (items + 1), [0] * (items + 1)
    starts, turns, head = [0], [1], 0  # candidates, each the best start from its turn on
    for end in range(1, items + 1):
        while head + 1 < len(starts) and turns[head + 1] <= end:
            head += 1
        start = cut[end] = starts[head]
        best[end] = best[start] + (end - start) * ascending[end - 1] + piece_cost
        while True:
            last = starts[-1]
            # `end` is at least as good a start as `last` from the first length on that makes up for what it cost
            worth = -(-(best[end] - best[last]) // (end - last))
            turn = min(bisect_left(ascending, worth, end) + 1, reach[last] + 1)
            if turn > turns[-1]:
                break
            starts.pop()
            turns.pop()
        if turn <= items:
            starts.append(end)
            turns.append(turn)
    cuts = [items]
    while cuts[-1]:
        cuts.append(cut[cuts[-1]])
    return cuts[::-1]


def _reach(ascending: list[int], tokens: int) -> list[int]:
    """For each start the last end whose run is within the budget."""
    reach, end = [], 0
    for start in range(len(ascending)):
        end = max(end, start + 1)
        while end < len(ascending) and (end + 1 - start) * ascending[end] <= tokens:
            end += 1
        reach.append(end)
    return reach
