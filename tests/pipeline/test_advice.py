"""The sentence on what to change."""

from __future__ import annotations

from typing import Any

import pytest

from microbatch.pipeline.advice import advice
from microbatch.pipeline.costs import Costs
from microbatch.pipeline.schedule import Schedule
from microbatch.pipeline.simulate import simulate


def said(name: str, count: int = 16, **costs: Any) -> str:
    return advice(simulate(Schedule.of(name, ranks=4, num_micro_batches=count), Costs(**costs)))


@pytest.mark.parametrize(
    ("name", "costs", "words"),
    [
        ("one_f_one_b", {}, "Take --schedule zb_"),
        ("zb_h2", {"forward": [1, 1, 1, 3]}, "Give stage 3 fewer layers"),
        ("one_f_one_b", {"forward": [1, 1, 1, 6]}, "Give stage 3 fewer layers"),  # and another schedule saves less
        ("zb_h2", {"per_message": 0.5, "message": 0.5}, "Send fewer messages"),
        ("forward_only", {"forward": [1, 2, 1, 1]}, "Give stage 1 fewer layers: it takes"),
        ("forward_only", {}, "32 micro-batches of this size"),
    ],
)
def test_what_saves_most_is_said(name: str, costs: dict[str, Any], words: str) -> None:
    assert words in said(name, **costs)


def test_nothing_to_change() -> None:
    assert said("forward_only", 1024).startswith("Nothing")


def test_what_is_only_simulated_is_not_advised() -> None:
    assert "dualpipe " not in said("gpipe")
    assert "chimera" not in said("gpipe")
