"""``step.check(batch)``: proves a step that is exact, names what is not, and leaves everything as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW

from microbatch.batch.exactness import ExactnessReport
from microbatch.errors import InvalidBatch, InvalidLoss, NoAnswer
from microbatch.training import gradients, passes
from microbatch.training.step import TrainStep
from tests.training.jobs import ITEMS, LOSSES, by_token, forward, sequences, tagger


def checked(model: nn.Module, loss: Any, batch: Any, **options: Any) -> ExactnessReport:
    """The report; and nothing has changed."""
    optimizer = AdamW(model.parameters(), lr=0.1)
    step = TrainStep(model, optimizer, loss, **options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    report = step.check(batch)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is not None and bool((p.grad == 1).all()) for p in model.parameters())
    assert not optimizer.state and step.choice is None and not step._weights_differ and step._list_of_samples is None
    return report


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_in_float64(name: str) -> None:
    report = checked(tagger(), LOSSES[name], sequences(), forward=forward, micro_batch_size=4)
    assert report.exact and report.culprits == () and report.largest_difference is not None
    assert report.largest_difference <= 1e-13
    assert (report.batch_size, report.splits, report.dtype) == (ITEMS, ((4, 4, 4, 1),), "fp64")
    assert any(note.startswith("In fp64 the step's gradients are") for note in report.notes)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {}),
        (torch.float32, {"autocast": torch.bfloat16}),
        (torch.float32, {"scaler": torch.amp.GradScaler("cpu", init_scale=2.0**10)}),
        (torch.float32, {"micro_batch_size": "auto"}),
        (torch.float32, {"micro_batch_size": 100}),
    ],
    ids=["fp32", "bf16", "autocast", "scaler", "auto", "whole"],
)
def test_working_dtypes_and_options(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Where the step would run the batch whole, halves are compared."""
    report = checked(tagger(dtype), by_token, sequences(), forward=forward, **{"micro_batch_size": 3} | options)
    assert report.exact, report
    assert report.splits == (((7, 6),) if options.get("micro_batch_size") else ((3, 3, 3, 3, 1),))
    name = "bf16" if torch.bfloat16 in (dtype, options.get("autocast")) else "fp32"
    assert any(note.startswith(f"In {name} ") for note in report.notes)


class Net(nn.Module):
    """Rows of 4 to 2 scores; `inside` is what is in question."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.first, self.inside, self.last = nn.Linear(4, 6), inside, nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.inside(self.first(x)))
        return result


class OnlyInFloat32(nn.Module):
    """Small pieces get another answer where the model really runs, not in the copy in float64."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.001 if x.dtype == torch.float32 and len(x) < 9 else x


def squares(output: Tensor, _: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


def mean_as_sum(output: Tensor, _: Tensor) -> tuple[Tensor, int]:
    return output.square().mean(), 1


def value_alone(output: Tensor, _: Tensor) -> tuple[Tensor, int]:
    """Its gradients add up, what it reports does not."""
    return output.square().sum() + output.detach().mean(), len(output)


def contrast(output: Tensor, _: Tensor) -> tuple[Tensor, int]:
    scores = output @ output.T
    return functional.cross_entropy(scores, torch.arange(len(output)), reduction="sum"), len(output)


NOT_EXACT: dict[str, tuple[nn.Module, Callable[..., Any], str, str]] = {
    "batch norm": (nn.BatchNorm1d(6), squares, "inside", "batch_norm"),
    "loss is a mean": (nn.Tanh(), mean_as_sum, "loss", "loss"),
    "what is reported": (nn.Tanh(), value_alone, "loss", "loss"),
    "contrastive": (nn.Tanh(), contrast, "loss", "loss"),
    "only in the working dtype": (OnlyInFloat32(), squares, "last", "gradient"),
}


@pytest.mark.parametrize("name", NOT_EXACT)
def test_what_is_not_exact_is_named(name: str) -> None:
    inside, loss, module, kind = NOT_EXACT[name]
    torch.manual_seed(0)
    report = checked(Net(copy.deepcopy(inside)), loss, torch.randn(10, 4), micro_batch_size=4)
    assert not report.exact and report.largest_difference is not None and report.largest_difference > 1e-4
    assert (report.culprits[0].module, report.culprits[0].kind) == (module, kind)
    assert report.culprits[0].remedy


@pytest.mark.parametrize("inside", [nn.Dropout(0.5), nn.LayerNorm(6), nn.GroupNorm(2, 6)])
def test_what_is_exact_by_row(inside: nn.Module) -> None:
    """Dropout is put aside: it draws anew for each piece."""
    assert checked(Net(inside), squares, torch.randn(9, 4), micro_batch_size=4).exact


BREAKS: dict[str, tuple[Any, str, Any]] = {
    "the sum of the pieces is scaled": (gradients, "scale", lambda parameters, factor: None),
    "each piece counts the same": (passes, "power_of_two", lambda weight: 3.0 * weight),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_step_that_divides_wrongly_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name, broken = BREAKS[what]
    if name == "power_of_two":
        monkeypatch.setattr(gradients, "scale", lambda parameters, factor: None)
    monkeypatch.setattr(place, name, broken)
    torch.manual_seed(0)
    report = checked(Net(nn.Tanh()), squares, torch.randn(9, 4), micro_batch_size=4)
    assert not report.exact and {culprit.kind for culprit in report.culprits} == {"gradient"}


def test_a_model_that_float64_cannot_run_is_compared_in_float32() -> None:
    scale = torch.eye(2)

    def loss(output: Tensor, _: Tensor) -> tuple[Tensor, int]:
        return (output @ scale).square().sum(), len(output)

    report = checked(Net(nn.Tanh()), loss, torch.randn(9, 4), micro_batch_size=4)
    assert report.exact and report.dtype == "fp32"


def test_a_batch_of_one_and_a_loss_without_weight() -> None:
    model = Net(nn.Tanh())
    with pytest.raises(InvalidBatch, match="cannot be cut"):
        TrainStep(model, SGD(model.parameters()), squares).check(torch.randn(1, 4))
    with pytest.raises(InvalidLoss, match="one number"):
        TrainStep(model, SGD(model.parameters()), lambda o, b: o.mean()).check(torch.randn(4, 4))


def test_a_whole_batch_that_does_not_fit_gets_no_answer() -> None:
    class Narrow(nn.Tanh):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return super().forward(x)

    model = Net(Narrow())
    step = TrainStep(model, SGD(model.parameters()), squares, micro_batch_size=4)
    with pytest.raises(NoAnswer, match="1 pieces of 9 items do not fit"):
        step.check(torch.randn(9, 4))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_frozen_and_tied_parameters_and_lists_of_samples() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.frozen, self.second = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
            self.second.weight = self.first.weight
            self.frozen.requires_grad_(False)

        def forward(self, rows: list[Tensor]) -> Tensor:
            return torch.stack([self.second(self.frozen(self.first(row))).sum(0) for row in rows])

    model = Pooled()
    step = TrainStep(model, SGD(model.parameters()), squares, micro_batch_size=2, list_of_samples=True)
    report = step.check([torch.randn(length, 3) for length in (3, 1, 2, 4, 5)])
    assert report.exact and report.splits == ((2, 2, 1),)
