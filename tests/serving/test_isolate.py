"""A batch that fails: who gets which error, after how many calls, and what is learnt about memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch.errors import InvalidOutput, ModelFailed, WorkerDied
from microbatch.serving.decisions.isolate import RAISE_AFTER, SizeLimit, check_count, run_isolated
from microbatch.serving.decisions.queue import Entry, Reply
from microbatch.serving.decisions.view import Waiting
from microbatch.serving.engine.out_of_memory import ran_out


class Batch:
    """Entries with the numbers from 0 on, and a function that fails for some of them."""

    def __init__(self, count: int, *, bad: Sequence[int] = (), error: type[BaseException] = ValueError) -> None:
        self.entries = [Entry(number, Waiting(0.0), number, Reply(1)) for number in range(count)]
        self.bad, self.error = set(bad), error
        self.calls: list[list[int]] = []
        self.limit = SizeLimit(64)

    def run(self, entries: list[Entry]) -> list[Any]:
        items = [entry.item for entry in entries]
        self.calls.append(items)
        if wrong := sorted(self.bad & set(items)):
            raise self.error(f"bad {wrong[0]}")
        return [10 * item for item in items]

    def give(self, entries: Sequence[Entry], results: Sequence[Any]) -> None:
        for entry, result in zip(entries, results, strict=True):
            assert not entry.settled, "answered twice"
            entry.settle(result)

    def isolated(self, *, stateful: bool = False) -> int:
        return run_isolated(
            self.entries, self.run, self.give, self.limit, stateful=stateful, out_of_memory=ran_out
        )  # fmt: skip

    @property
    def results(self) -> list[Any]:
        return [entry.reply.results[0] for entry in self.entries]


def test_all_good_is_one_call() -> None:
    batch = Batch(5)
    assert batch.isolated() == 1
    assert batch.results == [0, 10, 20, 30, 40]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8, 9, 31, 32, 33])
def test_one_bad_item_fails_alone_within_the_bound(count: int) -> None:
    for bad in range(count):
        batch = Batch(count, bad=[bad])
        calls = batch.isolated()
        assert calls == len(batch.calls)
        assert calls - 1 <= 2 * math.ceil(math.log2(count))
        for number, result in enumerate(batch.results):
            if number == bad:
                assert isinstance(result, ValueError)
                assert str(result) == f"bad {bad}"
            else:
                assert result == 10 * number


@given(st.integers(1, 40), st.sets(st.integers(0, 39)))
def test_every_bad_item_gets_its_own_error(count: int, bad: set[int]) -> None:
    batch = Batch(count, bad=sorted(bad))
    batch.isolated()
    for number, result in enumerate(batch.results):
        assert (str(result) == f"bad {number}") if number in bad else (result == 10 * number)


def test_a_stateful_function_never_runs_twice() -> None:
    batch = Batch(8, bad=[3])
    assert batch.isolated(stateful=True) == 1
    assert all(str(result) == "bad 3" for result in batch.results)


def test_who_is_settled_meanwhile_is_left_out_of_the_repeats() -> None:
    batch = Batch(8, bad=[0])
    original = batch.run

    def run(entries: list[Entry]) -> list[Any]:
        if len(batch.calls) == 1:
            for entry in batch.entries[4:]:
                entry.settle("expired")
        return original(entries)

    batch.run = run  # type: ignore[method-assign]
    batch.isolated()
    assert all(max(items) < 4 for items in batch.calls[1:])
    assert batch.results[4:] == ["expired"] * 4


def test_memory_halves_the_batch_and_is_remembered() -> None:
    batch = Batch(16)

    def run(entries: list[Entry]) -> list[Any]:
        batch.calls.append([entry.item for entry in entries])
        if len(entries) > 4:
            raise MemoryError
        return [10 * entry.item for entry in entries]

    batch.run = run  # type: ignore[method-assign]
    batch.isolated()
    assert batch.results == [10 * number for number in range(16)]
    assert batch.limit.now == 4
    assert [len(items) for items in batch.calls] == [16, 8, 4, 4, 4, 4], "what is known is not tried again"


def test_the_limit_of_memory_is_raised_slowly() -> None:
    limit = SizeLimit(64)
    limit.ran_out(32)
    assert limit.now == 16
    for _ in range(RAISE_AFTER - 1):
        limit.passed(16)
    assert limit.now == 16
    limit.passed(8)
    assert limit.now == 16, "a smaller batch proves nothing"
    limit.passed(16)
    assert limit.now == 18
    for _ in range(100 * RAISE_AFTER):
        limit.passed(limit.now)
    assert limit.now == 64
    limit.ran_out(1)
    assert limit.now == 1


def test_after_a_worker_died_each_item_is_tried_once_more_alone() -> None:
    batch = Batch(4, bad=[2], error=WorkerDied)
    batch.isolated()
    assert batch.calls == [[0, 1, 2, 3], [0], [1], [2], [3]]
    assert [isinstance(result, WorkerDied) for result in batch.results] == [False, False, True, False]


def test_what_is_no_exception_ends_no_worker() -> None:
    batch = Batch(2, bad=[1], error=SystemExit)
    batch.isolated()
    assert batch.results[0] == 0
    assert isinstance(batch.results[1], ModelFailed)


@pytest.mark.parametrize("results", [[1, 2], [1, 2, 3, 4], 7, None, "abc", {"a": 1, "b": 2, "c": 3}, b"abc"])
def test_a_wrong_number_of_results_is_told_with_both(results: object) -> None:
    with pytest.raises(InvalidOutput, match="3 items went in and"):
        check_count(3, results)


def test_items_that_have_no_result_are_found() -> None:
    batch = Batch(8)
    batch.run = lambda entries: [entry.item for entry in entries if entry.item != 5]  # type: ignore[method-assign]
    batch.isolated()
    assert [number for number, result in enumerate(batch.results) if isinstance(result, InvalidOutput)] == [5]
