"""How each framework trains the job of `peer_job`: its documented way, and with this library's step inside.

Nothing is logged, saved, evaluated or clipped; the data comes from one loader in the process. Every way that was tried
is a row of one of the tables below.
"""

from __future__ import annotations

import gc
import importlib
import logging
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks import composer_peer
from benchmarks.peer_job import IGNORED, Batch, Run, mean, pieces_of, sum_and_weight
from microbatch.models.torchvision_operators import make_torchvision_importable
from microbatch.training.step import TrainStep

Loop = Callable[[Run], None]


def loader(run: Run, rows: int) -> DataLoader[Batch]:
    return DataLoader(run.data, batch_size=rows)


def by_hand(run: Run) -> None:
    """Exact, written out: the number of targets in the whole batch first, then each piece's sum over it."""
    for batch in loader(run, run.rows * run.pieces):
        number = int((batch["labels"] != IGNORED).sum())
        run.optimizer.zero_grad()
        for piece in pieces_of(batch, run.rows):
            (sum_and_weight(run.model(piece["tokens"]), piece)[0] / number).backward()
        run.optimizer.step()


def own_loop(run: Run, size: int | str | None = None) -> None:
    step = TrainStep(
        run.model,
        run.optimizer,
        sum_and_weight,
        forward=lambda model, batch: model(batch["tokens"]),
        micro_batch_size=size or run.rows,
    )
    for batch in loader(run, run.rows * run.pieces):
        step(batch)


def accelerate(run: Run, rows: int | None = None, pieces: int | None = None) -> None:
    """As its guide to gradient accumulation writes it."""
    from accelerate import Accelerator  # type: ignore[import-untyped, unused-ignore]

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=pieces or run.pieces)
    model, optimizer, batches = accelerator.prepare(run.model, run.optimizer, loader(run, rows or run.rows))
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()


def accelerate_finder(run: Run) -> None:
    """``find_executable_batch_size`` around it, model and optimizer made inside, as its guide to memory writes it."""
    from accelerate.utils import find_executable_batch_size  # type: ignore[import-untyped, unused-ignore]

    def train(batch_size: int) -> None:
        run.make()
        accelerate(run, batch_size)

    find_executable_batch_size(train, starting_batch_size=run.rows)()


