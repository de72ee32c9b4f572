"""transformers.Trainer with exact steps, in pieces that fit, that survive out-of-memory::

    trainer = ExactTrainer(model, args, train_dataset=data, micro_batch_size="auto")
    trainer.train()

The batch of an update has ``per_device_train_batch_size × gradient_accumulation_steps`` items per process, whatever
the two are. It is collated at once and cut here, so that everything the two would change stays the same: gradients,
random masks, the order of the data, steps per epoch, and the sample at which a checkpoint goes on. Logging, saving,
evaluation, clipping, schedule, callbacks and mixed precision are the Trainer's.

`ExactSteps` does the same for a Trainer of your own: ``class Mine(ExactSteps, SFTTrainer): ...``.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import Trainer

from microbatch.batch.running import call
from microbatch.batch.token_budget import TokenBudget
from microbatch.errors import InvalidSettings
from microbatch.training.integrations.accelerated import check_accelerator, plain_optimizer
from microbatch.training.integrations.mean_loss import IGNORED, Reading, read
from microbatch.training.memory.snapshot import Snapshot
from microbatch.training.normalise import Loss, loss_of
from microbatch.training.step import Accumulated, TrainStep

logger = logging.getLogger(__name__)

_STEPS_IN_BACKWARD = ("lomo", "adalomo")
"""Optimizers that update during backward, before the weight of the whole batch is known."""


class ExactSteps:
    """To be put before a Trainer's class.

    Attributes:
        exact_step: what takes the steps, from the first one on.
        done: what the last step did: its sizes, attempts, sums and weights.
    """

    args: Any
    accelerator: Any
    optimizer: Any
    compute_loss: Any
    _prepare_inputs: Any

    def __init__(
        self,
        *args: Any,
        micro_batch_size: int | str | TokenBudget = "auto",
        loss: Loss | None = None,
        memory_limit: int | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            args: and kwargs: the Trainer's own.
            micro_batch_size: items per piece, "auto", or a `TokenBudget`.
            loss: ``loss(output, batch) -> (sum, weight)``, or a dict of such pairs. By default the Trainer's own
                ``compute_loss``, read back as sum and weight by `microbatch.training.integrations.mean_loss`.
            memory_limit: bytes, for "auto".

        Raises:
            InvalidSettings: what runs backward by itself, splits layers over processes, or updates during backward.
        """
        super().__init__(*args, **kwargs)
        self._micro_batch_size, self._loss, self._memory_limit = micro_batch_size, loss, memory_limit
        self._reading: Reading | None = None
        self.exact_step: TrainStep | None = None
        self.done: Accumulated | None = None
        check_accelerator(self.accelerator)
        self.args = one_batch_per_step(self.args)
        self._train_batch_size = self.args.train_batch_size

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:  # noqa: ARG002
        """Gradients of the whole batch, which the Trainer then clips and steps with; the whole batch's loss."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):  # schedule-free optimizers
            self.optimizer.train()
        if self._loss is None:
            self._reading = self._read(model, inputs)
        done = self._step_of(model).accumulate(inputs)
        self.done = done
        if not any(total.weight for total in done.totals.values()):
            logger.warning("No gradients: the batch has no weight (%d items).", done.sizes.global_batch_size)
        return torch.tensor(loss_of(done.totals), device=self.args.device)

    def _step_of(self, model: nn.Module) -> TrainStep:
        """Another one for another model or optimizer, as each call of ``train`` may bring."""
        optimizer, step = plain_optimizer(self.optimizer), self.exact_step
        if step is None or step.model is not model or step.optimizer is not optimizer:
            step = self.exact_step = TrainStep(
                model,
                optimizer,
                _as_returned if self._loss is None else self._loss,
                forward=self._pair if self._loss is None else _output,
                micro_batch_size=self._micro_batch_size,
                scaler=self.accelerator.scaler,
                memory_limit=self._memory_limit,
            )
        return step

    def _pair(self, model: nn.Module, piece: Any) -> tuple[Tensor, Any]:
        assert self._reading is not None
        piece = without_padding(piece)
        return self._reading.pair(self._number(model, piece, 1), piece)

    def _number(self, model: nn.Module, piece: Any, divisor: int) -> Tensor:
        told = torch.full((), float(divisor), device=self.args.device)
        number: Tensor = self.compute_loss(model, dict(piece), num_items_in_batch=told)
        return number

    def _read(self, model: nn.Module, inputs: Any) -> Reading:
        """How the loss is read: tried on the first batches, until one has proved it."""
        known = self._reading
        if known is not None and known.proved:
            return known
        plain = self.accelerator.unwrap_model(model)
        before = Snapshot.take(plain, self.args.device)
        try:
            shifted = bool(getattr(self, "_loss_shifts_labels", False))
            return read(self._number, plain, self._prepare_inputs(inputs), shifted=shifted, known=known)
        finally:
            before.restore()


class ExactTrainer(ExactSteps, Trainer):
    """A Trainer with exact steps, see `microbatch.training.integrations.transformers_trainer`."""


def one_batch_per_step(args: Any) -> Any:
    """The training arguments, with the whole batch of an update in one batch of the loader.

    Raises:
        InvalidSettings: several GPUs in one process, or an optimizer that updates during backward.
    """
    if args.n_gpu > 1:
        raise InvalidSettings(f"One process has {args.n_gpu} GPUs (DataParallel).", "Start it with torchrun.")
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer in _STEPS_IN_BACKWARD:
        raise InvalidSettings(f"{optimizer} updates during backward.", "Use an optimizer that steps afterwards.")
    changed = copy.copy(args)
    changed.per_device_train_batch_size *= args.gradient_accumulation_steps
    changed.gradient_accumulation_steps = 1
    changed.average_tokens_across_devices = False  # sums and weights are added up over processes here
    changed.auto_find_batch_size = False  # it starts training again at step 0 with the weights moved
    return changed


def without_padding(piece: Any) -> Any:
    """The piece without the columns at its end that are padding in every row: only the batch's longest needs them."""
    mask = piece.get("attention_mask") if isinstance(piece, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or isinstance(mask, FakeTensor):
        return piece
    used = mask.ne(0).any(0)
    labels = piece.get("labels")
    if isinstance(labels, Tensor) and labels.shape == mask.shape:
        used |= labels.ne(IGNORED).any(0)
    length = int(used.nonzero().max()) + 1 if used.any() else 1
    return {
        name: value[:, :length].contiguous() if isinstance(value, Tensor) and value.shape[:2] == mask.shape else value
        for name, value in piece.items()
    }


def _output(model: nn.Module, piece: Any) -> Any:
    return call(model, without_padding(piece))


def _as_returned(pair: Any, piece: Any) -> Any:  # noqa: ARG001
    return pair
