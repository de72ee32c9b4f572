"""Into how many micro-batches a batch is cut, from costs alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch.errors import DoesNotFit
from microbatch.pipeline.costs import Costs
from microbatch.pipeline.num_micro_batches import MOST_PER_RANK, Tried, best, held, is_over, larger, numbers, reason
from microbatch.pipeline.schedule import Schedule

FINE = Tried(num_micro_batches=8, micro_batch_size=4, seconds=2.0, peak_bytes=50, fits=True)
QUICK = replace(FINE, num_micro_batches=4, micro_batch_size=8, seconds=1.0, peak_bytes=80)
TOO_MUCH = replace(FINE, num_micro_batches=2, micro_batch_size=16, seconds=0.5, peak_bytes=160, fits=False)


@given(st.integers(1, 5000), st.integers(1, 16))
def test_numbers_end_with_one_and_give_each_piece_an_item(items: int, ranks: int) -> None:
    found = numbers(items, ranks)
    assert found[0] == min(items, MOST_PER_RANK * ranks) and found[-1] == 1
    assert all(one > other >= one / 2 for one, other in pairwise(found))


def test_more_than_pay_are_tried_where_only_they_fit() -> None:
    assert numbers(4096, 2, 128) == [128, 64, 32, 16, 8, 4, 2, 1]


def test_the_search_ends_where_larger_pieces_do_not_fit_or_do_not_pay() -> None:
    slow = replace(QUICK, num_micro_batches=2, seconds=1.3)
    assert not is_over([]) and not is_over([FINE]) and not is_over([FINE, QUICK])
    assert is_over([FINE, QUICK, TOO_MUCH]) and is_over([FINE, QUICK, slow])
    assert not is_over([FINE, QUICK, replace(slow, seconds=1.2)])


def test_the_shortest_step_that_fits_is_taken_and_says_why() -> None:
    tried = [FINE, QUICK, TOO_MUCH]
    assert best(tried, 100, "your limit") is QUICK
    assert reason(tried, QUICK, 100, "your limit") == (
        "the shortest step by measured costs of pieces of 8 (8 2 s, 4 1 s); 2 would hold 160 B, too much for 100 B "
        "(your limit)"
    )


def test_nothing_fits() -> None:
    with pytest.raises(DoesNotFit, match=r"2 micro-batches of 16 need 160 B on one rank, .* 100 B \(your limit\)"):
        best([TOO_MUCH], 100, "your limit")


def test_each_rank_is_held_against_its_own_limit() -> None:
    schedule = Schedule.of("one_f_one_b", ranks=2, num_micro_batches=4)  # holds 2 and 1
    costs = Costs(activation_bytes=[10, 30], weight_bytes=[100, 5])
    assert held(schedule, costs, [120, 35]) == (120, True)
    assert held(schedule, costs, [200, 34]) == (35, False)
    assert held(schedule, costs, [119, 100]) == (120, False)


def test_larger_pieces_keep_more() -> None:
    costs = larger(Costs(activation_bytes=[10, 30], weight_bytes=7), 1.5)
    assert np.asarray(costs.activation_bytes).tolist() == [15, 45] and costs.weight_bytes == 7
