"""Costs of stages in files, there and back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from microbatch.errors import InvalidCosts
from microbatch.pipeline.costs import Costs
from microbatch.pipeline.costs_file import costs_csv, costs_json, read_costs
from microbatch.pipeline.schedule import Schedule
from microbatch.pipeline.simulate import simulate

COSTS = Costs(
    forward=[1.0, 2.5], input_gradient=[1.0, 2.0], weight_gradient=0.7, full_backward=[1.5, 2.2], message=0.125,
    per_message=0.01, optimizer=[0.1, 0.2], activation_bytes=1000, pairs_apart=True, global_clip=True, overlap=False,
)  # fmt: skip


@pytest.mark.parametrize("form", ["csv", "json", "run.json"])
def test_costs_come_back(form: str, tmp_path: Path) -> None:
    path = tmp_path / f"costs.{form}"
    document = costs_json(COSTS, 2)
    texts = {"csv": costs_csv(COSTS, 2), "json": json.dumps(document), "run.json": json.dumps({"costs": document})}
    path.write_text(texts[form])
    found = read_costs(path)
    for name in ("forward", "input_gradient", "weight_gradient", "full_backward", "optimizer", "activation_bytes"):
        np.testing.assert_array_equal(found.per_stage(name, 2), COSTS.per_stage(name, 2))
    np.testing.assert_array_equal(found.links(2), COSTS.links(2))
    assert found.per_message == COSTS.per_message
    if form != "csv":  # a row per stage has no room for what belongs to the step
        schedule = Schedule.of("one_f_one_b", ranks=2, num_micro_batches=4)
        assert simulate(schedule, found).makespan_with_optimizer == simulate(schedule, COSTS).makespan_with_optimizer


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "{", "cannot be read"),
        ("a.json", "[1, 2]", "holds no costs"),
        ("a.json", '{"costs": {"message": 1}}', "holds no costs"),
        ("a.json", '{"forward": [1, "x"]}', r"forward is \[1, 'x'\]"),
        ("a.json", '{"forward": 1, "overlap": 3}', "overlap is 3"),
        ("a.csv", "stage,backward\n0,1\n", "has the columns stage, backward"),
    ],
)
def test_other_files_are_refused(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidCosts, match=said):
        read_costs(tmp_path / name)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for name in ("a.json", "a.csv"):
        with pytest.raises(InvalidCosts, match="There is no file"):
            read_costs(tmp_path / name)
