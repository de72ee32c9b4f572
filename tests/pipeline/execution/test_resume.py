"""Pipelines go on with other ranks, stages and schedules as if nothing had happened: equal to the uninterrupted run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.pipeline.execution.resume_cases import ITEMS, LAST
from tests.training import nursery

pytestmark = pytest.mark.alone

Found = dict[str, list[list[Any]]]
SAMPLES = LAST // 4 * ITEMS  # an epoch of 41 samples is 4 batches: 13, 13, 13 and 2


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return nursery.run(tmp_path_factory.mktemp("resumed"), "tests.pipeline.execution.resume_cases")


def off(ranks: list[dict[str, Any]], reference: dict[str, Any]) -> float:
    """The largest difference of a weight of any rank over the largest weight; every weight must be on some rank."""
    exact: dict[str, list[float]] = reference["weights"]
    scale = max(np.abs(values).max() for values in exact.values())
    assert {name for rank in ranks for name in rank["weights"]} == exact.keys()
    gaps = [np.abs(np.subtract(exact[name], mine)).max() for rank in ranks for name, mine in rank["weights"].items()]
    return float(max(gaps) / scale)


@pytest.mark.parametrize("name", ["2 4 1 2", "replicas, shards, one pipeline", "own"])
def test_weights_equal_the_uninterrupted_run(found: Found, name: str) -> None:
    ((reference,),) = found["reference"]
    last = found[name][-1]
    assert off(last, reference) <= 1e-12
    assert [rank["samples"] for rank in last] == [SAMPLES] * len(last)
    assert [rank["lr"] for rank in last] == [[0.00025, 0.005]] * len(last)


def test_a_run_goes_on_from_its_last_checkpoint(found: Found) -> None:
    for name, numbers in (("2 4 1 2", 2), ("replicas, shards, one pipeline", 3)):
        *killed, last = found[name]
        assert all(rank is None for phase in killed for rank in phase)
        assert [rank["from"] for rank in last] == [f"00000{5 - numbers}-step-{6 - 2 * (numbers - 2)}"] * len(last)


def test_a_checkpoint_of_another_model_is_refused_on_every_rank(found: Found) -> None:
    (ranks,) = found["other model"]
    for rank in ranks:
        assert rank["type"] == "InvalidCheckpoint"
        assert "The checkpoint and the pipeline do not go together: only one has 0.bias" in rank["text"]
