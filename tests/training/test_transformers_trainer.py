"""transformers.Trainer: inexact by itself, exact with `ExactTrainer`, and all else as it was."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from microbatch.batch.token_budget import TokenBudget
from microbatch.errors import DoesNotFit, InvalidLoss, InvalidSettings
from microbatch.training.integrations import mean_loss
from tests.training.jobs import difference, sequences
from tests.training.taggers import (
    LR,
    ROWS,
    Deaf,
    Dividing,
    Items,
    Returning,
    as_pair,
    between_items,
    by_item,
    by_label,
    by_next_label,
    gradients_between,
    made,
    token_sums,
    weights_of,
    whole_batch,
)

pytest.importorskip("accelerate", reason="the extra trainer is not installed: transformers.Trainer needs accelerate")

from transformers import Trainer, TrainingArguments

from microbatch.training.integrations import transformers_trainer
from microbatch.training.integrations.transformers_trainer import ExactTrainer


def run(trainer: type, model: Returning, folder: Path, rows: int, accumulation: int, **more: Any) -> Any:
    """One trainer after its training; `more` with a name of the arguments goes there."""
    names = TrainingArguments.__dataclass_fields__
    settings: dict[str, Any] = {
        "max_steps": 1,
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "logging_strategy": "no",
        "lr_scheduler_type": "constant",
    }
    settings |= {name: more.pop(name) for name in list(more) if name in names}
    resume = more.pop("resume", None)
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **settings,
    )
    optimizer = SGD(model.parameters(), lr=LR)
    schedule = LambdaLR(optimizer, lambda step: 0.5**step)
    data = more.pop("data", None) or Items()
    made = trainer(model, args, train_dataset=data, optimizers=(optimizer, schedule), **more)
    made.train(resume_from_checkpoint=resume)
    return made


def error_of(
    trainer: type, model: Returning, whole: Callable[..., Any], folder: Path, *sizes: int, **more: Any
) -> float:
    """Of one step's gradient against the whole batch, over the largest of the gradient."""
    expected = whole_batch(model, whole, Items().batch).gradients
    before = weights_of(model)
    run(trainer, model, folder, *sizes, **more)
    return difference(gradients_between(before, weights_of(model)), expected)


LOSSES: dict[str, tuple[type[Returning], Callable[[Tensor, Tensor], Tensor], bool]] = {
    "mean of labels": (Returning, by_label, True),
    "mean of next labels": (Returning, by_next_label, True),
    "keywords not listened to": (Deaf, by_label, True),
    "divides by what it is told": (Dividing, by_label, False),
    "mean of items": (Returning, by_item, False),
}
"""Kind of model, its loss, and whether the Trainer itself gets it wrong."""


@pytest.mark.parametrize("name", LOSSES)
def test_the_original_is_off_and_exact_steps_are_not(name: str, tmp_path: Path) -> None:
    kind, loss, wrong = LOSSES[name]
    original = error_of(Trainer, made(kind, loss), as_pair(loss), tmp_path, 4, 8)
    assert original > 0.01 if wrong else original < 1e-12
    assert error_of(ExactTrainer, made(kind, loss), as_pair(loss), tmp_path, 4, 8, micro_batch_size=4) <= 1e-12


SIZES: list[tuple[int, int, Any]] = [(32, 1, 5), (1, 32, "auto"), (8, 4, 32), (16, 2, 1), (8, 4, TokenBudget(40))]


