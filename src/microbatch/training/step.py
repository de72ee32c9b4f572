"""One optimizer step of a batch of any size, in micro-batches, with the gradients of the whole batch."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from microbatch.batch.exactness import ExactnessReport
from microbatch.batch.lengths import is_list, lengths_of
from microbatch.batch.pieces import Pieces
from microbatch.batch.running import Forward, device_of
from microbatch.batch.split import batch_size_of, is_list_of_samples
from microbatch.batch.token_budget import TokenBudget
from microbatch.errors import InvalidModel, InvalidSettings
from microbatch.sizes import BatchSizes
from microbatch.training import gradients
from microbatch.training.checkpoints import checkpoint
from microbatch.training.cutting import Cutting, as_given, by_length, by_size
from microbatch.training.joint.whole_batch import WholeBatch
from microbatch.training.memory.memory_model import contents
from microbatch.training.memory.micro_batch_size import Choice, choose, from_profile
from microbatch.training.memory.recovery import Recovery
from microbatch.training.memory.snapshot import Snapshot
from microbatch.training.normalise import (
    ONLY,
    Loss,
    Total,
    check_finite,
    check_weights,
    common_weight,
    loss_of,
    number_of,
)
from microbatch.training.padding import can_show, trimming_is_exact
from microbatch.training.passes import Passes
from microbatch.training.phase import REDUCTION, during
from microbatch.training.piece_norms import PieceNorms
from microbatch.training.proof import prove
from microbatch.training.ranks.distributed import is_empty, is_pipeline, ranks_of
from microbatch.training.ranks.sharded_size import choose_together
from microbatch.training.result import Attempt, StepResult
from microbatch.training.settings import check_kinds, check_settings, made_of
from microbatch.training.update import update

if TYPE_CHECKING:
    from microbatch.pipeline.timeline import Timeline

logger = logging.getLogger(__name__)

NO_WEIGHT = "the batch has no weight"

T = TypeVar("T")

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
        tokens: of the items, and those that ran; None where items count.
    """

    sizes: BatchSizes
    totals: dict[str, Total]
    factor: float
    attempts: tuple[Attempt, ...] = ()
    tokens: tuple[int | None, int | None] = (None, None)


