"""A call of the model that fails is made smaller until who fails is alone; all others get what they would have got."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from microbatch.errors import ModelFailed
from microbatch.llm.compute import Computed, compute
from microbatch.llm.row_pieces import Row
from microbatch.llm.runner import StepLogits


class Fake:
    """Logits are the ids; calls that `fails` says so of raise what it returns."""

    def __init__(self, fails: Callable[[Sequence[Row]], Exception | None] = lambda rows: None) -> None:
        self._fails = fails
        self.written: dict[int, list[int]] = {}
        self.calls = 0

    def step(self, rows: Sequence[Row]) -> StepLogits:
        self.calls += 1
        error = self._fails(rows)
        if error is not None:
            raise error
        for row in rows:
            known = self.written.setdefault(row.table[0], [])
            assert len(known) >= row.start  # earlier tokens of a row come first
            known[row.start :] = row.ids
        logits = [torch.tensor(row.ids, dtype=torch.float32)[:, None].expand(-1, 2) for row in rows]
        places = tuple(place for place, row in enumerate(rows) if row.wants_logits)
        every = {place: logits[place] for place, row in enumerate(rows) if row.all_logits}
        last = torch.stack([logits[place][-1] for place in places]) if places else torch.empty(0, 2)
        return StepLogits(last, places, every)


ROWS = [
    Row(ids=(1,), start=0, table=(10,)),
    Row(ids=(2, 3, 4, 5, 6), start=0, table=(11,), all_logits=True),
    Row(ids=(7, 8), start=0, table=(12,), wants_logits=False),
    Row(ids=(9,), start=0, table=(13,)),
]


def found(computed: Computed) -> dict[int, float]:
    assert computed.last is not None and len(computed.last) == len(computed.sampled)
    return {place: float(row[0]) for place, row in zip(computed.sampled, computed.last)}


def test_all_goes_well_in_one_call() -> None:
    fake = Fake()
    computed = compute(fake, ROWS, "cpu")
    assert fake.calls == 1 and computed.failed == {} and computed.largest == 9
    assert found(computed) == {0: 1.0, 1: 6.0, 3: 9.0}
    assert computed.every[1][:, 0].tolist() == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("most", [1, 2, 3, 4, 8])
def test_out_of_memory_makes_calls_smaller_down_to_single_tokens(most: int) -> None:
    def fails(rows: Sequence[Row]) -> Exception | None:
        tokens = sum(len(row.ids) for row in rows)
        return torch.OutOfMemoryError("CUDA out of memory") if tokens > most else None

    fake = Fake(fails)
    computed = compute(fake, ROWS, "cpu")
    assert computed.failed == {} and computed.out_of_memory > 0 and computed.largest <= most
    assert found(computed) == {0: 1.0, 1: 6.0, 3: 9.0}
    assert computed.every[1][:, 0].tolist() == [2, 3, 4, 5, 6]
    assert fake.written == {10: [1], 11: [2, 3, 4, 5, 6], 12: [7, 8], 13: [9]}


@pytest.mark.parametrize("bad", [1, 2, 7, 9])
def test_who_fails_fails_alone(bad: int) -> None:
    computed = compute(
        Fake(lambda rows: ValueError("no") if any(bad in row.ids for row in rows) else None), ROWS, "cpu"
    )
    place = next(place for place, row in enumerate(ROWS) if bad in row.ids)
    assert set(computed.failed) == {place}
    assert isinstance(computed.failed[place], ModelFailed) and "ValueError: no" in str(computed.failed[place])
    wanted = {0: 1.0, 1: 6.0, 3: 9.0}
    assert found(computed) == {at: value for at, value in wanted.items() if at != place}


def test_a_token_that_never_fits_fails_alone() -> None:
    def fails(rows: Sequence[Row]) -> Exception | None:
        return MemoryError() if any(4 in row.ids for row in rows) else None

    computed = compute(Fake(fails), ROWS, "cpu")
    assert set(computed.failed) == {1} and "out of memory" in str(computed.failed[1])
    assert found(computed) == {0: 1.0, 3: 9.0}