@pytest.mark.parametrize(("rows", "accumulation", "size"), SIZES)
def test_sizes_do_not_matter(rows: int, accumulation: int, size: Any, tmp_path: Path) -> None:
    error = error_of(ExactTrainer, made(), as_pair(by_label), tmp_path, rows, accumulation, micro_batch_size=size)
    assert error <= 1e-12


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    def loss(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return token_sums(output["logits"], batch)

    assert error_of(ExactTrainer, made(), token_sums, tmp_path, 4, 8, micro_batch_size=3, loss=loss) <= 1e-12


def test_a_loss_function_given_to_the_trainer(tmp_path: Path) -> None:
    def compute_loss_func(output: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        total, _ = token_sums(output["logits"], {"labels": labels})
        return total / float(num_items_in_batch)

    more = {"compute_loss_func": compute_loss_func, "micro_batch_size": 3}
    assert error_of(ExactTrainer, made(), token_sums, tmp_path, 4, 8, **more) <= 1e-12


def test_a_trainer_of_ones_own(tmp_path: Path) -> None:
    class Mine(transformers_trainer.ExactSteps, Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            return by_item(model(inputs["tokens"], inputs["padding"])["logits"], inputs["labels"])

    assert error_of(Mine, made(), as_pair(by_item), tmp_path, 4, 8, micro_batch_size=3) <= 1e-12


def test_pieces_without_labels_and_batches_without_any(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    batch = sequences(items=ROWS)  # a quarter of the rows have no targets
    model, data = made(), Items(batch)
    expected = whole_batch(model, token_sums, data.batch).gradients
    before = weights_of(model)
    run(ExactTrainer, model, tmp_path, 4, 8, data=data, micro_batch_size=2)
    assert difference(gradients_between(before, weights_of(model)), expected) <= 1e-12
    batch["targets"][:] = -100
    before = weights_of(model)
    with caplog.at_level(logging.WARNING, logger="microbatch"):
        trainer = run(ExactTrainer, model, tmp_path, 4, 8, data=Items(batch), micro_batch_size=2)
    assert difference(weights_of(model), before) == 0.0
    assert "No gradients: the batch has no weight (32 items)." in caplog.messages
    assert not trainer.done.totals["loss"].weight


class Drawing(Returning):
    """Draws a number in each forward."""

    def forward(self, tokens: Tensor, padding: Tensor, labels: Tensor | None = None) -> Any:
        self.drawn = torch.rand(()).item()
        return super().forward(tokens, padding, labels)


def test_the_trial_of_a_loss_draws_no_numbers(tmp_path: Path) -> None:
    models = made(Drawing), made(Drawing)
    for model, trainer in zip(models, (Trainer, ExactTrainer), strict=True):
        run(trainer, model, tmp_path, ROWS, 1, **({"micro_batch_size": ROWS} if trainer is ExactTrainer else {}))
    assert models[0].drawn == models[1].drawn and len(models[1].rows) > len(models[0].rows)


def test_a_loss_between_items_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    model = made(loss=between_items)
    before = weights_of(model)
    with pytest.raises(InvalidLoss, match="no mean: two items alone give") as caught:
        run(ExactTrainer, model, tmp_path, 4, 8)
    assert "loss=" in caught.value.remedy
    assert difference(weights_of(model), before) == 0.0


def test_logs_clipping_and_schedule_are_those_of_the_trainer_with_whole_batches(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 3, "max_grad_norm": 0.05, "logging_strategy": "steps", "logging_steps": 1}
    original, exact = made(), made()
    logs = [
        run(Trainer, original, tmp_path, ROWS // 2, 1, **settings).state.log_history,
        run(ExactTrainer, exact, tmp_path, 2, 8, micro_batch_size=3, **settings).state.log_history,
    ]
    assert difference(weights_of(exact), weights_of(original)) <= 1e-12
    for line, other in zip(*logs, strict=True):
        assert line.keys() == other.keys()
        for name in ("loss", "grad_norm", "learning_rate", "epoch", "step"):
            assert line.get(name, 0.0) == pytest.approx(other.get(name, 0.0), rel=1e-6)
    assert [line["learning_rate"] for line in logs[1][:3]] == [LR, LR / 2, LR / 4]


def test_a_checkpoint_goes_on_at_its_sample_with_other_sizes(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole, rest = made(), made()
    run(ExactTrainer, whole, tmp_path, 4, 2, micro_batch_size=4, **settings)
    trainer = run(
        ExactTrainer, rest, tmp_path, 8, 1, micro_batch_size=3, resume=str(tmp_path / "checkpoint-2"), **settings
    )
    assert trainer.state.global_step == 4 and len(rest.rows) >= 2 * 3
    assert difference(weights_of(rest), weights_of(whole)) <= 1e-12


def test_out_of_memory_loses_no_sample(tmp_path: Path) -> None:
    model, lacking = made(), made()
    lacking.memory = 3
    run(ExactTrainer, model, tmp_path, 4, 4, max_steps=2, micro_batch_size=16)
    trainer = run(ExactTrainer, lacking, tmp_path, 4, 4, max_steps=2, micro_batch_size=16)
    assert lacking.failures == 3  # 16, 8, 4; the second step begins at 2
    assert trainer.done.sizes.micro_batch_size == 2
    assert difference(weights_of(lacking), weights_of(model)) <= 1e-12


def test_one_item_that_does_not_fit_is_said(tmp_path: Path) -> None:
    model = made()
    with pytest.raises(DoesNotFit, match="one item alone"):
        run(ExactTrainer, _without_memory(model), tmp_path, 4, 4, loss=lambda o, b: token_sums(o["logits"], b))


def _without_memory(model: Returning) -> Returning:
    model.memory = 0
    return model


def test_padding_that_only_the_longest_need_is_left_out() -> None:
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]])
    piece = {"attention_mask": mask, "input_ids": mask + 1, "image": torch.zeros(2, 7), "name": ["a", "b"]}
    short = transformers_trainer.without_padding(piece)
    assert short["attention_mask"].tolist() == [[1, 1], [1, 0]] and short["input_ids"].shape == (2, 2)
    assert short["image"].shape == (2, 7) and short["name"] == ["a", "b"]
    labels = torch.full((2, 5), -100)
    labels[1, 3] = 7
    assert transformers_trainer.without_padding(piece | {"labels": labels})["labels"].shape == (2, 4)
    left = {"attention_mask": mask.flip(1), "input_ids": mask.flip(1)}
    assert transformers_trainer.without_padding(left)["input_ids"].shape == (2, 5)


@pytest.mark.parametrize(
    ("changed", "words"),
    [({"n_gpu": 2}, "torchrun"), ({"optim": SimpleNamespace(value="lomo")}, "lomo updates during")],
)
def test_what_cannot_be_exact_is_refused(changed: dict[str, Any], words: str) -> None:
    args: dict[str, Any] = {"n_gpu": 1, "optim": "adamw_torch"}
    with pytest.raises(InvalidSettings, match=words):
        transformers_trainer.one_batch_per_step(SimpleNamespace(**(args | changed)))


def test_the_users_arguments_stay_as_they_are(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=8, use_cpu=True)
    changed = transformers_trainer.one_batch_per_step(args)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (4, 8)
    assert (changed.per_device_train_batch_size, changed.gradient_accumulation_steps) == (32, 1)


@pytest.mark.parametrize("name", LOSSES)
def test_how_a_loss_is_read(name: str) -> None:
    kind, loss, _ = LOSSES[name]
    model, batch = made(kind, loss), Items().batch

    def number(model: Any, piece: Any, divisor: int) -> Tensor:
        told = {"num_items_in_batch": divisor} if kind in (Dividing, Deaf) else {}
        value: Tensor = model(**piece, **told)["loss"]
        return value

    model.train()
    reading = mean_loss.read(number, model, batch, shifted=False)
    assert reading.proved and reading.is_sum == (kind is Dividing) and model.training
    labels = batch["labels"]
    expected: dict[Any, Any] = {
        by_label: (labels != -100).sum(),
        by_next_label: (labels[:, 1:] != -100).sum(),
        by_item: len(labels),
    }
    assert reading.weight(batch) == expected[loss]
    one = {key: value[:1] for key, value in batch.items()}
    assert not mean_loss.read(number, model, one, shifted=False).proved
    assert mean_loss.read(number, model, one, shifted=False).is_sum == (kind is Dividing)


def test_a_loss_that_is_not_finite_is_not_blamed_on_its_reading() -> None:
    batch = Items().batch
    reading = mean_loss.read(lambda *_: torch.tensor(math.nan), made(), batch, shifted=False)
    assert not reading.proved
