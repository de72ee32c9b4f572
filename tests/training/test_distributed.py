"""Ranks that share a step equal one process: real processes on gloo, one group per number of ranks.

Each group is started once and runs whole tables (`ranks.py`); the tests read what each rank found.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from microbatch.training.memory.size_search import ITEMS_IN_BATCHES, MOST_PASSES, QUICK
from microbatch.training.ranks.meeting import MEETING_BYTES
from tests.training.ranks import Found, run_ranks

pytestmark = pytest.mark.alone

REPLICATED = ("gradients", "recoveries", "clipped", "unused", "skipped", "errors", "proofs", "wire")
SHARDED = ("gradients", "recoveries", "clipped", "scaled", "skipped", "errors", "planned", "proofs", "wire")
TABLES: dict[int, dict[str, tuple[str, ...]]] = {
    1: {"replicated": ("gradients", "skipped"), "sharded": ("gradients",)},
    2: {"replicated": REPLICATED, "sharded": SHARDED},
    3: {"replicated": ("gradients", "recoveries", "unused", "wire"), "sharded": ("wire", "gradients")},
    4: {"sharded": ("two_by_two",)},
}
"""What each number of ranks runs."""
SECONDS = 300
PEAKS_MEASURED = 3
ITEMS_OF_A_RANK = 7
"""At most, of the 13 that `sharded_cases.planned` cuts for two ranks."""
NO_HANG = 15  # the groups' own timeout is 60 s


@pytest.fixture(scope="module", params=TABLES)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank of a group found, by table and case."""
    world: int = request.param
    tables = [f"tests.training.{kind}_cases:{name}" for kind, names in TABLES[world].items() for name in names]
    return run_ranks(world, tmp_path_factory.mktemp(f"ranks{world}"), tables, SECONDS)


