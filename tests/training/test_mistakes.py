"""A mistake gets one clear error with its remedy, and leaves weights, buffers, gradients and random state alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam
from torch.optim.lr_scheduler import ReduceLROnPlateau

from microbatch.errors import InvalidBatch, InvalidBatchSizes, InvalidLoss, InvalidModel, InvalidSettings, UserError
from microbatch.training.step import TrainStep

X, Y = torch.randn(8, 4), torch.randn(8, 1)
BATCH = {"x": X, "y": Y}


def errors(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (output - batch["y"]).square()


def good(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return errors(output, batch).sum(), len(output)


def run(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(batch["x"])


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))


def state_of(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()] + [torch.get_rng_state()]


LOSSES: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "one tensor": (lambda o, b: errors(o, b).mean(), ["returned one number", 'reduction="sum"', "numel()"]),
    "one float": (lambda o, b: 0.5, ["returned one number", 'reduction="sum"']),
    "one tensor in a dict": (lambda o, b: {"mse": errors(o, b).mean()}, ["one number", "'mse'", "dict of such pairs"]),
    "nothing": (lambda o, b: None, ["NoneType", 'reduction="sum"']),
    "three": (lambda o, b: (errors(o, b).sum(), 1, 2), ["tuple", 'reduction="sum"']),
    "empty dict": (lambda o, b: {}, ["empty dict"]),
    "sum not summed": (lambda o, b: (errors(o, b), 8), ["shape (3, 1)", "losses.sum()"]),
    "weight not summed": (lambda o, b: (errors(o, b).sum(), torch.ones(3)), ["shape (3,)", "mask.sum()"]),
    "negative weight": (lambda o, b: (errors(o, b).sum(), -1), ["-1"]),
    "weight not finite": (lambda o, b: (errors(o, b).sum(), float("nan")), ["nan"]),
    "weight with a gradient": (lambda o, b: (errors(o, b).sum(), o.abs().sum()), ["detach()"]),
    "weight is text": (lambda o, b: (errors(o, b).sum(), "8"), ["'8'"]),
    "sum is text": (lambda o, b: ("8", 8), ["'8'"]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_are_no_pair(name: str) -> None:
    loss, words = LOSSES[name]
    model = net()
    check_refused(TrainStep(model, Adam(model.parameters()), loss, forward=run, micro_batch_size=3), InvalidLoss, words)


def check_refused(step: TrainStep, error: type[UserError], words: list[str], batch: Any = None) -> None:
    before = state_of(step.model)
    with pytest.raises(error) as caught:
        step(BATCH if batch is None else batch)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert caught.value.remedy
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(step.model), strict=True))
    assert all(parameter.grad is None for parameter in step.model.parameters())
    assert not step.optimizer.state


def test_a_mistake_in_a_late_piece_leaves_nothing_behind() -> None:
    def loss(output: Tensor, batch: dict[str, Tensor]) -> Any:
        return good(output, batch) if len(output) == 3 else errors(output, batch).mean()

    model = net()
    check_refused(TrainStep(model, Adam(model.parameters()), loss, forward=run, micro_batch_size=3), InvalidLoss, [])


def test_an_error_of_the_users_own_passes_through() -> None:
    def loss(output: Tensor, batch: dict[str, Tensor]) -> Any:
        if len(output) != 3:
            raise KeyError("own")
        return good(output, batch)

    model = net()
    step, before = TrainStep(model, Adam(model.parameters()), loss, forward=run, micro_batch_size=3), state_of(model)
    with pytest.raises(KeyError, match="own"):
        step(BATCH)
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(model), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"x": X, "y": Y[:7]}, ["x has 8", "y has 7"]),
        ({"x": X[:0], "y": Y[:0]}, ["empty"]),
        ("text", ["type str"]),
    ],
)
def test_batches_that_cannot_be_cut(batch: Any, words: list[str]) -> None:
    model = net()
    check_refused(TrainStep(model, Adam(model.parameters()), good, forward=run), InvalidBatch, words, batch)


@pytest.mark.parametrize("size", [0, -1, True, 2.5, "big", None])
def test_sizes_that_are_none(size: Any) -> None:
    model = net()
    with pytest.raises(InvalidBatchSizes, match="whole number of 1 or more"):
        TrainStep(model, SGD(model.parameters()), good, micro_batch_size=size)


def test_a_frozen_model() -> None:
    model = net()
    step = TrainStep(model, Adam(model.parameters()), good, forward=run)
    model.requires_grad_(False)
    check_refused(step, InvalidModel, ["frozen"])


def test_a_loss_that_does_not_depend_on_the_model() -> None:
    model = net()
    step = TrainStep(model, Adam(model.parameters()), lambda o, b: (b["y"].sum(), 8), forward=run, micro_batch_size=3)
    check_refused(step, InvalidModel, ["depends on no parameter"])


def test_an_optimizer_of_another_model() -> None:
    with pytest.raises(InvalidSettings, match="none of the model's parameters"):
        TrainStep(net(), Adam(net().parameters()), good)


def test_optimizers_and_schedulers_that_do_not_step_once() -> None:
    model = net()
    with pytest.raises(InvalidSettings, match="LBFGS"):
        TrainStep(model, LBFGS(model.parameters()), good)
    optimizer = SGD(model.parameters())
    with pytest.raises(InvalidSettings, match="ReduceLROnPlateau"):
        TrainStep(model, optimizer, good, scheduler=ReduceLROnPlateau(optimizer))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("max_norm", value) for value in (0.0, -1.0, float("nan"), "1", True)],
        *[("memory_limit", value) for value in (0, -5, "4 GB")],
        *[("autocast", value) for value in ("bf16", torch.int8)],
        *[(name, "text") for name in ("loss", "forward", "weight", "scheduler", "scaler", "model", "optimizer")],
        *[(name, None) for name in ("loss", "model", "optimizer")],
    ],
)
def test_settings_of_another_kind(name: str, value: Any) -> None:
    model = net()
    given: dict[str, Any] = {"model": model, "optimizer": SGD(model.parameters()), "loss": good, name: value}
    with pytest.raises(InvalidSettings, match=f"{name} is {value!r}. Give"):
        TrainStep(**given)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_not_finite(number: float) -> None:
    def loss(output: Tensor, batch: dict[str, Tensor]) -> Any:
        total, weight = good(output, batch)
        return {"fine": (total, weight), "bad": (total * (number if len(output) == 2 else 1), weight)}

    model = net()
    step = TrainStep(model, Adam(model.parameters()), loss, forward=run, micro_batch_size=3)
    check_refused(step, InvalidLoss, ["term 'bad' is", "weights were left as they are"])


def test_a_weight_given_first_that_is_no_number() -> None:
    model = net()
    step = TrainStep(model, Adam(model.parameters()), good, forward=run, micro_batch_size=3, weight=lambda b: "8")
    check_refused(step, InvalidLoss, ["weight is '8'"])


def test_weights_given_first_that_are_not_the_loss_s() -> None:
    model = net()
    step = TrainStep(
        model, Adam(model.parameters()), good, forward=run, micro_batch_size=3, weight=lambda b: 2 * len(b["y"])
    )
    check_refused(step, InvalidLoss, ["add up to 8", "divided by 16"])
