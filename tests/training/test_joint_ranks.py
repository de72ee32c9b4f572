"""Losses of the whole batch and exact batch norms over ranks: real processes, equal to one with the joint batch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.training import nursery
from tests.training.joint_cases import cases

pytestmark = pytest.mark.alone

Found = dict[tuple[int, str], list[Any]]
"""What each rank found, by number of ranks and case."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    groups = nursery.run(tmp_path_factory.mktemp("joint"), "tests.training.joint_cases")
    return {
        (int(ranks), name): [rank[name] for rank in phase] for ranks, [phase] in groups.items() for name in phase[0]
    }


def names(*kinds: str) -> list[tuple[int, str]]:
    return [(ranks, name) for ranks in (2, 3) for name in cases(ranks) if name.startswith(kinds)]


@pytest.mark.parametrize("case", names("contrastive", "shared", "balanced"))
def test_joint_losses_over_ranks(found: Found, case: tuple[int, str]) -> None:
    ranks = found[case]
    for one in ranks:
        assert max(one["gradients"], one["weights"]) <= 1e-13
        assert one["loss"] == pytest.approx(ranks[0]["loss"], rel=1e-14)


@pytest.mark.parametrize("case", names("normalised"))
def test_exact_batch_norms_over_ranks(found: Found, case: tuple[int, str]) -> None:
    ranks = found[case]
    for one in ranks:
        assert max(one["gradients"], one["weights"]) <= 1e-12
        assert one["counters"] == ranks[0]["counters"]


@pytest.mark.parametrize("case", names("out of memory"))
def test_a_rank_out_of_memory_takes_smaller_pieces_and_the_others_begin_again(
    found: Found, case: tuple[int, str]
) -> None:
    ranks = found[case]
    assert max(one["weights"] for one in ranks) <= 1e-13
    assert [len(one["attempts"]) for one in ranks] == [1, 2]


EXPECTED = {
    "error: a rank fails": ("RankFailed: Rank 1 of 2 failed: ValueError", "ValueError: three is not four"),
    "error: the batch is read": ("InvalidLoss: The loss uses the batch", "InvalidLoss: The loss uses the batch"),
}


@pytest.mark.parametrize("case", [(2, name) for name in EXPECTED])
def test_errors_are_raised_on_every_rank(found: Found, case: tuple[int, str]) -> None:
    ranks = found[case]
    for one, text in zip(ranks, EXPECTED[case[1]], strict=True):
        assert text in one["text"] and one["same"]
