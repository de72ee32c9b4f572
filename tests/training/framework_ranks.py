"""What two processes train together inside other frameworks; started by torchrun, prints one JSON line on rank 0.

Every rank holds half of the batch, with other numbers of targets, and cuts it into pieces of its own size.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from tests.training.jobs import difference
from tests.training.taggers import (
    LR,
    ROWS,
    Items,
    Returning,
    as_pair,
    by_label,
    gradients_between,
    loader,
    made,
    token_sums,
    weights_of,
    whole_batch,
)

HALF = ROWS // 2
SIZE = 3 + int(os.environ.get("RANK", "0"))


def under_accelerate(model: Returning) -> None:
    from accelerate import Accelerator  # type: ignore[import-untyped, unused-ignore]

    from microbatch.training.integrations.accelerated import train_step

    accelerator = Accelerator(cpu=True)
    wrapped, optimizer, batches = accelerator.prepare(model, SGD(model.parameters(), lr=LR), loader(HALF))
    step = train_step(accelerator, wrapped, optimizer, lambda o, b: token_sums(o["logits"], b), micro_batch_size=SIZE)
    for batch in batches:
        step(batch)


def under_trainer(model: Returning) -> None:
    from transformers import TrainingArguments

    from microbatch.training.integrations.transformers_trainer import ExactTrainer

    optimizer = SGD(model.parameters(), lr=LR)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, per_device_train_batch_size=4, gradient_accumulation_steps=HALF // 4, max_steps=1, use_cpu=True,
            max_grad_norm=0.0, save_strategy="no", report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
            logging_strategy="no",
        )  # fmt: skip
        constant = LambdaLR(optimizer, lambda _: 1.0)
        ExactTrainer(
            model, args, train_dataset=Items(), optimizers=(optimizer, constant), micro_batch_size=SIZE
        ).train()


def under_lightning(model: Returning) -> None:
    from pytorch_lightning import LightningModule, Trainer

    from microbatch.training.integrations.lightning_module import ExactSteps

    class Module(ExactSteps, LightningModule):
        micro_batch_size = SIZE

        def __init__(self) -> None:
            super().__init__()
            self.tagger = model

        def sum_and_weight(self, batch: Any) -> Any:
            return token_sums(self.tagger(batch["tokens"], batch["padding"])["logits"], batch)

        def configure_optimizers(self) -> Any:
            return SGD(self.tagger.parameters(), lr=LR)

    Trainer(
        max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(Module(), loader(HALF))  # fmt: skip


FRAMEWORKS: dict[str, Callable[[Returning], None]] = {
    "Accelerate": under_accelerate,
    "HF Trainer": under_trainer,
    "Lightning": under_lightning,
}


def error_of(train: Callable[[Returning], None], model: Returning) -> float:
    """Of the gradient against one pass over the batches of both ranks."""
    expected = whole_batch(model, as_pair(by_label), Items().batch).gradients
    before = weights_of(model)
    train(model)
    return difference(gradients_between(before, weights_of(model)), expected)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    errors = {name: error_of(train, made()) for name, train in FRAMEWORKS.items()}
    if os.environ["RANK"] == "0":
        sys.stdout.write(f"\n{json.dumps(errors)}\n")


if __name__ == "__main__":
    main()
