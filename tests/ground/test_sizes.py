"""The arithmetic of a batch, for any sizes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch.errors import InvalidBatchSizes
from microbatch.sizes import BatchSizes, nearest_divisors

SIZE = st.integers(1, 600)


@given(global_batch_size=SIZE, micro_batch_size=SIZE)
def test_pieces_of_a_given_size_add_up(global_batch_size: int, micro_batch_size: int) -> None:
    sizes = BatchSizes.of(global_batch_size=global_batch_size, micro_batch_size=micro_batch_size)
    assert sum(sizes.pieces) == global_batch_size
    assert len(sizes.pieces) == sizes.num_micro_batches
    assert max(sizes.pieces) == sizes.micro_batch_size == min(micro_batch_size, global_batch_size)
    assert set(sizes.pieces[:-1]) <= {sizes.micro_batch_size}


@given(global_batch_size=SIZE, share=st.floats(0, 1))
def test_a_given_number_of_pieces_is_kept(global_batch_size: int, share: float) -> None:
    number = 1 + round(share * (global_batch_size - 1))
    sizes = BatchSizes.of(global_batch_size=global_batch_size, num_micro_batches=number)
    assert sum(sizes.pieces) == global_batch_size
    assert len(sizes.pieces) == number
    assert max(sizes.pieces) == sizes.micro_batch_size
    assert min(sizes.pieces) >= 1
    assert list(sizes.pieces) == sorted(sizes.pieces, reverse=True)


@given(micro_batch_size=SIZE, num_micro_batches=SIZE)
def test_size_and_number_give_the_whole(micro_batch_size: int, num_micro_batches: int) -> None:
    sizes = BatchSizes.of(micro_batch_size=micro_batch_size, num_micro_batches=num_micro_batches)
    assert sizes.global_batch_size == micro_batch_size * num_micro_batches
    assert sizes.pieces == (micro_batch_size,) * num_micro_batches
    assert sizes.tail == 0
    assert sizes.require_equal("a pipeline") is sizes


@given(global_batch_size=SIZE, share=st.floats(0, 1))
def test_all_three_sizes_of_a_batch_are_accepted_again(global_batch_size: int, share: float) -> None:
    number = 1 + round(share * (global_batch_size - 1))
    sizes = BatchSizes.of(global_batch_size=global_batch_size, num_micro_batches=number)
    given: dict[str, Any] = asdict(sizes)
    assert BatchSizes.of(**given) == sizes


def test_the_example_of_the_field() -> None:
    assert BatchSizes.of(global_batch_size=128, micro_batch_size=16) == BatchSizes(128, 16, 8)
    assert BatchSizes.of(global_batch_size=130, micro_batch_size=16).pieces == (16,) * 8 + (2,)
    assert BatchSizes.of(global_batch_size=130, micro_batch_size=16).tail == 2
    assert BatchSizes.of(global_batch_size=9, num_micro_batches=6).pieces == (2, 2, 2, 1, 1, 1)


def test_equal_pieces_name_the_nearest_divisors() -> None:
    with pytest.raises(InvalidBatchSizes) as caught:
        BatchSizes.of(global_batch_size=130, micro_batch_size=16).require_equal("this engine")
    assert caught.value.message == "this engine needs equal pieces: 130 = 8 x 16 + 2."
    assert caught.value.remedy == "Nearest divisors: 13 and 26."


@given(whole=SIZE, size=SIZE)
def test_nearest_divisors_divide_and_nothing_nearer_does(whole: int, size: int) -> None:
    below, above = nearest_divisors(whole, size)
    wanted = min(size, whole)
    assert whole % below == 0
    assert whole % above == 0
    assert below <= wanted <= above
    assert not [d for d in range(below + 1, above) if whole % d == 0 and d != wanted]


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({}, "Two of"),
        ({"global_batch_size": 8}, "Two of"),
        ({"global_batch_size": 0, "micro_batch_size": 1}, "not 0"),
        ({"global_batch_size": 8, "micro_batch_size": -2}, "not -2"),
        ({"global_batch_size": 8, "micro_batch_size": 2.0}, "not 2.0"),
        ({"global_batch_size": True, "micro_batch_size": 1}, "not True"),
        ({"global_batch_size": 8, "num_micro_batches": 9}, "cannot be cut into 9 pieces"),
        ({"global_batch_size": 8, "micro_batch_size": 2, "num_micro_batches": 3}, "is 4 pieces, not 3"),
        ({"global_batch_size": 8, "micro_batch_size": 2, "num_micro_batches": 12}, "cannot be cut into 12 pieces"),
    ],
)
def test_sizes_that_cannot_be_are_refused_with_their_numbers(sizes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidBatchSizes, match=says) as caught:
        BatchSizes.of(**sizes)
    assert caught.value.remedy


def test_uneven_pieces_give_every_size() -> None:
    sizes = BatchSizes.of(uneven=[2, 5, 1])
    assert (sizes.global_batch_size, sizes.micro_batch_size, sizes.num_micro_batches) == (8, 5, 3)
    assert sizes.pieces == (2, 5, 1)
    assert sizes.tail == 1
    assert BatchSizes.of(uneven=sizes.pieces, global_batch_size=8) == sizes
    with pytest.raises(InvalidBatchSizes, match="global_batch_size 8, not 9"):
        BatchSizes.of(uneven=[2, 5, 1], global_batch_size=9)
