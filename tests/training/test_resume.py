"""Runs killed with SIGKILL go on at the right sample, whatever the ranks and pieces: equal to the uninterrupted run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.training import nursery
from tests.training.resume_cases import BATCH, ITEMS, LAST

pytestmark = pytest.mark.alone

Found = dict[str, list[list[Any]]]

SAMPLES = LAST // 4 * ITEMS  # an epoch of 40 samples is 4 batches: 13, 13, 13 and 1


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return nursery.run(tmp_path_factory.mktemp("resumed"), "tests.training.resume_cases")


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    a, b = np.array(one["weights"]), np.array(other["weights"])
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.mark.parametrize("name", ["ddp 2 1 3", "replicas 3 2", "fsdp 3 2 1 2"])
def test_weights_equal_the_uninterrupted_run(found: Found, name: str) -> None:
    (reference,) = found["reference"][0]
    *killed, last = found[name]
    assert all(rank is None for phase in killed for rank in phase)
    for rank in last:
        assert difference(rank, reference) <= 1e-12
        assert rank["lr"] == reference["lr"]
        assert rank["samples"] == SAMPLES


def test_a_run_goes_on_from_its_last_checkpoint(found: Found) -> None:
    assert [rank["from"] for rank in found["ddp 2 1 3"][-1]] == ["000003-step-6"] * 3
    assert [rank["from"] for rank in found["replicas 3 2"][-1]] == ["000001-step-2"] * 2


def test_dropout_goes_on_with_the_same_random_numbers(found: Found) -> None:
    whole, last = found["dropout whole"][0], found["dropout"][-1]
    assert [rank["weights"] for rank in last] == [rank["weights"] for rank in whole]
    assert difference(whole[0], found["reference"][0][0]) > 1e-3


@pytest.mark.parametrize("name", ["own", "own fsdp"])
def test_a_step_is_stateful_for_a_checkpoint_of_ones_own(found: Found, name: str) -> None:
    for rank in found[name][-1]:
        assert difference(rank, found["reference"][0][0]) <= 1e-12
        assert (rank["epoch"], rank["samples"]) == (7, SAMPLES)


def test_killed_at_any_moment_of_a_save_a_complete_checkpoint_is_there(found: Found) -> None:
    ((case,),) = found["killed while saving"]
    assert case["kills"] > 10
    assert all(one["same"] and one["left"] in (1, 2) for one in case["found"])
    assert case["found"][0]["loaded"].endswith("000001-step-1")
    assert case["found"][-1]["left"] == 1
    assert not case["found"][-1]["loaded"].endswith("000001-step-1")


def test_the_batches_are_what_the_bound_rests_on() -> None:
    assert ITEMS % BATCH == 1  # an epoch's last batch is one sample: some ranks have none
