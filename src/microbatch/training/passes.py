"""Forward and backward of a batch, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from microbatch.batch.pieces import Pieces
from microbatch.batch.running import Forward, call, device_of
from microbatch.batch.split import batch_size_of, split, to_device
from microbatch.batch.token_budget import TokenBudget
from microbatch.errors import InvalidModel
from microbatch.sizes import BatchSizes
from microbatch.training.cutting import trim
from microbatch.training.normalise import Loss, Pair, Tally, Total, pairs_of, power_of_two
from microbatch.training.phase import BACKWARD, FORWARD, during
from microbatch.training.piece_norms import PieceNorms
from microbatch.training.ranks.one_process import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """How the pieces of a batch run.

    Attributes:
        model: what runs and is trained.
        loss: see `microbatch.training.normalise.Loss`.
        forward: None for `call`.
        autocast: dtype of forward and loss; None for none.
        scaler: multiplies what backward starts from.
        ranks: the other processes.
        list_of_samples: see `microbatch.batch.split.batch_size_of`.
        norms: what measures the gradient of each piece; None for nothing.
        trim_to: pieces lose the padding that all of their items have under this budget; None leaves it in.
    """

    model: nn.Module
    loss: Loss
    forward: Forward | None
    autocast: torch.dtype | None
    scaler: GradScaler | None
    ranks: Ranks
    list_of_samples: bool | None
    norms: PieceNorms | None = None
    trim_to: TokenBudget | None = None

    def run(
        self, batch: Any, sizes: BatchSizes, weights: Mapping[str, float] | None
    ) -> tuple[dict[str, Total], float | None]:
        """Forward and backward of every piece; gradients are added to what stands in ``.grad``.

        Args:
            batch: the whole batch, where the loader put it.
            sizes: how it is cut.
            weights: of each term over all pieces and ranks; None while they are not known.

        Returns:
            Totals over all ranks, and the common number that the sums were divided by instead of weights not known.

        Raises:
            InvalidModel: no piece's loss depends on a parameter that is trained.
        """
        with nullcontext() if self.norms is None else self.norms.watching(self.ranks):
            return self._run(batch, sizes, weights)

    def _run(
        self, batch: Any, sizes: BatchSizes, weights: Mapping[str, float] | None
    ) -> tuple[dict[str, Total], float | None]:
        tally, divisor, trained = Tally(), None, False
        self.idle(before=True)
        pieces = self.pieces(batch, sizes)
        for index in range(sizes.num_micro_batches):
            piece = next(pieces)  # enumerate(pieces) would hold it while the next one is moved
            with self.ranks.piece(index, sizes.num_micro_batches):
                with during(FORWARD):
                    pairs = self.pairs(piece)
                tally.add(pairs)
                if weights is None and sizes.num_micro_batches == 1 and self.ranks.alone:
                    weights = {name: pair.weight for name, pair in pairs.items()}
                if weights is None and divisor is None:
                    divisor = self.ranks.divisor or _guess(pairs, sizes)
                with during(BACKWARD):
                    trained |= self._backward(pairs, weights, divisor)
            del pairs, piece
        self.idle(before=False)
        totals, divisor = self.ranks.meet(tally.totals(), divisor)
        self.check_trained(trained, totals)
        return totals, divisor

    def check_trained(self, trained: bool, totals: Mapping[str, Total]) -> None:
        """
        Raises:
            InvalidModel: there was a loss, but no backward pass.
        """
        if not trained and self.ranks.alone and any(total.weight for total in totals.values()):
            raise InvalidModel("The loss depends on no parameter that is trained.", "Unfreeze one, or change the loss.")

    def weights(self, batch: Any, sizes: BatchSizes) -> dict[str, float]:
        """The weight of each term over all pieces and ranks, from forward passes without gradients."""
        tally = Tally()
        with torch.no_grad():
            for piece in self.pieces(batch, sizes):
                tally.add(self.pairs(piece))
        return {name: total.weight for name, total in self.ranks.meet(tally.totals(), None)[0].items()}

    def probe(self, part: Any, pieces: int = 1) -> None:
        """Forward and backward of a part of the batch in pieces, with or without weight; gradients mean nothing.

        All that a step does with a piece is done, so that it can be timed.
        """
        tally, size = Tally(), batch_size_of(part, list_of_samples=self.list_of_samples)
        for piece in self.pieces(part, BatchSizes.of(global_batch_size=size, num_micro_batches=pieces)):
            with self.ranks.piece(0, 2):
                pairs = self.pairs(piece)
                tally.add(pairs)
                torch.autograd.backward([pair.sum for pair in pairs.values() if pair.sum.requires_grad])

    def idle(self, *, before: bool) -> None:
        """Forward of pieces that only keep other ranks company; they have no weight."""
        for piece in self.ranks.idle_pieces(before=before):
            with self.ranks.piece(0, 1):
                self.pairs(to_device(piece, device_of(self.model)))

    def pieces(self, batch: Any, sizes: BatchSizes) -> Iterator[Any]:
        """The pieces of a batch, each moved to the model's device when it is asked for."""
        device = device_of(self.model)
        if not sizes.num_micro_batches:  # a rank without data
            return
        cut = isinstance(batch, Pieces)
        for piece in batch.pieces if cut else split(batch, sizes.pieces, list_of_samples=self.list_of_samples):
            yield to_device(trim(piece, self.trim_to, list_of_samples=self.list_of_samples), device)

    def result_of(self, piece: Any) -> Any:
        """Forward and loss of one piece on the model's device: what the loss returned."""
        with self.casting():
            if self.forward is not None:
                output = self.forward(self.model, piece)
            else:
                output = call(self.model, piece, list_of_samples=self.list_of_samples)
            return self.loss(output, piece)

    def casting(self) -> AbstractContextManager[object]:
        """Autocast, where it is on."""
        return torch.autocast(device_of(self.model).type, dtype=self.autocast) if self.autocast else nullcontext()

    def roots(
        self, pairs: Mapping[str, Pair], weights: Mapping[str, float] | None, divisor: float | None
    ) -> list[Tensor]:
        """What backward starts from; empty where no term has weight and a gradient."""
        terms = []
        for name, pair in pairs.items():
            by = divisor if weights is None else weights.get(name, 0.0)
            if by and pair.sum.requires_grad and (pair.weight or self.ranks.always_backward):
                term = pair.sum / by
                terms.append(term if self.scaler is None else self.scaler.scale(term))
        return terms

    def pairs(self, piece: Any) -> dict[str, Pair]:
        """Forward and loss of one piece, on the model's device already."""
        return pairs_of(self.result_of(piece))

    def _backward(self, pairs: Mapping[str, Pair], weights: Mapping[str, float] | None, divisor: float | None) -> bool:
        """Add the gradients of one piece; whether there were any. Terms without weight add nothing."""
        terms = self.roots(pairs, weights, divisor)
        norms = None if self.norms is None else self.norms.piece(pairs, divisor if weights is None else None)
        with norms or nullcontext():
            if terms:
                torch.autograd.backward(terms)
        return bool(terms)


def _guess(pairs: Mapping[str, Pair], sizes: BatchSizes) -> float:
    """A power of two near the weight of the whole batch, from its first piece.

    Gradients so have the size of a mean's from the start: fp16 neither overflows nor needs another loss scale.
    """
    items = sizes.uneven[0] if sizes.uneven else sizes.micro_batch_size
    first = max(pair.weight for pair in pairs.values()) or float(items)
    return power_of_two(first * sizes.global_batch_size / items)