def cases(ranks: Found, table: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Each case of a table with what every rank found; nothing for tables that the group did not run."""
    for case in ranks[0].get(table, {}):
        yield case, [rank[table][case] for rank in ranks]


def test_gradients_of_replicas(ranks: Found) -> None:
    for case, found in cases(ranks, "replicated:gradients"):
        for one in found:
            bound = 1e-13 if case.endswith("float64") else 4 * one["full"]
            assert one["difference"] <= bound, case
            assert one["loss"] <= (1e-13 if case.endswith("float64") else 1e-6), case
            assert one["equal"], case


def test_gradients_of_shards(ranks: Found) -> None:
    for case, found in cases(ranks, "sharded:gradients"):
        for one in found:
            assert max(one["difference"], one["weights"], one["loss"]) <= 1e-13, case


def test_shards_of_replicas_two_by_two(ranks: Found) -> None:
    for case, found in cases(ranks, "sharded:two_by_two"):
        for one in found:
            assert max(one["difference"], one["weights"], one["loss"]) <= 1e-13, case


def test_loss_scaling_of_shards(ranks: Found) -> None:
    """An infinite gradient on one rank makes all of them skip."""
    for case, found in cases(ranks, "sharded:scaled"):
        for one in found:
            assert one["difference"] <= 1e-6, case
            assert (one["why"], one["same"], one["scale"]) == ("a gradient is not finite", True, 2.0**11), case


def test_the_size_of_shards_is_planned_and_agreed(ranks: Found) -> None:
    for case, found in cases(ranks, "sharded:planned"):
        assert len({json.dumps([one["size"], one["largest"], one["tried"]]) for one in found}) == 1, case
        for one in found:
            assert one["difference"] <= 1e-12 and one["attempts"] == 1, case
            assert one["size"] in one["tried"] and max(one["tried"]) <= one["largest"], case
            if case == "planned limited":  # where memory ends the search, see `size_search.MOST_PASSES`
                assert one["largest"] == min(other["allowed"] for other in found) < 10, case
                assert one["largest"] >= 2 and one["source"] == "your limit", case
                assert len(one["tried"]) + PEAKS_MEASURED <= MOST_PASSES, case
            else:
                few = sum(one["tried"]) <= (ITEMS_IN_BATCHES + 1) * ITEMS_OF_A_RANK
                assert few or sum(one["seconds"][:-1]) < QUICK, case


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_a_proof_is_the_same_on_every_rank(ranks: Found, kind: str) -> None:
    for case, found in cases(ranks, f"{kind}:proofs"):
        assert all(one == found[0] for one in found), case
        assert found[0]["same"] and found[0]["next"] is None, case
        mixes = case in ("proof one", "proof mixes")
        assert found[0]["exact"] == (not mixes), case
        assert ("head" in found[0]["culprits"]) == mixes, case
        if not mixes:
            assert found[0]["difference"] <= 1e-13, case


def test_a_replica_out_of_memory_redoes_its_pieces_alone(ranks: Found) -> None:
    for case, found in cases(ranks, "replicated:recoveries"):
        for one in found:
            assert one["difference"] <= 1e-12 and one["equal"], case
            assert one["seconds"] < 2, case
        assert [one["attempts"] for one in found] == [1] * (len(found) - 1) + [2], case


def test_shards_out_of_memory_take_a_smaller_size_together(ranks: Found) -> None:
    for case, found in cases(ranks, "sharded:recoveries"):
        for one in found:
            assert one["difference"] <= 1e-12, case
            assert one["seconds"] < NO_HANG, case
            assert one["sizes"][-1] == 2 and len(one["sizes"]) == 2, case


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_clipping_by_the_norm_over_all_ranks(ranks: Found, kind: str) -> None:
    for case, found in cases(ranks, f"{kind}:clipped"):
        assert max(max(one["difference"], one["norm"]) for one in found) <= 1e-13, case


def test_parameters_that_only_some_ranks_use(ranks: Found) -> None:
    for case, found in cases(ranks, "replicated:unused"):
        for one in found:
            assert one["difference"] <= 1e-13 and one["untouched"] and one["equal"], case
            assert one["gradients"] == (2 if len(found) == 1 else 4), case


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_a_batch_without_weight_is_skipped_on_all_ranks(ranks: Found, kind: str) -> None:
    for _, found in cases(ranks, f"{kind}:skipped"):
        expected = {"why": "the batch has no weight", "same": True, "weight": 0.0}
        assert found == [expected] * len(found)


EXPECTED = {"loss": "InvalidLoss", "batch": "InvalidBatch", "model": "ValueError", "fits not": "DoesNotFit"}


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_an_error_of_one_rank_is_raised_on_every_rank(ranks: Found, kind: str) -> None:
    for case, found in cases(ranks, f"{kind}:errors"):
        for one in found:
            assert one["seconds"] < (2 if kind == "replicated" else NO_HANG) and one["same"], case
            assert one["next"] is None or one["next"] <= 1e-12, case
        what = case.removeprefix("error ")
        own = EXPECTED.get(what, "InvalidModel" if what == "parameters" else "ValueError")
        assert found[-1]["type"] == own, case
        for one in found[:-1]:
            assert one["type"] in (own, "RankFailed"), case
            if one["type"] == "RankFailed":
                assert f"Rank {len(found) - 1} of {len(found)} failed: {own}" in one["text"], case


def test_replicas_send_the_same_for_any_number_of_pieces(ranks: Found) -> None:
    for case, found in cases(ranks, "replicated:wire"):
        world = len(found)
        for one in found:
            assert one["calls"] == one["counted"] == 2, case
            assert one["pieces"] == int(case.split()[-1])
            assert one["bytes"] == round((world - 1) / world * (2 * one["payload"] + world * MEETING_BYTES)), case


def test_shards_send_what_the_formula_says(ranks: Found) -> None:
    for case, found in cases(ranks, "sharded:wire"):
        world = len(found)
        for one in found:
            assert one["calls"] == one["counted"], case
            meetings = 2 * (world - 1) * MEETING_BYTES
            assert one["bytes"] - meetings == pytest.approx(one["formula"], rel=0.01), case
