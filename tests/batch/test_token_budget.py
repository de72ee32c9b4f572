"""Pieces by length: never a cheaper grouping, whatever the lengths, and fast."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from microbatch.batch.token_budget import TokenBudget, filled, longest_first, padded_tokens, piece_sizes
from microbatch.errors import InvalidBatchSizes

LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=7)


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Every way to put items into pieces, neighbours or not."""
    if not items:
        yield []
        return
    first, *rest = items
    for smaller in partitions(rest):
        for place in range(len(smaller)):
            yield [*smaller[:place], [first, *smaller[place]], *smaller[place + 1 :]]
        yield [[first], *smaller]


def cost(pieces: list[list[int]], tokens: int, piece_cost: int) -> int | None:
    """What a grouping costs; None where a piece is above the budget though its items need not be."""
    if any(len(piece) * max(piece) > tokens and len(piece) > 1 for piece in pieces):
        return None
    return sum(len(piece) * max(piece) + piece_cost for piece in pieces)


def cut(descending: list[int], sizes: list[int]) -> list[list[int]]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(descending[start : start + size])
        start += size
    assert start == len(descending)
    return pieces


@settings(max_examples=300, deadline=None)
@given(LENGTHS, st.integers(1, 40), st.integers(0, 20))
def test_no_grouping_at_all_is_cheaper(lengths: list[int], tokens: int, piece_cost: int) -> None:
    descending = sorted(lengths, reverse=True)
    pieces = cut(descending, piece_sizes(descending, tokens, piece_cost))
    costs = [found for every in partitions(lengths) if (found := cost(every, tokens, piece_cost)) is not None]
    assert cost(pieces, tokens, piece_cost) == min(costs)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 40), st.integers(1, 20))
def test_no_grouping_in_as_few_pieces_has_less_padding(lengths: list[int], tokens: int, piece_cost: int) -> None:
    descending = sorted(lengths, reverse=True)
    sizes = piece_sizes(descending, tokens, piece_cost)
    least = min(
        sum(len(piece) * max(piece) for piece in every)
        for every in partitions(lengths)
        if len(every) <= len(sizes) and cost(every, tokens, 0) is not None
    )
    assert padded_tokens(descending, sizes) == least


def by_every_start(descending: list[int], tokens: int, piece_cost: int) -> int:
    """The same programme without its short cuts."""
    best = [0]
    for stop in range(1, len(descending) + 1):
        best.append(
            min(
                best[start] + (stop - start) * descending[start] + piece_cost
                for start in range(stop)
                if (stop - start) * descending[start] <= tokens or stop - start == 1
            )
        )
    return best[-1]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=120), st.integers(1, 3000), st.integers(0, 200))
def test_the_queue_of_candidates_finds_what_all_starts_give(lengths: list[int], tokens: int, piece_cost: int) -> None:
    descending = sorted(lengths, reverse=True)
    sizes = piece_sizes(descending, tokens, piece_cost)
    assert sum(sizes) == len(lengths)
    assert padded_tokens(descending, sizes) + len(sizes) * piece_cost == by_every_start(descending, tokens, piece_cost)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 200))
def test_pieces_keep_the_budget_and_longer_items_are_alone(lengths: list[int], tokens: int) -> None:
    descending = [lengths[place] for place in longest_first(lengths)]
    assert descending == sorted(lengths, reverse=True)
    for piece in cut(descending, piece_sizes(descending, tokens, 3)):
        assert len(piece) * piece[0] <= tokens or len(piece) == 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 200))
def test_sequences_end_to_end_fill_pieces_in_order(lengths: list[int], tokens: int) -> None:
    pieces = cut(lengths, filled(lengths, tokens))
    assert all(sum(piece) <= tokens or len(piece) == 1 for piece in pieces)
    assert all(sum(one) + other[0] > tokens for one, other in pairwise(pieces))  # each as full as it gets


def test_items_of_one_length_stay_in_order() -> None:
    assert longest_first([3, 5, 3, 5, 3]) == [1, 3, 0, 2, 4]


def test_less_padding_than_filling_pieces_as_they_come() -> None:
    lengths = sorted(((37 * n * n) % 500 + 8 for n in range(2000)), reverse=True)
    sizes, greedy, start = piece_sizes(lengths, 8192, 8192 // 32), [], 0
    while start < len(lengths):
        greedy.append(min(8192 // lengths[start], len(lengths) - start))
        start += greedy[-1]
    assert padded_tokens(lengths, sizes) < padded_tokens(lengths, greedy)


@pytest.mark.parametrize("spread", [500, 1_000_000])
def test_a_hundred_thousand_lengths_take_less_than_a_second(spread: int) -> None:
    lengths = sorted((n * 7919 % spread + 1 for n in range(100_000)), reverse=True)
    start = time.process_time()
    sizes = piece_sizes(lengths, 16 * spread, spread // 2)
    assert time.process_time() - start < 1.0
    assert sum(sizes) == len(lengths)


@pytest.mark.parametrize("tokens", [0, -1, 2.5, "8192", True, None])
def test_a_budget_is_a_positive_whole_number(tokens: Any) -> None:
    with pytest.raises(InvalidBatchSizes, match="TokenBudget: tokens must be a whole number of 1 or more"):
        TokenBudget(tokens)


def test_a_piece_cost_is_none_or_a_whole_number() -> None:
    assert TokenBudget(64).cost_at(64) == 2
    assert TokenBudget(8, piece_cost=0).cost_at(8) == 0
    with pytest.raises(InvalidBatchSizes, match="piece_cost"):
        TokenBudget(8, piece_cost=-1)


def test_grouping_needs_no_torch(root: Path) -> None:
    code = "import sys, microbatch.batch.token_budget; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(root / "src")}, check=False).returncode == 0
    )
