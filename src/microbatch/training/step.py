"""One optimizer step of a batch of any size, in micro-batches, with the gradients of the whole batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from microbatch.batch.split import batch_size_of, is_list_of_samples, split, to_device
from microbatch.errors import InvalidLoss, InvalidModel, InvalidSettings
from microbatch.sizes import BatchSizes
from microbatch.training import gradients
from microbatch.training.normalise import Loss, Pair, Tally, Total, common_weight, loss_of, pairs_of, power_of_two
from microbatch.training.one_process import OneProcess
from microbatch.training.result import Attempt, StepResult
from microbatch.training.snapshot import Snapshot

logger = logging.getLogger(__name__)

Forward = Callable[[nn.Module, Any], Any]
Weight = Callable[[Any], Any]
"""``weight(batch) -> number``, or a dict of numbers, one per term of the loss."""


@dataclass(frozen=True, slots=True)
class Accumulated:
    """Forward and backward of all pieces.

    Attributes:
        sizes: how the batch was cut.
        totals: sum and weight of each term over all pieces and ranks.
        factor: what the gradients are still to be multiplied by.
        attempts: every try.
    """

    sizes: BatchSizes
    totals: dict[str, Total]
    factor: float
    attempts: tuple[Attempt, ...]


class TrainStep:
    """Forward, backward and update of one batch, in pieces that fit.

    Calling it with a batch does what ``zero_grad``, one forward and backward over the whole batch, clipping and
    ``optimizer.step()`` would do, whatever the number of pieces.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        *,
        forward: Forward | None = None,
        weight: Weight | None = None,
        micro_batch_size: int | str = "auto",
        max_norm: float | None = None,
        scheduler: Any = None,
        scaler: GradScaler | None = None,
        autocast: torch.dtype | None = None,
        list_of_samples: bool | None = None,
        profile: Any = None,
        memory_limit: int | None = None,
        process_group: Any = None,
    ) -> None:
        """
        Args:
            model: any module, on its device; compiled or not.
            optimizer: of the model's parameters.
            loss: ``loss(output, batch) -> (sum, weight)``, or a dict of such pairs. The weight is a constant: what
                the sum is divided by (tokens, pixels, samples). The library divides, by the weight of all pieces
                and ranks.
            forward: ``forward(model, batch) -> output``; by default ``model(**batch)`` for a mapping,
                ``model(*batch)`` for a tuple or a list of members, else ``model(batch)``.
            weight: ``weight(batch)`` of the whole batch as the loader gave it, where it does not depend on the
                output. Never needed; saves a forward pass per step for terms of different weights.
            micro_batch_size: items per piece; larger than the batch is one piece.
            max_norm: clip the gradients by their global norm.
            scheduler: its ``step()`` is called after each update.
            scaler: loss scaling, for fp16.
            autocast: dtype for ``torch.autocast`` around forward and loss.
            list_of_samples: how a batch that is a list is read, see `microbatch.batch.split.batch_size_of`.
            profile: for ``micro_batch_size="auto"``.
            memory_limit: bytes, for ``micro_batch_size="auto"``.
            process_group: ranks that share the step.

        Raises:
            InvalidBatchSizes: a micro-batch size below 1.
            InvalidSettings: an optimizer of another model, or one that needs a closure.
        """
        if micro_batch_size != "auto":
            BatchSizes.of(global_batch_size=1, micro_batch_size=micro_batch_size)  # type: ignore[arg-type]
        self.model, self.optimizer, self.loss, self.scheduler, self.scaler = model, optimizer, loss, scheduler, scaler
        self.forward, self.weight, self.autocast = forward, weight, autocast
        self.micro_batch_size, self.max_norm = micro_batch_size, max_norm
        self.profile, self.memory_limit, self.process_group = profile, memory_limit, process_group
        self._ranks = OneProcess()
        self._list_of_samples = list_of_samples
        self._weights_differ = False
        _check_optimizer(model, optimizer)

    def __call__(self, batch: Any) -> StepResult:
        """One step.

        Args:
            batch: this rank's batch, wherever the loader put it. Each piece moves to the model's device at its turn.

        Raises:
            InvalidBatch: members of different lengths; see `microbatch.batch.split`.
            InvalidLoss: the loss returned something else than a sum and its weight.
            InvalidModel: nothing to train.
        """
        done = self._accumulate(batch)
        if not any(total.weight for total in done.totals.values()):
            gradients.clear(self._all_parameters())
            logger.warning("Step skipped: the batch of %d has no weight.", done.sizes.global_batch_size)
            return self._result(done, None, "the batch has no weight")
        norm, skipped = self._update(done.factor)
        return self._result(done, norm, skipped)

    def accumulate(self, batch: Any) -> Accumulated:
        """Only the gradients of the step, left in ``.grad`` (multiplied by the scale of a scaler); no update."""
        done = self._accumulate(batch)
        gradients.scale(self._trained(), done.factor)
        gradients.narrow(self._trained())
        return done

    def _accumulate(self, batch: Any) -> Accumulated:
        """Gradients of the whole batch but for a factor, from a clean start; on an error all is as before."""
        batch_size = self._size_of(batch)
        self._trained()
        start = Snapshot.take(self.model, self._device())

        def attempt(micro_batch_size: int) -> Accumulated:
            sizes = BatchSizes.of(global_batch_size=batch_size, micro_batch_size=micro_batch_size)
            return self._attempt(batch, sizes, start)

        try:
            done = attempt(self._first_size(batch_size))
            self._ranks.reduce_gradients(self._trained())
        except BaseException:
            self._undo(start)
            raise
        return done

    def _undo(self, start: Snapshot) -> None:
        """Everything that a try has changed, as it was at the start of the step."""
        gradients.clear(self._all_parameters())
        start.restore()

    def _attempt(self, batch: Any, sizes: BatchSizes, start: Snapshot) -> Accumulated:
        """One try at one size; the caller restores `start` before another."""
        weights = self._weights_of(batch)
        if weights is None and self._weights_differ:
            weights = self._weights_first(batch, sizes)
            start.restore()
        totals, divisor = self._run(batch, sizes, weights)
        if weights is None and divisor is not None and common_weight(totals) is None:
            weights = {name: total.weight for name, total in totals.items()}
            self._weights_differ = all(weights.values())
            start.restore()
            totals, divisor = self._run(batch, sizes, weights)
        _check_weights(totals, weights)
        weight = common_weight(totals)
        factor = divisor / weight if divisor is not None and weight else 1.0
        return Accumulated(sizes, totals, factor, (Attempt(micro_batch_size=sizes.micro_batch_size, outcome="done"),))

    def _run(
        self, batch: Any, sizes: BatchSizes, weights: Mapping[str, float] | None
    ) -> tuple[dict[str, Total], float | None]:
        """Forward and backward of every piece.

        Returns:
            Totals over all ranks, and the common number that stands in the gradients for the weight not yet known.
        """
        self._start_gradients(sizes)
        tally, divisor, trained = Tally(), None, False
        for index, piece in enumerate(self._pieces(batch, sizes)):
            with self._ranks.piece(index, sizes.num_micro_batches):
                pairs = self._forward(piece)
                tally.add(pairs)
                if weights is None and sizes.num_micro_batches == 1 and self._ranks.alone:
                    weights = {name: pair.weight for name, pair in pairs.items()}
                if weights is None and divisor is None:
                    divisor = _guess(pairs, sizes)
                trained |= self._backward(pairs, weights, divisor)
        totals = self._ranks.reduce_weights(tally.totals())
        if not trained and any(total.weight for total in totals.values()) and self._ranks.alone:
            raise InvalidModel("The loss depends on no parameter that is trained.", "Unfreeze one, or change the loss.")
        return totals, divisor

    def _backward(self, pairs: Mapping[str, Pair], weights: Mapping[str, float] | None, divisor: float | None) -> bool:
        """Add the gradients of one piece; whether there were any."""
        terms = []
        for name, pair in pairs.items():
            by = divisor if weights is None else weights.get(name, 0.0)
            if by and pair.sum.requires_grad and (pair.weight or self._ranks.always_backward):
                terms.append(self._scaled(pair.sum / by))
        if terms:
            torch.autograd.backward(terms)
        return bool(terms)

    def _weights_first(self, batch: Any, sizes: BatchSizes) -> dict[str, float]:
        """The weights of all terms, from forward passes without gradients."""
        tally = Tally()
        with torch.no_grad():
            for piece in self._pieces(batch, sizes):
                tally.add(self._forward(piece))
        return {name: total.weight for name, total in self._ranks.reduce_weights(tally.totals()).items()}

    def _weights_of(self, batch: Any) -> dict[str, float] | None:
        if self.weight is None:
            return None
        weights = self.weight(batch)
        named = weights if isinstance(weights, Mapping) else {"loss": weights}
        totals = self._ranks.reduce_weights({name: Total(0.0, float(value)) for name, value in named.items()})
        return {name: total.weight for name, total in totals.items()}

    def _forward(self, piece: Any) -> dict[str, Pair]:
        device = self._device()
        with torch.autocast(device.type, dtype=self.autocast) if self.autocast else nullcontext():
            if self.forward is not None:
                output = self.forward(self.model, piece)
            else:
                output = call(self.model, piece, list_of_samples=self._list_of_samples)
            return pairs_of(self.loss(output, piece))

    def _pieces(self, batch: Any, sizes: BatchSizes) -> Iterator[Any]:
        device = self._device()
        for piece in split(batch, sizes.pieces, list_of_samples=self._list_of_samples):
            yield to_device(piece, device)

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _update(self, factor: float) -> tuple[float | None, str | None]:
        """Unscale, clip, step; the norm, and why there was no update."""
        parameters = self._trained()
        if self.scaler is not None and self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        norm = gradients.scale_and_clip(parameters, factor, self.max_norm)
        gradients.narrow(parameters)
        skipped = self._step_optimizer()
        if skipped is None and self.scheduler is not None:
            self.scheduler.step()
        gradients.clear(self._all_parameters())
        return None if norm is None else float(norm), skipped

    def _step_optimizer(self) -> str | None:
        if self.scaler is None or not self.scaler.is_enabled():
            self.optimizer.step()
            return None
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        after = self.scaler.get_scale()
        if after >= before:
            return None
        logger.warning("Step skipped: a gradient is not finite; loss scale %g -> %g.", before, after)
        return "a gradient is not finite"

    def _result(self, done: Accumulated, norm: float | None, skipped: str | None) -> StepResult:
        return StepResult(
            loss=loss_of(done.totals),
            losses={name: total.loss for name, total in done.totals.items()},
            weight=next(iter(done.totals.values())).weight,
            weights={name: total.weight for name, total in done.totals.items()},
            batch_size=done.sizes.global_batch_size,
            micro_batch_size=done.sizes.micro_batch_size,
            num_micro_batches=done.sizes.num_micro_batches,
            attempts=done.attempts,
            grad_norm=norm,
            skipped=skipped,
        )

    def _start_gradients(self, sizes: BatchSizes) -> None:
        gradients.clear(self._all_parameters())
        if sizes.num_micro_batches > 1:
            gradients.widen(self._trained())

    def _first_size(self, batch_size: int) -> int:
        """The size to try first."""
        return batch_size if isinstance(self.micro_batch_size, str) else self.micro_batch_size

    def _size_of(self, batch: Any) -> int:
        size = batch_size_of(batch, list_of_samples=self._list_of_samples)
        if self._list_of_samples is None:
            self._list_of_samples = is_list_of_samples(batch)  # later batches are read as this one
        return size

    def _device(self) -> torch.device:
        tensor = next(chain(self.model.parameters(), self.model.buffers()), None)
        return torch.device("cpu") if tensor is None else tensor.device

    def _trained(self) -> list[nn.Parameter]:
        """Parameters of the optimizer that are not frozen."""
        groups = self.optimizer.param_groups
        trained = [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]
        if not trained:
            raise InvalidModel("Every parameter of the optimizer is frozen.", "Set requires_grad of one to True.")
        return trained

    def _all_parameters(self) -> list[nn.Parameter]:
        own = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return [*self.model.parameters(), *own]


