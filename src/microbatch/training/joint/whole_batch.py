"""What of a step needs the whole batch at once, as chosen when the step is made: the loss, and batch normalisation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from microbatch.errors import InvalidSettings
from microbatch.sizes import BatchSizes
from microbatch.training.joint import two_pass
from microbatch.training.joint.batch_norm import CHOICES, Spread, batch_norms, frozen, warn
from microbatch.training.joint.exact_batch_norm import ExactBatchNorm, check_exact
from microbatch.training.joint.terms import JointTerm, NotJoined, of_piece_alone
from microbatch.training.memory.snapshot import Snapshot
from microbatch.training.normalise import Loss, Total
from microbatch.training.passes import Passes
from microbatch.training.ranks.one_process import Ranks

JOINT = (None, "outputs", "terms")


class WholeBatch:
    """The choices of a step, and the two passes where they need them.

    Attributes:
        loss: of a piece as if it were the whole batch.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        ranks: Ranks,
        *,
        joint: str | None,
        batch_norm: str | None,
        weight: Any,
        noise_scale: bool = False,
    ) -> None:
        """
        Args:
            model: what is trained.
            loss: the user's.
            ranks: the other processes.
            joint: see `microbatch.training.step.TrainStep`.
            batch_norm: see `microbatch.training.joint.batch_norm`.
            weight: the user's ``weight(batch)``, or None.
            noise_scale: whether the gradients of pieces are to be compared.

        Raises:
            InvalidSettings: an unknown choice, weights given first where they are known anyhow, or batch norms that
                cannot be exact.
        """
        _check("joint", joint, JOINT)
        _check("batch_norm", batch_norm, CHOICES)
        if weight is not None and (joint is not None or batch_norm == "exact"):
            raise InvalidSettings("weight= is given, and two passes know the weights.", "Leave weight= out.")
        if noise_scale and (joint is not None or batch_norm == "exact"):
            raise InvalidSettings(
                "noise_scale= compares the gradients of pieces, which are not apart here.",
                "Leave noise_scale= out, or measure it with a loss that is a sum over pieces.",
            )
        if batch_norm == "exact":
            check_exact(model, ranks)
        self.loss: Loss = (lambda output, piece: of_piece_alone(loss(output, piece))) if joint == "terms" else loss
        self._loss, self._joint, self._batch_norm = loss, joint, batch_norm
        self._warned = batch_norm is not None

    def in_two_passes(self, model: nn.Module, sizes: BatchSizes, ranks: Ranks) -> bool:
        """Whether the step takes two passes: not where the piece is the whole batch."""
        if sizes.num_micro_batches == 1 and ranks.alone:
            return False
        return self._joint is not None or (self._batch_norm == "exact" and bool(batch_norms(model)))

    def run(
        self, passes: Passes, batch: Any, sizes: BatchSizes, start: Snapshot, empty: Callable[[], None]
    ) -> dict[str, Total]:
        """The two passes, see `microbatch.training.joint.two_pass.run`."""
        exact = self._batch_norm == "exact" and bool(batch_norms(passes.model))
        return two_pass.run(
            passes,
            partial(self._of_outputs, batch, passes.ranks) if self._joint == "outputs" else self._loss,
            batch,
            sizes,
            items=self._joint == "outputs",
            order=partial(ExactBatchNorm, start) if exact else two_pass.PieceByPiece,
            start=start,
            empty=empty,
        )

    def around(self, model: nn.Module) -> AbstractContextManager[object]:
        """Around a step."""
        return frozen(model) if self._batch_norm == "frozen" else nullcontext()

    @contextmanager
    def watching(self, model: nn.Module, sizes: BatchSizes, ranks: Ranks) -> Iterator[None]:
        """Around the pieces of a step: where nothing was chosen and it matters, it is said once."""
        layers = batch_norms(model) if not self._warned and in_parts(sizes, ranks) else {}
        if not layers:
            yield
            return
        spread = Spread()
        with spread.watching(layers):
            yield
        self._warned = True
        warn(layers, sizes.num_micro_batches, sizes.global_batch_size, spread)

    def _of_outputs(self, batch: Any, ranks: Ranks, output: Any, _piece: Any) -> JointTerm:
        """The user's loss as a term of all outputs."""
        if ranks.number > 1:
            batch = NotJoined(
                "the batch",
                f"each of {ranks.number} ranks has only its own part of",
                'Let forward return what the loss needs of it beside the outputs, as in {"embeddings": ..., "labels": '
                'batch["labels"]}: that is joined over all ranks.',
            )
        return JointTerm(output, lambda outputs: self._loss(outputs, batch))


def in_parts(sizes: BatchSizes, ranks: Ranks) -> bool:
    """Whether no forward sees the whole batch."""
    return sizes.num_micro_batches > 1 or ranks.number > 1


def _check(name: str, choice: object, choices: tuple[str | None, ...]) -> None:
    if choice not in choices:
        listed = ", ".join(map(repr, choices))
        raise InvalidSettings(f"{name} is {choice!r}.", f"It is one of {listed}.")
