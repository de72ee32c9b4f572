"""Lightning: inexact by itself, exact with `ExactSteps`; the Trainer's clipping, schedules and hooks as they were."""

from __future__ import annotations

import copy
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from microbatch.errors import InvalidSettings
from microbatch.training.integrations.lightning_module import ExactSteps
from tests.training.jobs import difference
from tests.training.taggers import (
    LR,
    ROWS,
    Items,
    as_pair,
    by_label,
    gradients_between,
    loader,
    made,
    token_sums,
    weights_of,
    whole_batch,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("pytorch_lightning", reason="the extra lightning is not installed")
    from pytorch_lightning import LightningModule, Trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers, devices and logging intervals


class Plain(LightningModule):
    """As people write it: a mean over the batch that the loader gives."""

    def __init__(self) -> None:
        super().__init__()
        self.tagger = made()
        self.events: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.tagger(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.tagger.parameters(), lr=LR)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": StepLR(optimizer, 1, gamma=0.5), "interval": "step"},
        }

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.events.append("optimizer")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.events.append("zero")


class Exact(ExactSteps, Plain):
    def __init__(self, size: int | str) -> None:
        super().__init__()
        self.micro_batch_size = size

    def sum_and_weight(self, batch: Any) -> Any:
        return token_sums(self.tagger(batch["tokens"], batch["padding"])["logits"], batch)


def fit(model: LightningModule, rows: int, *, resume: Any = None, items: Items | None = None, **more: Any) -> Any:
    settings: dict[str, Any] = {"max_epochs": 1, "enable_checkpointing": False}
    trainer = Trainer(
        **(settings | more), accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False
    )
    trainer.fit(model, loader(rows, items=items), ckpt_path=resume)
    return trainer


def error_of(model: Any, rows: int, **more: Any) -> float:
    expected = whole_batch(model.tagger, as_pair(by_label), Items().batch).gradients
    before = weights_of(model.tagger)
    fit(model, rows, **more)
    return difference(gradients_between(before, weights_of(model.tagger)), expected)


def test_the_original_is_off() -> None:
    assert error_of(Plain(), 4, accumulate_grad_batches=8) > 0.01


@pytest.mark.parametrize("size", [1, 5, ROWS, "auto"])
def test_steps_are_exact(size: int | str) -> None:
    assert error_of(Exact(size), ROWS) <= 1e-12


def test_clipping_schedules_hooks_and_logs_are_those_of_the_trainer_with_whole_batches() -> None:
    models = Plain(), Exact(3)
    for model in models:
        trainer = fit(model, ROWS // 2, gradient_clip_val=0.05, max_epochs=2)
        assert trainer.global_step == 4
        assert trainer.optimizers[0].param_groups[0]["lr"] == LR / 16
    assert difference(weights_of(models[1].tagger), weights_of(models[0].tagger)) <= 1e-12
    assert models[0].events == models[1].events
    batch = {name: value[ROWS // 2 :] for name, value in Items().batch.items()}
    done = models[1].done
    assert done is not None and done.totals["loss"].weight == (batch["labels"] != -100).sum()
    assert trainer.callback_metrics["train_loss"].item() == pytest.approx(done.totals["loss"].loss, rel=1e-6)


def test_out_of_memory_loses_no_sample() -> None:
    model, lacking = Exact(ROWS), Exact(ROWS)
    lacking.tagger.memory = 7
    fit(model, ROWS, max_epochs=2)
    fit(lacking, ROWS, max_epochs=2)
    assert lacking.tagger.failures == 3  # 32, 16, 8; the second step begins at 4
    assert difference(weights_of(lacking.tagger), weights_of(model.tagger)) <= 1e-12


def test_a_checkpoint_goes_on_with_another_size(tmp_path: Path) -> None:
    whole, rest = Exact(8), Exact(3)
    fit(whole, 8, max_epochs=2)
    half = Exact(8)
    fit(half, 8, max_epochs=1).save_checkpoint(tmp_path / "half.ckpt")
    fit(rest, 8, max_epochs=2, resume=tmp_path / "half.ckpt")
    trained = weights_of(rest.tagger)
    assert difference(trained, weights_of(whole.tagger)) <= 1e-12
    assert difference(trained, weights_of(half.tagger)) > 1e-3


def test_a_batch_without_labels_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    items = Items()
    items.batch["labels"][:] = -100
    model = Exact(8)
    before = weights_of(model.tagger)
    with caplog.at_level(logging.WARNING, logger="microbatch"):
        fit(model, ROWS, items=items)
    assert difference(weights_of(model.tagger), before) == 0.0
    assert "Step skipped: the batch has no weight (32 items)." in caplog.messages


def test_precision_is_the_trainers() -> None:
    model, seen = Exact(8).float(), list[tuple[torch.dtype, bool]]()
    head: nn.Module = model.tagger.head
    head.register_forward_hook(lambda _, args, output: seen.append((output.dtype, True)))
    head.get_parameter("weight").register_hook(
        lambda gradient: seen.append((gradient.dtype, torch.is_autocast_enabled("cpu")))
    )
    fit(model, ROWS, precision="bf16-mixed")
    assert set(seen) == {(torch.bfloat16, True), (torch.float32, False)}


def test_accumulation_besides_is_refused() -> None:
    with pytest.raises(InvalidSettings, match=r"accumulates 4 batches per step\. Leave .* 4 times as large"):
        fit(Exact(4), 8, accumulate_grad_batches=4)


def test_a_batch_hook_of_ones_own_must_call_this_one() -> None:
    class Deaf(Exact):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            pass

    with pytest.raises(InvalidSettings, match=r"Call super\(\).on_train_batch_start"):
        fit(Deaf(4), 8)


def test_a_copy_begins_anew() -> None:
    model = Exact(8)
    fit(model, ROWS)
    copied = copy.deepcopy(model)
    assert model.exact_step is not None and copied.exact_step is None and copied.done is None


def test_the_method_to_write_is_named() -> None:
    class Empty(ExactSteps):
        pass

    with pytest.raises(NotImplementedError, match="sum_and_weight"):
        Empty().sum_and_weight(Tensor())
