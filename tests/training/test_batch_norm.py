"""Batch norms in pieces: exact ones equal one pass over the whole batch; others are chosen, or told."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from microbatch.errors import InvalidModel, InvalidSettings
from microbatch.measure.storages import LiveStorages
from microbatch.training.joint.exact_batch_norm import windows
from microbatch.training.step import TrainStep
from tests.reference.training_step import full_batch_step
from tests.training.batch_norm_jobs import ITEMS, MODELS, by_sample, made, rows, some_samples
from tests.training.jobs import difference, gradients_of

SPLITS = ((by_sample, 1), (by_sample, 4), (some_samples, 5), (some_samples, 12))


def step_of(model: nn.Module, loss: Any, size: int, **options: Any) -> TrainStep:
    options.setdefault("batch_norm", "exact")
    return TrainStep(model, SGD(model.parameters(), lr=0.1), loss, micro_batch_size=size, **options)


def run(model: Any, batch: Any) -> Any:
    return model(batch)


def whole(model: nn.Module, loss: Any, x: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients and the state after one ordinary step over the whole batch."""
    own = copy.deepcopy(model)
    trained = [p for p in own.parameters() if p.requires_grad]
    found = full_batch_step(own, SGD(trained, lr=0.1), loss, run, x)
    return {n: v for n, v in found.items() if n != "loss"}, own.state_dict()


@pytest.mark.parametrize(("loss", "size"), SPLITS)
@pytest.mark.parametrize("name", MODELS)
def test_exact_batch_norms(name: str, size: int, loss: Any) -> None:
    model, x = made(name)
    gradients, state = whole(model, loss, x)
    stepped = copy.deepcopy(model)
    step_of(model, loss, size).accumulate(x)
    assert difference(gradients_of(model), gradients) <= 1e-12
    step_of(stepped, loss, size)(x)
    assert difference_of_states(stepped.state_dict(), state) <= 1e-12


