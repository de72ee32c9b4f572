"""The report as data, and gradients laid side by side."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import microbatch
from microbatch.batch.exactness import Culprit, ExactnessReport, compare_gradients, joined, relative_difference
from microbatch.errors import InvalidModel


def gradients_of(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
    net.zero_grad()
    net(x).square().sum().backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def test_pieces_that_add_up_are_exact() -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double(), torch.randn(6, 4).double()
    parts = [gradients_of(net, x[:4]), gradients_of(net, x[4:])]
    split = {name: parts[0][name] + parts[1][name] for name in parts[0]}
    report = compare_gradients(gradients_of(net, x), split, batch_size=6, pieces=(4, 2))
    assert report.exact and report.culprits == ()
    assert report.largest_difference is not None and report.largest_difference < 1e-15
    assert (report.batch_size, report.splits) == (6, ((4, 2),))


def test_the_parameter_that_differs_is_named() -> None:
    full = {"a.weight": torch.ones(2), "b.weight": torch.full((3,), 4.0), "bias": torch.zeros(2)}
    split = {**full, "b.weight": torch.tensor([4.0, 4.0, 3.0])}
    report = compare_gradients(full, split)
    assert [(c.module, c.kind, c.difference) for c in report.culprits] == [("b", "gradient", 0.25)]


def test_rounding_of_a_gradient_that_is_zero_does_not_count() -> None:
    full = {"a": torch.ones(2, dtype=torch.float64), "b": torch.full((2,), 1e-18, dtype=torch.float64)}
    assert compare_gradients(full, {**full, "b": -full["b"]}).exact


def test_no_gradient_is_one_of_zeros() -> None:
    full: dict[str, Tensor | None] = {"a": torch.ones(2), "b": None, "c": torch.zeros(1)}
    assert compare_gradients(full, {"a": torch.ones(2), "b": torch.zeros(3), "c": None}).exact
    assert not compare_gradients(full, {**full, "b": torch.ones(3)}).exact
    assert compare_gradients({}, {}).exact


def test_other_parameters_or_shapes_are_a_mistake() -> None:
    with pytest.raises(InvalidModel, match="named b"):
        compare_gradients({"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)})
    with pytest.raises(InvalidModel, match="shape"):
        compare_gradients({"a": torch.ones(1)}, {"a": torch.ones(2)})


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_on_one_side_only_differs(bad: float) -> None:
    broken, whole = torch.tensor([1.0, bad]), torch.tensor([1.0, 2.0])
    assert relative_difference(broken, broken) == 0.0
    assert relative_difference(whole, broken) == relative_difference(broken, whole) == math.inf
    report = compare_gradients({"a": whole}, {"a": broken})
    assert not report.exact
    assert report.to_json()["largest_difference"] is None
    json.dumps(report.to_json(), allow_nan=False)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6), st.floats(-1, 1), st.floats(0.1, 100))
def test_the_difference_is_relative(values: list[float], by: float, scale: float) -> None:
    x = torch.tensor([*values, 1000.0], dtype=torch.float64)
    y = x.clone()
    y[0] += by
    found = relative_difference(x, y)
    assert found == pytest.approx(abs(by) / 1000, abs=1e-15)
    assert relative_difference(x * scale, y * scale) == pytest.approx(found, abs=1e-13)


def test_whole_numbers_truth_and_complex_numbers() -> None:
    assert relative_difference(torch.tensor([1, 4]), torch.tensor([1, 2])) == 0.5
    assert relative_difference(torch.tensor([True]), torch.tensor([False])) == 1.0
    assert relative_difference(torch.tensor([2 + 0j]), torch.tensor([0 + 2j])) == 1.0
    assert relative_difference(torch.zeros(0), torch.zeros(0)) == 0.0


def a_report(mode: str, *culprits: Culprit, largest: float | None = 0.0) -> ExactnessReport:
    return ExactnessReport(
        exact=not culprits, largest_difference=largest, culprits=culprits, modes=(mode,), notes=("said once",)
    )


def test_two_modes_make_one_answer() -> None:
    culprit = Culprit(module="bn1", kind="batch_norm", difference=0.3, remedy="GroupNorm.", mode="training")
    both = joined([a_report("training", culprit, largest=0.5), a_report("inference", largest=None)])
    assert not both.exact and both.largest_difference == 0.5
    document = both.to_json()
    assert document["culprits"] == [
        {"module": "bn1", "kind": "batch_norm", "difference": 0.3, "remedy": "GroupNorm.", "evidence": "", "type": "",
         "mode": "training"}
    ]  # fmt: skip
    assert {mode: part["exact"] for mode, part in document["modes"].items()} == {"training": False, "inference": True}
    assert document["notes"] == ["said once"]
    json.dumps(document, allow_nan=False)


def test_a_notebook_shows_the_answer_and_escapes_names() -> None:
    culprit = Culprit(module="<b>", kind="batch_norm", difference=None, remedy="GroupNorm.")
    assert microbatch.ExactnessReport is ExactnessReport
    shown = a_report("training", culprit)._repr_html_()
    assert shown is not None and "not exact" in shown and "<b>" not in shown