def accelerate_finder_keeping(run: Run) -> None:
    """The same with as many pieces as keep the batch nearest to its size, as its example of both together does."""
    from accelerate.utils import find_executable_batch_size  # type: ignore[import-untyped, unused-ignore]

    def train(batch_size: int) -> None:
        run.make()
        accelerate(run, batch_size, run.rows * run.pieces // batch_size)

    find_executable_batch_size(train, starting_batch_size=run.rows)()


def accelerate_exact(run: Run, size: int | str | None = None) -> None:
    from accelerate import Accelerator  # type: ignore[import-untyped, unused-ignore]

    from microbatch.training.integrations.accelerated import train_step

    accelerator = Accelerator(cpu=True)
    model, optimizer, batches = accelerator.prepare(run.model, run.optimizer, loader(run, run.rows * run.pieces))
    step = train_step(
        accelerator,
        model,
        optimizer,
        sum_and_weight,
        forward=lambda model, batch: model(batch["tokens"]),
        micro_batch_size=size or run.rows,
    )
    for batch in batches:
        step(batch)


def trainer(run: Run, **more: Any) -> None:
    _trained(run, run.rows, run.pieces, **more)


def trainer_auto(run: Run) -> None:
    """``auto_find_batch_size=True``."""
    trainer(run, auto_find_batch_size=True)


def trainer_told(run: Run) -> None:
    """A loss function that is told the number of targets, as its guide to accumulation writes it."""

    def compute_loss(output: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        total, _ = sum_and_weight(output, {"labels": labels})
        return total / float(num_items_in_batch)

    trainer(run, compute_loss_func=compute_loss)


def trainer_exact(run: Run, size: int | str | None = None) -> None:
    from microbatch.training.integrations.transformers_trainer import ExactTrainer

    _trained(run, run.rows, run.pieces, kind=ExactTrainer, micro_batch_size=size or run.rows)


def _trained(
    run: Run, rows: int, pieces: int, *, kind: Any = None, auto_find_batch_size: bool = False, **more: Any
) -> None:
    from torch.optim.lr_scheduler import LambdaLR
    from torch.utils.data import SequentialSampler
    from transformers import PrinterCallback, Trainer, TrainingArguments

    class InOrder(kind or Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:  # noqa: ARG002
            return SequentialSampler(self.train_dataset)

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, per_device_train_batch_size=rows, gradient_accumulation_steps=pieces, num_train_epochs=1,
            max_grad_norm=0.0, use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
            dataloader_pin_memory=False, auto_find_batch_size=auto_find_batch_size,
        )  # fmt: skip
        constant = LambdaLR(run.optimizer, lambda _: 1.0)
        made = InOrder(run.model, args, train_dataset=run.data, optimizers=(run.optimizer, constant), **more)
        made.remove_callback(PrinterCallback)
        made.train()


def lightning(run: Run, **settings: Any) -> None:
    """``accumulate_grad_batches``."""
    import pytorch_lightning

    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = run.model

        def training_step(self, batch: Batch, _: int) -> Tensor:
            return mean(self.model(batch["tokens"])["logits"], batch["labels"])

        def configure_optimizers(self) -> Any:
            return run.optimizer

    _lightning_trainer(accumulate_grad_batches=run.pieces, **settings).fit(Module(), loader(run, run.rows))


def lightning_exact(run: Run, size: int | str | None = None) -> None:
    import pytorch_lightning

    from microbatch.training.integrations.lightning_module import ExactSteps

    class Module(ExactSteps, pytorch_lightning.LightningModule):
        micro_batch_size = size or run.rows

        def __init__(self) -> None:
            super().__init__()
            self.model = run.model

        def sum_and_weight(self, batch: Batch) -> Any:
            return sum_and_weight(self.model(batch["tokens"]), batch)

        def configure_optimizers(self) -> Any:
            return run.optimizer

    _lightning_trainer().fit(Module(), loader(run, run.rows * run.pieces))


def lightning_finder(run: Run, mode: str, first: int) -> None:
    """Its ``Tuner.scale_batch_size`` before the training."""
    import pytorch_lightning
    from pytorch_lightning.tuner.tuning import Tuner

    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.batch_size = run.model, first

        def training_step(self, batch: Batch, _: int) -> Tensor:
            return mean(self.model(batch["tokens"])["logits"], batch["labels"])

        def configure_optimizers(self) -> Any:
            return run.optimizer

        def train_dataloader(self) -> Any:
            return loader(run, self.batch_size)

    with tempfile.TemporaryDirectory() as folder:
        tuner = Tuner(_lightning_trainer(default_root_dir=folder))
        run.watch.size = tuner.scale_batch_size(Module(), mode=mode, init_val=first, steps_per_trial=1)
    run.watch.before, run.watch.samples = (run.memory.passes, run.memory.failures), []


def _lightning_trainer(**settings: Any) -> Any:
    import pytorch_lightning

    return pytorch_lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **settings,
    )  # fmt: skip


def prepare() -> None:
    """One thread, no advice printed; what frameworks import where it is installed can be imported.

    What is loaded by then is left out of the garbage collections that each out-of-memory starts.
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    make_torchvision_importable()
    for name in ("accelerate", "pytorch_lightning", "transformers.trainer"):
        importlib.import_module(name)
    gc.freeze()


HAND = "loop by hand"

LOOPS: dict[str, Loop] = {
    HAND: by_hand,
    "microbatch": own_loop,
    "Accelerate": accelerate,
    "Accelerate + microbatch": accelerate_exact,
    "Lightning": lightning,
    "Lightning + microbatch": lightning_exact,
    "HF Trainer": trainer,
    "HF Trainer, loss told the count": trainer_told,
    "HF Trainer + microbatch": trainer_exact,
}
"""What is timed, and whose gradients are compared."""

RECOVERING: dict[str, Loop] = {
    HAND: by_hand,
    "microbatch": own_loop,
    "Accelerate": accelerate,
    "Accelerate, find_executable_batch_size": accelerate_finder,
    "Accelerate, find_executable_batch_size, 64 // size pieces": accelerate_finder_keeping,
    "Accelerate + microbatch": accelerate_exact,
    "Lightning": lightning,
    "Lightning + microbatch": lightning_exact,
    "HF Trainer": trainer,
    "HF Trainer, auto_find_batch_size": trainer_auto,
    "HF Trainer + microbatch": trainer_exact,
}
"""What is let run out of memory."""

SEARCHES: dict[str, Loop] = {
    "microbatch, auto": lambda run: own_loop(run, "auto"),
    "Accelerate, find_executable_batch_size": accelerate_finder,
    "Accelerate + microbatch, auto": lambda run: accelerate_exact(run, "auto"),
    "Lightning, scale_batch_size power from 2": lambda run: lightning_finder(run, "power", 2),
    "Lightning, scale_batch_size power from 128": lambda run: lightning_finder(run, "power", 128),
    "Lightning, scale_batch_size binsearch from 2": lambda run: lightning_finder(run, "binsearch", 2),
    "Lightning, scale_batch_size binsearch from 128": lambda run: lightning_finder(run, "binsearch", 128),
    "Lightning + microbatch, auto": lambda run: lightning_exact(run, "auto"),
    "HF Trainer, auto_find_batch_size": trainer_auto,
    "HF Trainer + microbatch, auto": lambda run: trainer_exact(run, "auto"),
}
"""What searches a size."""

if composer_peer.is_installed():
    LOOPS |= {
        "Composer": composer_peer.composer,
        "Composer, accumulate_train_batch_on_tokens": composer_peer.composer_by_tokens,
    }
    RECOVERING |= {
        "Composer": composer_peer.composer,
        'Composer, device_train_microbatch_size="auto"': composer_peer.composer_auto,
    }
