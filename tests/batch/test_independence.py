"""Planted culprits are named, clean models are cleared, and nothing of the user's is changed."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from microbatch.batch.exactness import ExactnessReport
from microbatch.batch.independence import check_independence
from microbatch.errors import InvalidBatch, InvalidLoss, InvalidModel, InvalidSettings, ModelFailed, NoAnswer
from tests.batch.planted import CLEAN, MIXING, PADDED, PADDING, ROWS, STATE, TIME, TRAINING, Plant
from tests.batch.planted_models import centred, cnn

CULPRITS = MIXING | STATE | TIME | PADDING | TRAINING


def cases(table: dict[str, Plant]) -> list[Any]:
    return [pytest.param(plant, mode, id=f"{name}, {mode}") for name, plant in table.items() for mode in plant.modes]


def checked(plant: Plant, mode: str) -> ExactnessReport:
    torch.manual_seed(3)
    return check_independence(plant.make(), plant.batch, mode=mode, **plant.options)


@pytest.mark.parametrize(("plant", "mode"), cases(CULPRITS))
def test_the_culprit_is_named_first(plant: Plant, mode: str) -> None:
    report = checked(plant, mode)
    assert not report.exact
    first = report.culprits[0]
    assert (first.module, first.kind) == plant.found
    assert first.remedy
    assert first.mode == mode
    assert first.difference is None or first.difference > 1e-9


@pytest.mark.parametrize(("plant", "mode"), cases(CLEAN))
def test_no_false_alarm(plant: Plant, mode: str) -> None:
    report = checked(plant, mode)
    assert report.culprits == ()
    assert report.exact
    assert report.largest_difference is not None and report.largest_difference < 1e-13


def test_every_culprit_of_a_network_is_listed_in_order() -> None:
    torch.manual_seed(3)
    net = nn.Sequential(cnn(nn.BatchNorm2d), nn.Linear(16, 8), nn.BatchNorm1d(8), Centred(), nn.BatchNorm1d(8))
    report = check_independence(net, torch.randn(6, 3, 6, 6))
    assert [(c.module, c.kind) for c in report.culprits] == [
        ("0.1", "batch_norm"),
        ("0.4", "batch_norm"),
        ("2", "batch_norm"),
        ("3", "batch_statistic"),
        ("4", "batch_norm"),
    ]


class Centred(nn.Module):
    """Takes the mean over the batch away."""

    def forward(self, x: Tensor) -> Tensor:
        return centred(x)


def test_the_model_and_the_random_state_are_left_as_they_were() -> None:
    net: Any = cnn(nn.BatchNorm2d)
    net[1].eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    flags = [module.training for module in net.modules()]
    batch = torch.randn(4, 3, 6, 6)
    given = batch.clone()
    random_states = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
    check_independence(net, batch)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert [module.training for module in net.modules()] == flags
    assert all(parameter.grad is None for parameter in net.parameters())
    assert torch.equal(batch, given)
    assert torch.equal(torch.get_rng_state(), random_states[0])
    assert (str(np.random.get_state()), random.getstate()) == random_states[1:]
    assert torch.get_default_dtype() is torch.float32
    assert net[0].weight.dtype is torch.float32


def test_a_state_with_a_graph_can_be_copied() -> None:
    net = next(plant for name, plant in STATE.items() if name == "LSTM goes on").make()
    net(torch.randn(6, 5, 8))
    assert check_independence(net, torch.randn(6, 5, 8)).culprits[0].kind in ("state", "shape")


def test_a_compiled_model_is_checked_as_it_is_inside() -> None:
    compiled: Any = torch.compile(cnn(nn.BatchNorm2d), backend="eager")
    report = check_independence(compiled, torch.randn(4, 3, 6, 6))
    assert report.culprits[0].module == "1"


def test_an_operator_without_float64_falls_back_and_says_so() -> None:
    class Single(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype is torch.float64:
                raise TypeError("float32 only")
            return torch.softmax(x, -1)

    report = check_independence(Single(), ROWS, mode="inference")
    assert report.exact and report.dtype == "fp32" and report.tolerance == 1e-4
    assert "float32 only" in report.notes[0]


@pytest.mark.parametrize(
    ("name", "kept"),
    [("hidden state", "hidden"), ("counter", "calls"), ("cache", "seen"), ("last batch in a buffer", "last")],
)
def test_what_is_kept_is_told(name: str, kept: str) -> None:
    assert checked(STATE[name], "inference").culprits[0].evidence == f"it keeps {kept} from the call before"


def test_a_copy_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", type("Memory", (), {"available": 100}))
    with pytest.raises(NoAnswer, match="512 B"):
        check_independence(nn.Linear(8, 8, bias=False), ROWS)


def test_lazy_layers_are_told() -> None:
    with pytest.raises(InvalidModel, match="lazy"):
        check_independence(nn.LazyLinear(4), ROWS)


def test_state_outside_of_the_model_is_seen() -> None:
    calls: list[int] = []

    def forward(model: Any, batch: Tensor) -> Tensor:
        calls.append(1)
        return model(batch) * len(calls)  # type: ignore[no-any-return]

    report = check_independence(nn.Linear(8, 3), ROWS, forward=forward)
    assert (report.culprits[0].module, report.culprits[0].kind) == ("forward", "state")
    assert report.largest_difference is not None and report.largest_difference > 0.1


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("container", ["tensor", "tuple", "dict"])
def test_a_batch_of_any_size_and_form(size: int, container: str) -> None:
    x = torch.randn(size, 8)
    batch = {"tensor": x, "tuple": (x,), "dict": {"input": x}}[container]
    assert check_independence(nn.Linear(8, 3), batch).exact
    assert not check_independence(nn.Linear(8, 3), batch, forward=lambda m, b: centred(m(x_of(b)))).exact


def x_of(batch: Any) -> Tensor:
    return batch if isinstance(batch, Tensor) else batch["input"] if isinstance(batch, dict) else batch[0]


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_on_either_side(side: str) -> None:
    plant = PADDING["attention without its mask"]
    batch = PADDED if side == "right" else {name: value.flip(1) for name, value in PADDED.items()}
    report = checked(Plant(plant.make, batch), "inference")
    assert (report.culprits[0].module, report.culprits[0].kind) == plant.found
    assert checked(Plant(CLEAN["masked"].make, batch), "inference").exact


def test_dropout_is_put_aside_and_said() -> None:
    report = check_independence(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), ROWS)
    assert report.exact
    assert any("dropout is off" in note for note in report.notes)


def test_gradients_are_compared_in_training_only() -> None:
    plant = TRAINING["a backward pass that mixes"]
    assert checked(Plant(plant.make, plant.batch), "inference").exact


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"mode": "decode"}, InvalidSettings, "no mode 'decode'"),
        ({"mode": "inference", "loss": lambda o, b: (o.sum(), 1)}, InvalidSettings, "no loss"),
        ({"batch": ROWS[:1]}, InvalidBatch, "1 row"),
        ({"batch": (ROWS, ROWS[:3])}, InvalidBatch, "different lengths"),
        ({"loss": lambda o, b: o.mean()}, InvalidLoss, "sum and its weight"),
        ({"batch": torch.zeros(4, 5)}, ModelFailed, "shapes cannot be multiplied"),
        ({"batch_dimension": 2}, InvalidModel, "no tensor with a batch"),
    ],
)
def test_mistakes_are_told(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    given = {"batch": ROWS} | arguments
    with pytest.raises(error, match=words):
        check_independence(nn.Linear(8, 3), **given)
