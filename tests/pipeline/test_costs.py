"""Costs from numbers, a CSV, and profiles; cut anew for another number of stages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from microbatch.curves.profile import Point, Profile
from microbatch.errors import InvalidCosts
from microbatch.pipeline.costs import Costs, costs_from_csv, costs_from_profiles
from microbatch.pipeline.regroup import regroup, stages_in
from microbatch.pipeline.schedule import BACKWARD, FORWARD, Schedule


def test_a_backward_is_both_gradients_unless_said() -> None:
    schedule = Schedule.of("gpipe", ranks=2, num_micro_batches=3)
    assert Costs(input_gradient=[1, 2], weight_gradient=3).times(BACKWARD, schedule).tolist() == [[4] * 3, [5] * 3]
    assert Costs(full_backward=1.5).times(BACKWARD, schedule).tolist() == [[1.5] * 3] * 2


def test_one_stage_scaled() -> None:
    schedule = Schedule.of("gpipe", ranks=2, num_micro_batches=2)
    assert Costs().scaled(1, 0.5, schedule).times(FORWARD, schedule).tolist() == [[1, 1], [0.5, 0.5]]
    assert Costs(message=2.0).with_link(0, 0.5, 2).links(2).tolist() == [1.0]


def test_from_a_csv(tmp_path: Path) -> None:
    path = tmp_path / "costs.csv"
    path.write_text("stage,forward,input_gradient,weight_gradient,message\n0,1,2,3,0.1\n1,4,5,6,0\n")
    costs = costs_from_csv(path)
    assert costs.forward == [1, 4]
    assert costs.links(2).tolist() == [0.1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("forward,colour\n1,2\n", "columns forward, colour"),
        ("forward\n", "0 rows"),
        ("forward\nmany\n", "line 2: 'many' is not a number"),
        ("", "no header"),
    ],
)
def test_a_csv_that_says_something_else(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "costs.csv").write_text(text)
    with pytest.raises(InvalidCosts, match=message):
        costs_from_csv(tmp_path / "costs.csv")


def profile(seconds: dict[int, float]) -> Profile:
    return Profile(points=tuple(Point(batch_size=b, samples=(t,)) for b, t in seconds.items()), model="stage")


def test_from_profiles_of_the_stages() -> None:
    forward = [profile({1: 1.0, 4: 4.0}), profile({1: 2.0, 4: 8.0})]
    training = [profile({1: 3.0, 4: 12.0}), profile({1: 6.0, 4: 24.0})]
    costs = costs_from_profiles(forward, training, 2, message=0.5)
    assert np.asarray(costs.forward).tolist() == [2.0, 4.0]
    assert np.asarray(costs.input_gradient).tolist() == [2.0, 4.0]
    assert costs.message == 0.5
    with pytest.raises(InvalidCosts, match="covers batch 1 to 4, not 8"):
        costs_from_profiles(forward, training, 8)


def test_regrouped_costs_keep_the_work() -> None:
    costs = Costs(forward=[1, 2, 3, 4], input_gradient=[1, 1, 1, 1], weight_gradient=2.0, message=[1, 2, 3])
    assert stages_in(costs, 2) == 4
    halves = regroup(costs, 4, 2)
    assert np.asarray(halves.forward).tolist() == [3, 7]
    assert halves.weight_gradient == 4.0
    assert np.asarray(halves.message).tolist() == [2]
    doubled = regroup(costs, 4, 8)
    assert np.asarray(doubled.forward).tolist() == [0.5, 0.5, 1, 1, 1.5, 1.5, 2, 2]
    assert np.asarray(doubled.message).tolist() == [1, 1, 2, 2, 3, 3, 3]
    with pytest.raises(InvalidCosts, match="4 stages can be neither joined nor cut into 3"):
        regroup(costs, 4, 3)
    with pytest.raises(InvalidCosts, match="2 and 3 stages"):
        stages_in(Costs(forward=[1, 2], weight_gradient=[1, 2, 3]), 2)
