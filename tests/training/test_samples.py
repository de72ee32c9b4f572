"""Global batches are the same for any number of ranks, and go on at any sample."""

from __future__ import annotations

import pickle
from itertools import chain, islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from microbatch.errors import InvalidBatchSizes, InvalidSettings
from microbatch.training.checkpoints.samples import GlobalBatches, none_where_empty, order

lengths = st.integers(1, 60)
sizes = st.integers(1, 70)


def batches_of(length: int, size: int, **options: Any) -> GlobalBatches:
    options = {"rank": 0, "num_ranks": 1, "seed": 1, **options}
    return GlobalBatches(length=length, global_batch_size=size, **options)


@given(lengths, sizes, st.integers(1, 5), st.one_of(st.none(), st.integers(0, 3)))
def test_ranks_together_have_the_global_batch(length: int, size: int, ranks: int, seed: int | None) -> None:
    one = list(batches_of(length, size, seed=seed, epochs=2))
    many = [list(batches_of(length, size, seed=seed, epochs=2, rank=rank, num_ranks=ranks)) for rank in range(ranks)]
    assert [list(chain(*parts)) for parts in zip(*many, strict=True)] == one
    for parts in zip(*many):
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(lengths, sizes, st.integers(1, 4))
def test_every_epoch_has_every_sample_once(length: int, size: int, epochs: int) -> None:
    flat = list(chain(*batches_of(length, size, epochs=epochs)))
    for epoch in range(epochs):
        assert sorted(flat[epoch * length : (epoch + 1) * length]) == list(range(length))
    assert all(len(batch) == size for batch in list(batches_of(length, size))[:-1])


@given(lengths, sizes, st.booleans(), st.integers(0, 10))
def test_a_run_goes_on_where_it_was(length: int, size: int, drop_last: bool, done: int) -> None:
    if drop_last and size > length:
        return
    whole = list(batches_of(length, size, epochs=4, drop_last=drop_last))
    start = sum(map(len, whole[:done]))
    rest = batches_of(length, size, epochs=4, drop_last=drop_last, start=start)
    assert list(rest) == whole[done:]
    assert len(rest) == len(whole[done:])


@given(lengths, sizes, sizes, st.integers(0, 5))
def test_another_batch_size_goes_on_at_the_same_sample(length: int, size: int, other: int, done: int) -> None:
    first = list(islice(batches_of(length, size, epochs=3), done))
    start = sum(map(len, first))
    rest = list(batches_of(length, other, epochs=3, start=start))
    assert list(chain(*first, *rest)) == list(chain(*batches_of(length, size, epochs=3)))


def test_the_last_batch_is_dropped_where_it_is_smaller() -> None:
    found = list(batches_of(10, 4, epochs=2, drop_last=True))
    assert list(map(len, found)) == [4, 4, 4, 4]
    assert len(batches_of(10, 4, epochs=2, drop_last=True)) == 4


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(order(20, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4
    assert list(batches_of(5, 2, seed=None)) == [[0, 1], [2, 3], [4]]


def test_an_order_is_the_same_for_ever() -> None:
    assert order(8, 7, 3).tolist() == [4, 2, 7, 0, 5, 3, 1, 6]


def test_shares_may_be_uneven() -> None:
    parts = [list(batches_of(12, 9, seed=None, shares=(2.0, 1.0, 0.0), rank=r, num_ranks=3)) for r in range(3)]
    assert [[len(share) for share in rank] for rank in parts] == [[6, 2], [3, 1], [0, 0]]


def test_without_an_end() -> None:
    endless = batches_of(5, 2, epochs=None)
    assert len(list(islice(endless, 100))) == 100
    with pytest.raises(TypeError, match="without an end"):
        len(endless)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_gives_each_rank_its_rows(workers: int) -> None:
    data = TensorDataset(torch.arange(7))
    ranks = []
    for rank in range(2):
        batches = batches_of(7, 3, seed=None, rank=rank, num_ranks=2)
        ranks.append(list(DataLoader(data, batch_sampler=batches, num_workers=workers, collate_fn=none_where_empty())))
    rows = [[None if batch is None else batch[0].tolist() for batch in rank] for rank in ranks]
    assert rows == [[[0, 1], [3, 4], None], [[2], [5], [6]]]


def test_the_collate_function_goes_to_workers_and_may_be_ones_own() -> None:
    own = pickle.loads(pickle.dumps(none_where_empty(torch.stack)))
    assert own([]) is None
    assert own([torch.ones(2)]).shape == (1, 2)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"length": 0}, InvalidBatchSizes),
        ({"global_batch_size": 0}, InvalidBatchSizes),
        ({"start": -1}, InvalidBatchSizes),
        ({"global_batch_size": 11, "drop_last": True}, InvalidBatchSizes),
        ({"rank": 2, "num_ranks": 2}, InvalidSettings),
        ({"shares": (1.0, 2.0)}, InvalidSettings),
        ({"shares": (0.0,)}, InvalidSettings),
    ],
)
def test_mistakes(wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        GlobalBatches(**{"length": 10, "global_batch_size": 4, "rank": 0, "num_ranks": 1, **wrong})


def test_without_torch_distributed_there_is_one_rank() -> None:
    assert GlobalBatches(length=3, global_batch_size=2).place == (0, 1)