def call(model: nn.Module, batch: Any, *, list_of_samples: bool | None = None) -> Any:
    """The model on a batch: a mapping as keywords, a tuple or a list of members as arguments, else as it is."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple) or (isinstance(batch, list) and not list_of_samples):
        return model(*batch)
    return model(batch)


def _guess(pairs: Mapping[str, Pair], sizes: BatchSizes) -> float:
    """A power of two near the weight of the whole batch, from its first piece."""
    first = max(pair.weight for pair in pairs.values()) or float(sizes.micro_batch_size)
    return power_of_two(first * sizes.global_batch_size / sizes.micro_batch_size)


def _check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise InvalidSettings(
            "The optimizer holds none of the model's parameters.",
            "Make the optimizer from model.parameters(), after the model was moved, wrapped or replaced.",
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidSettings("LBFGS evaluates the loss several times per step.", "Use an optimizer of one gradient.")


def _check_weights(totals: Mapping[str, Total], weights: Mapping[str, float] | None) -> None:
    for name, total in totals.items() if weights is not None else ():
        assert weights is not None
        if not math.isclose(total.weight, weights.get(name, 0.0), rel_tol=1e-5):
            raise InvalidLoss(
                f"The loss's weights of {name!r} add up to {total.weight:g}, but {weights.get(name, 0.0):g} was to be "
                "divided by.",
                "Make weight(batch) and the loss agree, and the loss the same at each call.",
            )
