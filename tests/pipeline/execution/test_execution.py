"""Pipelines equal one process: real processes on gloo, one group per number of ranks, which runs its whole table."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pipeline.execution.table_cases import KEPT, WEIGHTS
from tests.training.ranks import Found, run_ranks

TABLES = {
    2: ("exactness", "narrow", "own_orders", "refused", "proofs", "chosen", "compiled", "hugging_face"),
    4: ("exactness", "meshes", "tensor_meshes"),
}
SECONDS = 400
EXACT = 1e-12
NARROW = 1e-6


@pytest.fixture(scope="module", params=TABLES)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank of a group found, by table and case."""
    world: int = request.param
    tables = [f"tests.pipeline.execution.table_cases:{name}" for name in TABLES[world]]
    return run_ranks(world, tmp_path_factory.mktemp(f"pipeline{world}"), tables, SECONDS)


def table(ranks: Found, name: str) -> dict[str, Any]:
    """What the ranks agree on; nothing for a table that the group did not run."""
    rows: dict[str, Any] = ranks[0].get(f"table:{name}", {})
    return rows


@pytest.mark.parametrize("name", ["exactness", "own_orders"])
def test_gradients_in_float64(ranks: Found, name: str) -> None:
    off = {case: value for case, value in table(ranks, name).items() if not value <= EXACT}
    assert off == {}


@pytest.mark.parametrize("name", ["narrow", "hugging_face"])
def test_gradients_in_float32(ranks: Found, name: str) -> None:
    """Decoders of transformers too: their norms compute in float32 whatever the weights are."""
    off = {case: value for case, value in table(ranks, name).items() if not value <= NARROW}
    assert off == {}


@pytest.mark.parametrize("name", ["meshes", "tensor_meshes"])
def test_replicas_shards_and_shared_layers_of_a_pipeline(ranks: Found, name: str) -> None:
    off = {case: value for case, value in table(ranks, name).items() if not max(value.values()) <= EXACT}
    assert off == {}


def test_compiled_layers(ranks: Found) -> None:
    found = table(ranks, "compiled")
    assert {case: one["weights"] for case, one in found.items() if not one["weights"] <= EXACT} == {}
    assert not found or 0 < sum(one["graphs"] for one in found.values()) <= 8


REFUSED = {
    "ddp": ("InvalidSettings", "DistributedDataParallel"),
    "compiled": ("InvalidSettings", "compiled backward"),
    "different": ("InvalidBatch", "Ranks 0 and 1 of one pipeline were given different batches"),
    "stages": ("InvalidSchedule", "5 stages do not divide over 2 ranks. Nearest: 4 or 6"),
    "too many": ("InvalidModel", "layers to cut between"),
    "name": ("InvalidSettings", "No layer that can begin a stage is called 'layer.1'"),
    "simulated": ("InvalidSchedule", "dualpipe cannot be run"),
    "joint": ("InvalidSettings", "joint"),
}


def test_what_would_be_wrong_is_refused_on_every_rank(ranks: Found) -> None:
    if not table(ranks, "refused"):
        return
    for case, (kind, text) in REFUSED.items():
        for rank in ranks:
            said = rank["table:refused"][case]
            assert said["type"] == kind and text in said["text"], (case, said)
    assert table(ranks, "refused")["after"] <= EXACT


def test_the_number_of_micro_batches_follows_from_measured_costs(ranks: Found) -> None:
    found = table(ranks, "chosen")
    if not found:
        return
    assert all(rank["table:chosen"] == found for rank in ranks)
    assert found["each call costs"]["number"] <= 2 <= found["each item costs"]["number"]
    assert all(found[case]["same"] for case in ("each call costs", "each item costs", "free", "limited"))
    peaks = {size: peak for size, _, peak in found["free"]["tried"]}
    assert peaks[2] == WEIGHTS + 2 * 2 * KEPT and peaks[4] - peaks[2] == 2 * 2 * KEPT
    assert found["one rank has it"]["weights"] <= EXACT
    assert len(set(found["one rank has it"]["numbers"])) == 1


def test_the_number_of_micro_batches_stays_within_memory(ranks: Found) -> None:
    found = table(ranks, "chosen")
    if not found:
        return
    assert found["limited"]["number"] == 8
    assert "4 would hold" in found["limited"]["reason"] and "(your limit)" in found["limited"]["reason"]
    assert found["nothing fits"]["type"] == "DoesNotFit"
    assert "on one rank, which is too much for 1 kB (your limit)" in found["nothing fits"]["text"]


def test_a_proof_names_every_stage(ranks: Found) -> None:
    if not table(ranks, "proofs"):
        return
    for rank in ranks:
        exact, mixes = rank["table:proofs"]["exact"], rank["table:proofs"]["mixes"]
        assert exact["exact"] and exact["off"] <= EXACT
        assert [note.split()[:2] for note in exact["notes"]] == [["Stage", str(stage)] for stage in range(4)]
        assert not mixes["exact"]
