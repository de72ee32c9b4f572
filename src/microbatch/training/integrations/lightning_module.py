"""Lightning: a LightningModule whose steps are exact, in pieces that fit, that survive out-of-memory::

    class Digits(ExactSteps, LightningModule):
        def sum_and_weight(self, batch):            # instead of training_step
            x, y = batch
            return cross_entropy(self(x), y, reduction="sum"), len(y)

    Trainer(gradient_clip_val=1.0).fit(Digits(), loader)

A loader's batch is the global batch of its process; it is cut into pieces. Optimization stays automatic: clipping,
schedules, precision, checkpoints, callbacks and the optimizer's hooks are Lightning's. Works with ``lightning`` and
``pytorch_lightning``; neither is imported here.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from microbatch.batch.token_budget import TokenBudget
from microbatch.errors import InvalidSettings
from microbatch.training.normalise import loss_of
from microbatch.training.step import Accumulated, TrainStep

logger = logging.getLogger(__name__)


class ExactSteps:
    """To be put before LightningModule.

    Attributes:
        micro_batch_size: items per piece, "auto", or a `TokenBudget`; set it on the class or on the module.
        memory_limit: bytes, for "auto".
        loss_name: the loss of the whole batch is logged under it; None for not at all.
        exact_step: what takes the steps, from the first one on.
        done: what the last step did: its sizes, attempts, sums and weights.
    """

    micro_batch_size: int | str | TokenBudget = "auto"
    memory_limit: int | None = None
    loss_name: str | None = "train_loss"
    exact_step: TrainStep | None = None
    done: Accumulated | None = None
    trainer: Any
    log: Any
    _batch: Any = None

    def sum_and_weight(self, batch: Any) -> Any:
        """The loss of a piece: its sum and what to divide it by, or a dict of such pairs; the library divides."""
        raise NotImplementedError("Define sum_and_weight(self, batch), which returns the loss's sum and its weight.")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Keeps the batch for the step; call ``super()`` where you override it."""
        self._batch = batch

    def optimizer_step(
        self,
        epoch: int,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
        optimizer: Any,
        optimizer_closure: Any = None,
    ) -> None:
        """Gradients of the whole batch, then Lightning's closure (hooks, clipping) and the update."""
        done = self.done = self._step_of(getattr(optimizer, "optimizer", optimizer)).accumulate(self._taken())
        if any(total.weight for total in done.totals.values()):
            with self._alone():
                optimizer.step(closure=optimizer_closure)
        else:
            logger.warning("Step skipped: the batch has no weight (%d items).", done.sizes.global_batch_size)
            with self._alone():
                optimizer_closure()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:  # noqa: ARG002
        """The loss of the whole batch, whose gradients are there already."""
        done = self.done
        if done is None or self.trainer.accumulate_grad_batches > 1:
            number = self.trainer.accumulate_grad_batches
            raise InvalidSettings(
                f"The Trainer accumulates {number} batches per step.",
                f"Leave accumulate_grad_batches out and make the loader's batch {number} times as large: it is cut.",
            )
        loss = loss_of(done.totals)
        if self.loss_name is not None:
            self.log(self.loss_name, loss, prog_bar=True, batch_size=done.sizes.global_batch_size)
        return {"loss": torch.tensor(loss)}

    def backward(self, loss: Tensor, *args: Any) -> None:
        """Nothing: every piece has run backward."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Nothing: gradients are emptied before the first piece."""

    def _taken(self) -> Any:
        batch, self._batch = self._batch, None
        if batch is None:
            raise InvalidSettings(
                "The module never saw the batch.", "Call super().on_train_batch_start(batch, batch_idx) in your own."
            )
        return batch

    def _step_of(self, optimizer: Optimizer) -> TrainStep:
        step = self.exact_step
        if step is None or step.optimizer is not optimizer:
            precision = self.trainer.precision_plugin

            def forward(model: Any, piece: Any) -> Any:
                with precision.train_step_context():
                    return model.sum_and_weight(piece)

            assert isinstance(self, nn.Module)
            step = self.exact_step = TrainStep(
                self,
                optimizer,
                _as_returned,
                forward=forward,
                micro_batch_size=self.micro_batch_size,
                scaler=getattr(precision, "scaler", None),
                memory_limit=self.memory_limit,
                process_group=_group(self.trainer),
            )
        return step

    def _alone(self) -> Any:
        """Around Lightning's closure, which runs no forward of the model: DDP must not wait for gradients."""
        model = self.trainer.strategy.model
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()

    def __getstate__(self) -> dict[str, Any]:
        """Without what holds the optimizer and other processes: a copy begins anew."""
        state: Any = super().__getstate__()
        return {name: value for name, value in state.items() if name not in ("exact_step", "done", "_batch")}


def _group(trainer: Any) -> Any:
    """The processes that hold replicas; None for one process, and where the model itself is sharded.

    Raises:
        InvalidSettings: an engine with a backward of its own.
    """
    model = trainer.strategy.model
    if "DeepSpeed" in type(trainer.strategy).__name__ or "XLA" in type(trainer.strategy).__name__:
        raise InvalidSettings(
            f"{type(trainer.strategy).__name__} runs backward and the update by itself.", 'Use strategy="ddp" or FSDP2.'
        )
    return dist.group.WORLD if isinstance(model, DistributedDataParallel) else None


def _as_returned(pair: Any, piece: Any) -> Any:  # noqa: ARG001
    return pair