class TrainStep:
    """Forward, backward and update of one batch, in pieces that fit.

    Calling it with a batch does what ``zero_grad``, one forward and backward over the whole batch, clipping and
    ``optimizer.step()`` would do, whatever the number of pieces.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Callable[..., Optimizer],
        loss: Loss,
        *,
        forward: Forward | None = None,
        weight: Weight | None = None,
        joint: str | None = None,
        batch_norm: str | None = None,
        micro_batch_size: int | str | TokenBudget = "auto",
        num_micro_batches: int | str | None = None,
        max_norm: float | None = None,
        scheduler: Any = None,
        scaler: GradScaler | None = None,
        autocast: torch.dtype | None = None,
        list_of_samples: bool | None = None,
        profile: Any = None,
        memory_limit: int | None = None,
        process_group: Any = None,
        noise_scale: bool = False,
    ) -> None:
        """
        Args:
            model: any module, on its device; compiled or not; or a `microbatch.Pipeline`.
            optimizer: of the model's parameters, or a class to make it of them with its own defaults.
            loss: ``loss(output, batch) -> (sum, weight)``, or a dict of such pairs. The weight is a constant: what
                the sum is divided by (tokens, pixels, samples). The library divides, by the weight of all pieces
                and ranks.
            forward: ``forward(model, batch) -> output``; by default ``model(**batch)`` for a mapping,
                ``model(*batch)`` for a tuple or a list of members, else ``model(batch)``.
            weight: ``weight(batch)`` of the whole batch as the loader gave it, where it does not depend on the
                output. Never needed; saves a forward pass per step for terms of different weights.
            joint: for losses that are no sums over pieces, at one more forward pass. ``"outputs"``: the loss gets the
                outputs of the whole batch joined, of all ranks too, and the batch as the loader gave it (on several
                ranks let forward return what the loss needs of it). ``"terms"``: the loss gets each piece, and
                returns a `JointTerm` for each term of the whole batch. See `microbatch.training.joint.two_pass`.
            batch_norm: ``"exact"``, ``"frozen"`` or ``"micro_batch"``, see `microbatch.training.joint.batch_norm`.
            micro_batch_size: items per piece, larger than the batch is one piece; ``"auto"``; or a `TokenBudget`, which
                runs items longest first in pieces with the least padding.
            num_micro_batches: of a pipeline: a number, ``"auto"``, or by default what the pipeline was made with.
            max_norm: clip the gradients by their global norm.
            scheduler: its ``step()`` is called after each update.
            scaler, autocast: loss scaling, for fp16; dtype for ``torch.autocast`` around forward and loss.
            list_of_samples: how a batch that is a list is read, see `microbatch.batch.split.batch_size_of`.
            profile, memory_limit: for ``"auto"``; the limit in bytes (of each rank of a pipeline).
            process_group: ranks that share the step.
            noise_scale: measure the gradient noise scale, see `microbatch.training.noise_scale`; it needs two pieces.

        Raises:
            InvalidBatchSizes: a micro-batch size below 1.
            InvalidSettings: see `microbatch.training.settings.check_settings`.
        """
        made: Optimizer = made_of(optimizer, model)
        check_kinds(
            {
                "model": model, "optimizer": made, "loss": loss, "forward": forward, "weight": weight,
                "autocast": autocast, "scheduler": scheduler, "scaler": scaler, "max_norm": max_norm,
                "memory_limit": memory_limit,
            }
        )  # fmt: skip
        check_settings(model, made, micro_batch_size=micro_batch_size, scheduler=scheduler)
        self.model, self.optimizer, self.loss, self.scheduler, self.scaler = model, made, loss, scheduler, scaler
        self.forward, self.weight, self.autocast, self.max_norm = forward, weight, autocast, max_norm
        self.micro_batch_size, self.profile = micro_batch_size, profile
        self.memory_limit, self.process_group = memory_limit, process_group
        self._is_pipeline = is_pipeline(model)
        number = self._number_of(num_micro_batches, joint=joint, batch_norm=batch_norm, noise_scale=noise_scale,
                                 profile=profile, memory_limit=memory_limit, process_group=process_group)  # fmt: skip
        self._ranks = ranks_of(model, made, process_group, device_of(model), number)
        self._recovery = Recovery()
        self.choice: Choice | None = None
        self._list_of_samples, self._weights_differ = list_of_samples, False
        self._trims: bool | None = None
        self._can_show = can_show(model, self._ranks, joint=joint is not None)
        self._whole = WholeBatch(
            model, loss, self._ranks, joint=joint, batch_norm=batch_norm, weight=weight, noise_scale=noise_scale
        )
        self._noise = PieceNorms(self._trained, scaler) if noise_scale else None
        self.steps = self.samples = 0  # of all ranks

    def __call__(self, batch: Any) -> StepResult:
        """One step.

        Args:
            batch: this rank's batch, wherever the loader put it. Each piece moves to the model's device at its turn.

        Raises:
            InvalidBatch: members of different lengths; see `microbatch.batch.split`.
            InvalidLoss: the loss returned something else than a sum and its weight, or is not finite.
            InvalidModel: nothing to train.
        """
        memory = _allocator(device_of(self.model))
        if memory is not None:
            memory.reset_peak_memory_stats(device_of(self.model))
        done, (norm, skipped) = self._retried(batch, self._updated)
        gradients.clear(self._all_parameters())
        self.steps, self.samples = self.steps + 1, self.samples + self._ranks.items
        return self._result(done, memory, norm, skipped)

    def accumulate(self, batch: Any) -> Accumulated:
        """Only the gradients of the step, left in ``.grad`` (multiplied by the scale of a scaler); no update."""
        return self._retried(batch, self._multiplied)[0]

    def save(self, folder: str | Path, *, keep: int = 2) -> Path:
        """Write all that is needed to go on into a folder of checkpoints, see `checkpoints/checkpoint.py`."""
        return checkpoint.save(self, folder, keep)

    def load(self, path: str | Path) -> Path | None:
        """Go on from the newest complete checkpoint of a folder, see `checkpoints/checkpoint.py`."""
        return checkpoint.load(self, path)

    def state_dict(self) -> dict[str, Any]:
        """As `save` for a checkpoint of your own; torch.distributed.checkpoint calls it by itself."""
        return checkpoint.state_dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The counterpart of `state_dict`."""
        checkpoint.load_state_dict(self, state_dict)

    def check(self, batch: Any) -> ExactnessReport:
        """Proof that this step gives this batch, in its pieces and over all ranks, the gradients of one whole pass.

        Weights, optimizer, gradients, buffers and random state are left as they are. Every rank calls it. See
        `microbatch.training.proof`.

        Raises:
            InvalidBatch: one item cannot be cut.
            NoAnswer: the whole batch does not fit in one pass.
        """
        if self._is_pipeline:
            from microbatch.training.pipelined_proof import prove_pipelined

            return prove_pipelined(self, batch)
        return prove(self, batch)

    def timeline(self) -> Timeline:
        """The last step of a `Pipeline`, measured, with its simulation beside it. Any rank may ask.

        Raises:
            InvalidSettings: the model is no pipeline.
            NoAnswer: no step was done yet.
        """
        if not getattr(self.model, "is_pipeline", False):
            raise InvalidSettings("The model is no pipeline.", "Give TrainStep a microbatch.Pipeline.")
        from microbatch.pipeline.execution.measuring import timeline_of

        return timeline_of(self.model)  # type: ignore[arg-type]

    def _retried(self, batch: Any, finish: Callable[[Accumulated], T]) -> tuple[Accumulated, T]:
        """Gradients of the whole batch but for a factor, then `finish`; in smaller pieces where memory runs out.

        Each try begins from a clean start; on an error all is as before.
        """
        self._choose_number(batch)
        with self._ranks.together(), self._whole.around(self.model):
            return self._tried(batch, finish)

    def _choose_number(self, batch: Any) -> None:
        """Into how many micro-batches a pipeline cuts its batches, at the first."""
        if self._is_pipeline and self.choice is None:
            from microbatch.training.memory.num_micro_batches import choose_number

            self.choice = choose_number(self, batch)

    def _tried(self, batch: Any, finish: Callable[[Accumulated], T]) -> tuple[Accumulated, T]:
        batch_size = self._size_of(batch)
        self._trained()
        start = Snapshot.take(self.model, device_of(self.model))
        cutting = self._cutting(batch, batch_size, start)

        def attempt(size: int) -> tuple[Accumulated, T]:
            done = self._gradients(cutting.batch, cutting.sizes(size), start)
            return done, finish(done)

        try:
            (done, finished), attempts = self._recovery.run(
                attempt,
                cutting.wanted or self._first_size(batch, batch_size, start),
                ladder=cutting.ladder,
                undo=lambda: self._undo(start),
                device=device_of(self.model),
                alone=self._ranks.alone,
                contents=lambda: contents(self._passes(), self.optimizer, batch),
            )
        except BaseException:
            self._undo(start)
            self._recovery.undo_update()
            raise
        return replace(done, attempts=cutting.named(attempts), tokens=cutting.tokens(done.sizes)), finished

    def _updated(self, done: Accumulated) -> tuple[float | None, str | None]:
        """The update; not without weight."""
        if not any(total.weight for total in done.totals.values()):
            logger.warning("Step skipped: %s (%d items).", NO_WEIGHT, done.sizes.global_batch_size)
            return None, NO_WEIGHT
        if self.scaler is None or not self.scaler.is_enabled():  # which skips such steps by itself
            check_finite(done.totals)
        with self._recovery.guarding(self.optimizer, self.scaler):
            return self._update(done.factor)

    def _multiplied(self, done: Accumulated) -> None:
        gradients.scale(self._trained(), done.factor)
        gradients.narrow(self._trained())

    def _undo(self, start: Snapshot) -> None:
        """Everything that a try has changed, as it was at the start of the step."""
        gradients.clear(self._all_parameters())
        start.restore()

    def _gradients(self, batch: Any, sizes: BatchSizes, start: Snapshot) -> Accumulated:
        """One try at one size, over all ranks; the caller restores `start` before another."""
        done = self._passed(batch, self._ranks.agree(batch, sizes, self._list_of_samples), start)
        with during(REDUCTION):
            self._ranks.reduce_gradients(self._trained())
        return done

    def _passed(self, batch: Any, sizes: BatchSizes, start: Snapshot) -> Accumulated:
        """Forward and backward of this rank's pieces."""
        with self._whole.watching(self.model, sizes, self._ranks):
            if self._whole.in_two_passes(self.model, sizes, self._ranks):
                empty = partial(self._empty_gradients, sizes)
                return Accumulated(sizes, self._whole.run(self._passes(), batch, sizes, start, empty), 1.0)
            return self._in_one_pass(batch, sizes, start)

    def _in_one_pass(self, batch: Any, sizes: BatchSizes, start: Snapshot) -> Accumulated:
        passes, weights = self._passes(), self._weights_of(batch)
        shared = sizes.num_micro_batches > 1 or not self._ranks.alone
        if weights is None and self._weights_differ and shared and self._ranks.forward_only:
            weights = passes.weights(batch, sizes)
            start.restore()
        self._empty_gradients(sizes)
        totals, divisor = passes.run(batch, sizes, weights)
        if divisor is not None and common_weight(totals) is None:  # nobody could know; now it is known
            weights = {name: total.weight for name, total in totals.items()}
            self._weights_differ = all(weights.values())
            start.restore()
            self._empty_gradients(sizes)
            totals, divisor = passes.run(batch, sizes, weights)
        check_weights(totals, weights)
        weight = common_weight(totals)
        factor = divisor / weight if divisor is not None and weight else 1.0
        return Accumulated(sizes, totals, factor)

    def _update(self, factor: float) -> tuple[float | None, str | None]:
        return update(
            self.optimizer,
            self._trained(),
            factor=factor,
            max_norm=math.inf if self.max_norm is None and self._noise is not None else self.max_norm,
            scaler=self.scaler,
            scheduler=self.scheduler,
            make=self._recovery.make,
            ranks=self._ranks,
        )

    def _passes(self) -> Passes:
        kind: type[Passes] = Passes
        if self._is_pipeline:
            from microbatch.training.pipelined import PipelinedPasses

            kind = PipelinedPasses
        return kind(
            model=self.model,
            loss=self._whole.loss,
            forward=self.forward,
            autocast=self.autocast,
            scaler=self.scaler,
            ranks=self._ranks,
            list_of_samples=self._list_of_samples,
            norms=self._noise,
            trim_to=self._budget if self._trims else None,
        )

    def _number_of(self, number: int | str | None, **given: object) -> int | str | None:
        """Micro-batches of a pipeline, which decide unless a size was given; arguments that it lacks are refused."""
        if not self._is_pipeline:
            if number is not None:
                raise InvalidSettings("num_micro_batches= is an argument for a pipeline.", "Give micro_batch_size=.")
            return None
        from microbatch.training.pipelined import check_pipelined

        check_pipelined(**given)
        if self.micro_batch_size == "auto":
            self.micro_batch_size = sys.maxsize
            return number
        return 1 if number is None else number

    def _weights_of(self, batch: Any) -> dict[str, float] | None:
        if self.weight is None:
            return None
        weights = {} if is_empty(batch) else self.weight(batch)
        named = weights if isinstance(weights, Mapping) else {ONLY: weights}
        totals, _ = self._ranks.meet({name: Total(0.0, number_of(value)) for name, value in named.items()}, None)
        return {name: total.weight for name, total in totals.items()}

    def _result(self, done: Accumulated, memory: Any, norm: float | None, skipped: str | None) -> StepResult:
        noise = None
        if self._noise is not None:
            noise = self._noise.step_ends(self._ranks, done.totals, None if skipped else norm, self._ranks.items)
        return StepResult(
            loss=loss_of(done.totals),
            losses={name: total.loss for name, total in done.totals.items()},
            weight=next((total.weight for total in done.totals.values()), 0.0),
            weights={name: total.weight for name, total in done.totals.items()},
            batch_size=done.sizes.global_batch_size,
            micro_batch_size=done.sizes.micro_batch_size,
            num_micro_batches=done.sizes.num_micro_batches,
            attempts=done.attempts,
            peak_bytes=None if memory is None else memory.max_memory_allocated(device_of(self.model)),
            grad_norm=norm,
            skipped=skipped,
            tokens=done.tokens[0],
            padded_tokens=done.tokens[1],
            sent_bytes=self._ranks.sent_bytes,
            communication_calls=self._ranks.calls,
            gradient_noise_scale=None if noise is None else noise.value,
            noise_scale=noise,
        )

    def _empty_gradients(self, sizes: BatchSizes) -> None:
        gradients.clear(self._all_parameters())
        if sizes.num_micro_batches > 1 or not self._ranks.alone:
            gradients.widen(self._trained())

    def _first_size(self, batch: Any, batch_size: int, start: Snapshot) -> int:
        """The size to try first."""
        if isinstance(self.micro_batch_size, TokenBudget):  # a rank without data
            return self.micro_batch_size.tokens
        if not isinstance(self.micro_batch_size, str):
            return self.micro_batch_size
        if self.choice is None:
            self.choice = self._choose(batch, batch_size)
            self._undo(start)
        return max(batch_size, 1) if self.choice is None else self.choice.micro_batch_size

    def _choose(self, batch: Any, batch_size: int) -> Choice | None:
        """What ``"auto"`` is, see `microbatch.training.memory.micro_batch_size`; None as long as there is no data."""
        if not self._ranks.retries_alone and self.profile is None:
            return choose_together(self._passes(), self.optimizer, batch, batch_size, self.memory_limit)
        if not batch_size:
            return None
        if self.profile is not None:
            return from_profile(self.profile, batch_size, self.memory_limit)
        return choose(self._passes(), self.optimizer, batch, batch_size, self.memory_limit)

    def _cutting(self, batch: Any, batch_size: int, start: Snapshot) -> Cutting:
        """How the batch becomes pieces."""
        if isinstance(batch, Pieces):
            return as_given(batch, self._sizes_of(batch))
        budget = self._budget
        if budget is None or not batch_size:
            return by_size(batch, batch_size)
        found = lengths_of(batch, batch_size, budget.length, list_of_samples=self._list_of_samples)
        if budget.trim is not None:
            self._trims = budget.trim
        elif self._trims is None and self._can_show and found.padded and not is_list(batch, self._list_of_samples):
            self._trims = trimming_is_exact(self._passes(), batch, found.values, budget)
            start.restore()
        return by_length(batch, found, budget, trims=bool(self._trims), list_of_samples=self._list_of_samples)

    @property
    def _budget(self) -> TokenBudget | None:
        return self.micro_batch_size if isinstance(self.micro_batch_size, TokenBudget) else None

    def _size_of(self, batch: Any) -> int:
        if not self._ranks.alone and is_empty(batch):
            return 0
        if isinstance(batch, Pieces):
            return sum(self._sizes_of(batch))
        size = batch_size_of(batch, list_of_samples=self._list_of_samples)
        if self._list_of_samples is None:
            self._list_of_samples = is_list_of_samples(batch)  # later batches are read as this one
        return size

    def _sizes_of(self, batch: Pieces) -> list[int]:
        return [batch_size_of(piece, list_of_samples=self._list_of_samples) for piece in batch.pieces]

    def _trained(self) -> list[nn.Parameter]:
        """Parameters of the optimizer that are not frozen."""
        groups = self.optimizer.param_groups
        trained = [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]
        if not trained and not self._is_pipeline:  # another stage may have some
            raise InvalidModel("Every parameter of the optimizer is frozen.", "Set requires_grad of one to True.")
        return trained

    def _all_parameters(self) -> list[nn.Parameter]:
        own = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return [*self.model.parameters(), *own]


def _allocator(device: torch.device) -> Any:
    """The module that tells the peak of the device's allocator; None where none does."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    return module if hasattr(module, "reset_peak_memory_stats") else None
