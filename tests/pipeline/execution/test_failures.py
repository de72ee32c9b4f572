"""A rank that fails or is killed: its own error on every rank, within seconds, and no rank that waits for ever."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from microbatch.errors import RankFailed
from microbatch.pipeline.execution import launch as starting
from microbatch.pipeline.execution.launch import launch
from tests.pipeline.execution import failing

pytestmark = pytest.mark.alone

SOON = 2.0
"""Seconds within which every rank has the error; the best of a few tries counts on a machine that is busy."""
TRIES = 3


@pytest.fixture(scope="module")
def tries(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """What both ranks saw at every place; tried again while the machine is too slow."""
    found: list[list[dict[str, Any]]] = []
    for _ in range(TRIES):
        found.append(launch(failing.fails_everywhere, 2, str(tmp_path_factory.mktemp("ranks"))))
        if max(apart(found[-1], place) for place in failing.PLACES) <= SOON:
            break
    return found


def apart(ranks: list[dict[str, Any]], place: str) -> float:
    """Seconds between the errors of the two ranks; they read one clock."""
    return abs(float(ranks[0][place]["at"]) - float(ranks[1][place]["at"]))


@pytest.mark.parametrize("place", failing.PLACES)
def test_a_rank_that_raises_shows_its_own_error_on_every_rank(place: str, tries: list[list[dict[str, Any]]]) -> None:
    rank, where = failing.PLACES[place]
    for ranks in tries:
        own, other = ranks[rank][place], ranks[1 - rank][place]
        assert own["type"] == "Broken"
        assert own["text"] == f"no luck in the {place}"
        assert own["notes"] == [f"In the {where}, on rank {rank} of 2."]
        assert other["type"] == "RankFailed"
        assert other["text"].startswith(f"Rank {rank} of 2 failed in the {where}: Broken: no luck in the {place}.")
    assert min(apart(ranks, place) for ranks in tries) <= SOON


def test_a_killed_rank_is_named_to_those_that_wait_for_it(tmp_path: Path) -> None:
    """Both by the rank that waits for a message and by the process that started them."""
    began = time.monotonic()
    with pytest.raises(RankFailed, match=r"Rank 1 of 2 was killed by signal 9 \(SIGKILL\)\."):
        launch(failing.is_killed, 2, str(tmp_path))
    assert time.monotonic() - began < 60
    seen = (tmp_path / "rank 0").read_text()
    assert seen.startswith("RankFailed: Rank 1 of 2 is gone: its process ")
    assert "closed by peer" not in seen


def test_an_error_that_nobody_catches_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "ENDING", 0.5)
    began = time.monotonic()
    with pytest.raises(RankFailed, match=r"On rank 1 of 2: Broken: no luck at all") as caught:
        launch(failing.raises, 2)
    assert "in raises" in caught.value.__notes__[0]
    assert time.monotonic() - began < 60  # the other would have slept for as long