def difference_of_states(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    counters = [name for name in expected if name.endswith("num_batches_tracked")]
    assert all(found[name] == expected[name] for name in counters)
    rest = [name for name in expected if name not in counters]
    return difference({n: found[n] for n in rest}, {n: expected[n] for n in rest})


@pytest.mark.parametrize("steps", [3])
def test_several_steps_stay_exact(steps: int) -> None:
    model, x = made("cumulative")
    own = copy.deepcopy(model)
    optimizer = SGD(own.parameters(), lr=0.1)
    for _ in range(steps):
        full_batch_step(own, optimizer, by_sample, run, x)
    step = step_of(model, by_sample, 4)
    for _ in range(steps):
        assert step(x).num_micro_batches == 4
    assert difference_of_states(model.state_dict(), own.state_dict()) <= 1e-12


def test_float32_is_as_good_as_its_full_batch() -> None:
    model, x = made("residual", torch.float32)
    exact, _ = whole(copy.deepcopy(model).double(), by_sample, x.double())
    full, _ = whole(model, by_sample, x)
    step_of(model, by_sample, 4).accumulate(x)
    assert difference(gradients_of(model), exact) <= 4 * difference(full, exact)


class Custom(torch.autograd.Function):
    """Seen by nobody but torch's engine."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        own: Tensor = 2 * x * gradient
        return own


class WithCustom(nn.Module):
    """What leaves the first window leaves it through a function written in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second, self.last = (
            nn.Linear(8, 6),
            nn.BatchNorm1d(6),
            nn.Linear(6, 6),
            nn.BatchNorm1d(6),
        )

    def forward(self, x: Tensor) -> Tensor:
        early = Custom.apply(self.first(x))  # type: ignore[no-untyped-call]
        result: Tensor = self.last(self.second(self.norm(early))) + early
        return result


@pytest.mark.parametrize(("custom", "ends"), [(False, 2 * 4), (True, 3 * 4)])
def test_forwards_run_no_further_than_their_window(custom: bool, ends: int) -> None:
    model, x = made("residual")
    if custom:
        torch.manual_seed(0)
        model, x = WithCustom().double(), rows()
    gradients, _ = whole(model, by_sample, x)
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    step_of(model, by_sample, 4).accumulate(x)
    assert difference(gradients_of(model), gradients) <= 1e-12
    assert len(calls) == ends


def test_dropout_draws_the_same_in_every_pass() -> None:
    """At an equal split a step is the same again, and pieces draw different numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 6), nn.BatchNorm1d(6)
    ).double()
    masks: list[Tensor] = []
    model.get_submodule("2").register_forward_hook(lambda module, args, output: masks.append(output.detach() == 0))
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        step_of(model, by_sample, 4).accumulate(rows())
        found.append(gradients_of(model))
    assert difference(found[0], found[1]) == 0.0
    assert len(masks) == 2 * (4 + 2 * 4)
    assert all(torch.equal(masks[index], masks[index + 4]) for index in range(8))
    assert not torch.equal(masks[0], masks[1])
    first = torch.rand(1)
    step_of(model, by_sample, 4).accumulate(rows())
    assert not torch.equal(first, torch.rand(1))


def test_joint_losses_over_exact_batch_norms() -> None:
    """A contrastive loss of an encoder with batch norms: 1.42 off where each piece is normalised by itself."""

    def loss(output: Tensor, batch: Any) -> Any:
        scores = functional.normalize(output, dim=1) @ functional.normalize(output.flip(1), dim=1).T * 5
        return functional.cross_entropy(scores, torch.arange(len(scores)), reduction="sum"), len(scores)

    model, x = made("residual")
    gradients, _ = whole(model, loss, x)
    apart = copy.deepcopy(model)
    step_of(apart, loss, 4, joint="outputs", batch_norm="micro_batch").accumulate(x)
    assert difference(gradients_of(apart), gradients) > 0.1
    step = step_of(model, loss, 4, joint="outputs")
    step.accumulate(x)
    assert difference(gradients_of(model), gradients) <= 1e-12


def test_out_of_memory_starts_again() -> None:
    for call in (2, 6, 11):
        model, x = made("residual")
        _, state = whole(model, by_sample, x)
        calls = [0]

        def fail(*_: Any, call: int = call, calls: list[int] = calls) -> None:
            calls[0] += 1
            if calls[0] == call:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        model.get_submodule("3").register_forward_pre_hook(fail)
        result = step_of(model, by_sample, 4)(x)
        assert [attempt.micro_batch_size for attempt in result.attempts] == [4, 2]
        assert difference_of_states(model.state_dict(), state) <= 1e-12


def test_frozen_batch_norms_use_their_running_statistics() -> None:
    model, x = made("residual")
    with torch.no_grad():
        model(x + 1)
    evaluated = copy.deepcopy(model).eval()
    gradients, _ = whole(evaluated, by_sample, x)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    step_of(model, by_sample, 4, batch_norm="frozen").accumulate(x)
    assert difference(gradients_of(model), gradients) <= 1e-13
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert all(module.training for module in model.modules())


def test_what_was_not_chosen_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    model, x = made("two layers")
    x[:5] += 2.0
    step = step_of(model, by_sample, 5, batch_norm=None)
    with caplog.at_level(logging.WARNING, logger="microbatch"):
        step(x)
        step(x)
    (record,) = caplog.records
    text = record.getMessage()
    assert "2 batch norm layers (1, ...) normalise each of 3 pieces" in text
    assert "standard deviations" in text and '"exact"' in text and '"frozen"' in text and '"micro_batch"' in text
    caplog.clear()
    for chosen in ("micro_batch", "exact", "frozen"):
        step_of(model, by_sample, 5, batch_norm=chosen)(x)
    step_of(model, by_sample, ITEMS, batch_norm=None)(x)
    step_of(model.eval(), by_sample, 4, batch_norm=None)(x)
    assert caplog.records == []


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.inner, self.reentrant = (
            nn.Linear(8, 6),
            nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)),
            reentrant,
        )

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant)


class ByLength(nn.Module):
    """Goes through as many batch norms as its piece has rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.BatchNorm1d(8), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(len(x)):
            x = self.norm(x)
        return x * self.scale


REFUSED: dict[str, tuple[Callable[[], nn.Module], type[Exception], str]] = {
    "synchronised": (lambda: nn.Sequential(nn.SyncBatchNorm(8), nn.Linear(8, 3)), InvalidSettings, "Leave the plain"),
    "checkpointed": (lambda: Checkpointed(reentrant=False), InvalidModel, "Switch checkpointing off"),
    "other ways": (ByLength, InvalidModel, "more batch norms than others"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused(name: str) -> None:
    make, kind, text = REFUSED[name]
    model = make().double()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(kind, match=text):
        step_of(model, lambda o, b: (o.square().sum(), len(o)), 3)(rows())
    assert difference(model.state_dict(), before) == 0.0


def test_frozen_needs_running_statistics() -> None:
    model, x = made("not tracked")
    with pytest.raises(InvalidSettings, match="keeps no running statistics"):
        step_of(model, by_sample, 4, batch_norm="frozen")(x)


def test_windows_are_even_and_cover_all() -> None:
    for sizes in ([1] * 7, [100, 1, 1], [1, 1, 100], [5]):
        for number in (1, 2, 3, 10):
            found = windows(sizes, number)
            assert [place for window in found for place in window] == list(range(len(sizes)))
            assert len(found) <= number


def test_memory_holds_a_window_and_what_leaves_it() -> None:
    """A piece's share of one pass over all, the gradients at a border, and nothing afterwards."""
    torch.manual_seed(0)
    blocks = [layer for _ in range(12) for layer in (nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())]
    model = nn.Sequential(nn.Conv2d(2, 6, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))
    x = torch.randn(16, 2, 8, 8)
    one_layer = 16 * 6 * 8 * 8 * 4
    peaks, live = {}, LiveStorages()

    def forward(module: nn.Module, piece: Tensor) -> Any:
        with live:
            return module(piece)

    for size in (16, 4):
        step = step_of(copy.deepcopy(model), by_sample, size, forward=forward)
        step.accumulate(x)
        live.peak = live.now
        step.accumulate(x)
        peaks[size] = live.peak - live.now
    assert peaks[4] <= peaks[16] / 4 + 4 * one_layer
    assert live.now <= one_layer
