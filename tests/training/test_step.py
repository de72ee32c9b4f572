"""One step: everything that happens once happens once, everything per piece per piece, and nothing else happens."""

from __future__ import annotations

import copy
import json
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

from microbatch.training import passes
from microbatch.training.step import TrainStep
from tests.training.jobs import (
    ITEMS,
    Tagger,
    by_token,
    difference,
    forward,
    gradients_of,
    own_weights,
    reference,
    sequences,
    tagger,
)

SIZE = 4
PIECES = -(-ITEMS // SIZE)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def watch(model: nn.Module, optimizer: torch.optim.Optimizer, events: list[str]) -> None:
    """Every kind of hook, each noting that it was called."""
    head = model.get_submodule("head")
    head.register_forward_pre_hook(lambda *_: events.append("forward pre"))
    head.register_forward_hook(lambda *_: events.append("forward"))
    head.register_full_backward_hook(lambda *_: events.append("backward"))
    head.get_parameter("weight").register_hook(lambda _: events.append("gradient"))
    head.get_parameter("weight").register_post_accumulate_grad_hook(lambda _: events.append("accumulated"))
    optimizer.register_step_pre_hook(lambda *_: events.append("optimizer pre"))
    optimizer.register_step_post_hook(lambda *_: events.append("optimizer post"))


def loop_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> None:
    number = (batch["targets"] != -100).sum()
    optimizer.zero_grad()
    for start in range(0, ITEMS, SIZE):
        piece = {name: value[start : start + SIZE] for name, value in batch.items()}
        (by_token(forward(model, piece), piece)[0] / number).backward()
    optimizer.step()


def test_hooks_are_called_as_in_a_loop_by_hand() -> None:
    batch = sequences()
    batch["targets"][:, 0] = 1  # every piece has a target
    seen: list[list[str]] = []
    for run in (loop_by_hand, lambda m, o, b: TrainStep(m, o, by_token, forward=forward, micro_batch_size=SIZE)(b)):
        model = tagger()
        optimizer = SGD(model.parameters(), lr=0.1)
        events: list[str] = []
        watch(model, optimizer, events)
        run(model, optimizer, batch)
        seen.append(events)
    assert seen[0] == seen[1]
    assert [seen[1].count(event) for event in ("accumulated", "optimizer pre")] == [PIECES, 1]


def test_each_piece_moves_at_its_turn_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, events = tagger(), sequences(), list[str]()
    before = {name: value.clone() for name, value in batch.items()}
    earlier: list[weakref.ref[Tensor]] = []

    def moved(piece: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        events.append(f"move {len(piece['tokens'])}")
        assert all(tensor() is None for tensor in earlier)
        copied = {name: value.clone() for name, value in piece.items()}
        earlier.extend(weakref.ref(value) for value in copied.values())
        return copied

    monkeypatch.setattr(passes, "to_device", moved)
    model.head.register_forward_hook(lambda module, args, output: earlier.append(weakref.ref(output)))
    model.head.weight.register_post_accumulate_grad_hook(lambda _: events.append("backward"))
    batch["targets"][:, 0] = 1
    TrainStep(model, SGD(model.parameters(), lr=0.1), by_token, forward=forward, micro_batch_size=SIZE)(batch)
    assert events == ["move 4", "backward"] * 3 + ["move 1", "backward"]
    assert all(torch.equal(batch[name], before[name]) for name in batch if name != "targets")


def test_scheduler_and_optimizer_state_move_once_per_step() -> None:
    model = tagger()
    optimizer = AdamW(model.parameters(), lr=1.0)
    step = TrainStep(
        model, optimizer, by_token, forward=forward, micro_batch_size=SIZE, scheduler=StepLR(optimizer, 1, gamma=0.5)
    )
    for done in (1, 2, 3):
        step(sequences(done))
        assert optimizer.param_groups[0]["lr"] == 0.5**done
        assert optimizer.state[model.head.weight]["step"] == done
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_left_over_do_not_count() -> None:
    model, batch = tagger(), sequences()
    expected = reference(model, by_token, batch)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e3)
    TrainStep(model, SGD(model.parameters(), lr=0.1), by_token, forward=forward, micro_batch_size=SIZE)(batch)
    assert difference(weights_of(model), expected.weights) <= 1e-14


def without_targets() -> dict[str, Tensor]:
    batch = sequences()
    batch["targets"].fill_(-100)
    return batch


@pytest.mark.parametrize("size", [SIZE, ITEMS])
def test_a_batch_without_weight_is_skipped_and_told(size: int, caplog: pytest.LogCaptureFixture) -> None:
    model, events = tagger(), list[str]()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    step = TrainStep(
        model, optimizer, by_token, forward=forward, micro_batch_size=size, scheduler=scheduler, max_norm=1.0
    )
    before = weights_of(model)
    watch(model, optimizer, events)
    with caplog.at_level(logging.WARNING, logger="microbatch"):
        result = step(without_targets())
    assert result.skipped == "the batch has no weight"
    assert [record.message for record in caplog.records] == ["Step skipped: the batch has no weight (13 items)."]
    assert difference(weights_of(model), before) == 0.0
    assert "optimizer pre" not in events
    assert optimizer.param_groups[0]["lr"] == 0.1
    document = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert document["loss"] is None and document["weight"] == 0.0 and document["skipped"]


def test_results_say_what_was_done() -> None:
    model = tagger()
    result = TrainStep(model, SGD(model.parameters(), lr=0.1), own_weights, forward=forward, micro_batch_size=SIZE)(
        sequences()
    )
    assert (result.batch_size, result.micro_batch_size, result.num_micro_batches) == (ITEMS, SIZE, PIECES)
    assert (result.skipped, result.peak_bytes, result.grad_norm) == (None, None, None)
    assert [attempt.outcome for attempt in result.attempts] == ["done"]
    assert result.weights["samples"] == ITEMS and set(result.losses) == {"tokens", "samples", "policy"}


def test_scaled_losses_give_the_same_step() -> None:
    model, batch = tagger(torch.float32), sequences()
    expected = reference(copy.deepcopy(model).double(), by_token, batch, max_norm=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    optimizer = SGD(model.parameters(), lr=0.1)
    step = TrainStep(model, optimizer, by_token, forward=forward, micro_batch_size=SIZE, scaler=scaler, max_norm=0.1)
    result = step(batch)
    norm = torch.stack([gradient.square().sum() for gradient in expected.gradients.values()]).sum().sqrt().item()
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    assert difference(weights_of(model), expected.weights) <= 1e-6


def test_a_gradient_that_is_not_finite_skips_the_step_and_lowers_the_scale() -> None:
    def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        losses, weight = by_token(output, batch)
        return losses * (float("inf") if batch["tokens"][0, 0] == 8 else 1.0), weight

    model, poisoned = tagger(torch.float32), sequences()
    poisoned["targets"][:, 0] = 1
    poisoned["tokens"][:, 0] = torch.arange(ITEMS)
    optimizer, scaler = SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    step = TrainStep(
        model, optimizer, loss, forward=forward, micro_batch_size=SIZE, scaler=scaler, scheduler=scheduler, max_norm=1.0
    )
    before = weights_of(model)
    result = step(poisoned)
    assert result.skipped == "a gradient is not finite"
    assert difference(weights_of(model), before) == 0.0
    assert (scaler.get_scale(), optimizer.param_groups[0]["lr"]) == (4.0, 0.1)
    poisoned["tokens"][8, 0] = poisoned["tokens"][9, 0]
    assert step(poisoned).skipped is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_pieces_of_narrow_weights_lose_nothing(dtype: torch.dtype) -> None:
    batch = sequences(items=64)
    batch["targets"][:, 0] = 1
    model = tagger(dtype)
    exact = reference(copy.deepcopy(model).double(), by_token, batch).gradients
    whole = difference(reference(model, by_token, batch).gradients, exact)
    optimizer = SGD(model.parameters(), lr=0.1)
    step = TrainStep(model, optimizer, by_token, forward=forward, micro_batch_size=1)
    step.accumulate(batch)
    assert difference(gradients_of(model), exact) <= 1.25 * whole
    assert {gradient.dtype for gradient in gradients_of(model).values()} == {dtype}
    assert step(batch).num_micro_batches == 64
    assert {parameter.grad_dtype for parameter in model.parameters()} == {dtype}


def test_fp16_sums_of_many_items_do_not_overflow() -> None:
    model, width = nn.Linear(8, 1).half(), 2000
    inputs = torch.rand(64, width, 8).half() * 30
    step = TrainStep(
        model,
        SGD(model.parameters(), lr=0.0),
        lambda output, batch: (output.float().sum(), output.numel()),
        micro_batch_size=16,
    )
    step.accumulate(inputs)
    assert model.weight.grad is not None
    assert difference({"w": model.weight.grad}, {"w": inputs.double().mean((0, 1))[None]}) <= 2e-3


def test_autocast_covers_forward_and_loss_but_not_backward() -> None:
    model, batch, seen = tagger(torch.float32), sequences(), list[torch.dtype | bool]()
    model.head.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model.head.weight.register_post_accumulate_grad_hook(lambda _: seen.append(torch.is_autocast_enabled("cpu")))

    def loss(output: Tensor, piece: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        seen.append(torch.is_autocast_enabled("cpu"))
        return by_token(output.float(), piece)

    step = TrainStep(
        model, SGD(model.parameters(), lr=0.1), loss, forward=forward, micro_batch_size=7, autocast=torch.bfloat16
    )
    step(batch)
    assert seen == [torch.bfloat16, True, False] * 2


class Checkpointed(Tagger):
    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        hidden: Any = checkpoint(self.block, self.embed(tokens), None, padding, use_reentrant=False)
        scores: Tensor = self.head(hidden)
        return scores


def test_activation_checkpointing() -> None:
    torch.manual_seed(0)
    model, batch = Checkpointed().double(), sequences()
    expected = reference(model, by_token, batch)
    TrainStep(model, SGD(model.parameters(), lr=0.1), by_token, forward=forward, micro_batch_size=SIZE)(batch)
    assert difference(weights_of(model), expected.weights) <= 1e-14


def test_checkpointing_with_dropout_equals_the_same_pieces_without_it() -> None:
    found = []
    for kind in (Tagger, Checkpointed):
        torch.manual_seed(0)
        model = kind(dropout=0.5).double()
        torch.manual_seed(1)
        TrainStep(model, SGD(model.parameters(), lr=0.1), own_weights, forward=forward, micro_batch_size=SIZE)(
            sequences()
        )
        found.append(weights_of(model))
    assert difference(found[0], found[1]) == 0.0


def test_compiled_models_compile_once_more_for_a_tail() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    compiled: Any = torch.compile(model, backend=counter)
    step = TrainStep(compiled, SGD(compiled.parameters(), lr=0.1), square, micro_batch_size=5)
    for _ in range(3):
        step(torch.randn(23, 6).double())
    assert counter.frame_count <= 2
    batch = torch.randn(23, 6).double()
    expected = reference(model, square, batch, run=lambda m, b: m(b))
    step(batch)
    assert difference(weights_of(model), expected.weights) <= 1e-14


def square(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


def test_sparse_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3)).double()
    batch = torch.randint(9, (13,))
    expected = reference(model, square, batch, run=lambda m, b: m(b))
    TrainStep(model, SGD(model.parameters(), lr=0.1), square, micro_batch_size=4, max_norm=1e9)(batch)
    assert difference(weights_of(model), expected.weights) <= 1e-14


class Branches(nn.Module):
    """A part that some pieces do not use, a frozen one, and a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.frozen.requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        hidden: Tensor = self.tied(self.frozen(self.first(rows)))
        return hidden + (self.second(rows) * (rows[:, :1] > 1.0)) if (rows[:, 0] > 1.0).any() else hidden


@pytest.mark.parametrize("size", [1, 4, 13])
def test_parts_unused_frozen_and_tied(size: int) -> None:
    torch.manual_seed(0)
    model, batch = Branches().double(), torch.randn(13, 4).double()
    expected = reference(model, square, batch, run=lambda m, b: m(b))
    TrainStep(model, SGD(model.parameters(), lr=0.1), square, micro_batch_size=size)(batch)
    assert difference(weights_of(model), expected.weights) <= 1e-14


CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda a, b: (a, b),
    "list of members": lambda a, b: [a, b.long()],
    "dict": lambda a, b: {"b": b, "a": a},
}


@pytest.mark.parametrize("name", CALLS)
def test_the_model_is_called_by_the_batchs_type(name: str) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.scale * a * b[:, None].double()

    a, b = torch.randn(7, 2).double(), torch.arange(7.0)
    model = Two()
    TrainStep(model, SGD(model.parameters(), lr=1.0), square, micro_batch_size=3)(CALLS[name](a, b))
    expected = 1.0 - 2 * (a * b[:, None]).square().sum().item() / 7
    assert model.scale.item() == pytest.approx(expected, rel=1e-12)


def test_a_list_of_samples_is_one_argument_and_stays_one_when_lengths_agree() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, rows: list[Tensor]) -> Tensor:
            return torch.stack([self.scale * row.sum() for row in rows])

    model = Pooled()
    step = TrainStep(model, SGD(model.parameters(), lr=0.0), square, micro_batch_size=2)
    assert step([torch.ones(length).double() for length in (3, 1, 2)]).batch_size == 3
    assert step([torch.ones(4).double() for _ in range(3)]).loss == pytest.approx(16.0)
