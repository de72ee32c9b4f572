"""Forward and backward of a batch, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from microbatch.batch.split import split, to_device
from microbatch.errors import InvalidModel
from microbatch.sizes import BatchSizes
from microbatch.training.normalise import Loss, Pair, Tally, Total, pairs_of, power_of_two
from microbatch.training.one_process import Ranks
from microbatch.training.phase import BACKWARD, FORWARD, during
from microbatch.training.piece_norms import PieceNorms

Forward = Callable[[nn.Module, Any], Any]
"""``forward(model, batch) -> output``."""


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
    """

    model: nn.Module
    loss: Loss
    forward: Forward | None
    autocast: torch.dtype | None
    scaler: GradScaler | None
    ranks: Ranks
    list_of_samples: bool | None
    norms: PieceNorms | None = None

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
        self._idle(before=True)
        pieces = self._pieces(batch, sizes)
        for index in range(sizes.num_micro_batches):
            piece = next(pieces)  # enumerate(pieces) would hold it while the next one is moved
            with self.ranks.piece(index, sizes.num_micro_batches):
                with during(FORWARD):
                    pairs = self._pairs(piece)
                tally.add(pairs)
                if weights is None and sizes.num_micro_batches == 1 and self.ranks.alone:
                    weights = {name: pair.weight for name, pair in pairs.items()}
                if weights is None and divisor is None:
                    divisor = self.ranks.divisor or _guess(pairs, sizes)
                with during(BACKWARD):
                    trained |= self._backward(pairs, weights, divisor)
            del pairs, piece
        self._idle(before=False)
        totals, divisor = self.ranks.meet(tally.totals(), divisor)
        if not trained and self.ranks.alone and any(total.weight for total in totals.values()):
            raise InvalidModel("The loss depends on no parameter that is trained.", "Unfreeze one, or change the loss.")
        return totals, divisor

    def weights(self, batch: Any, sizes: BatchSizes) -> dict[str, float]:
        """The weight of each term over all pieces and ranks, from forward passes without gradients."""
        tally = Tally()
        with torch.no_grad():
            for piece in self._pieces(batch, sizes):
                tally.add(self._pairs(piece))
        return {name: total.weight for name, total in self.ranks.meet(tally.totals(), None)[0].items()}

    def probe(self, piece: Any) -> None:
        """Forward and backward of one piece alone, with or without weight; the gradients mean nothing."""
        with self.ranks.piece(0, 2):
            pairs = self._pairs(to_device(piece, device_of(self.model)))
            torch.autograd.backward([pair.sum for pair in pairs.values() if pair.sum.requires_grad])

    def _idle(self, *, before: bool) -> None:
        """Forward of pieces that only keep other ranks company; they have no weight."""
        for piece in self.ranks.idle_pieces(before=before):
            with self.ranks.piece(0, 1):
                self._pairs(to_device(piece, device_of(self.model)))

    def _pieces(self, batch: Any, sizes: BatchSizes) -> Iterator[Any]:
        device = device_of(self.model)
        if not sizes.num_micro_batches:  # a rank without data
            return
        for piece in split(batch, sizes.pieces, list_of_samples=self.list_of_samples):
            yield to_device(piece, device)

    def _pairs(self, piece: Any) -> dict[str, Pair]:
        with torch.autocast(device_of(self.model).type, dtype=self.autocast) if self.autocast else nullcontext():
            if self.forward is not None:
                output = self.forward(self.model, piece)
            else:
                output = call(self.model, piece, list_of_samples=self.list_of_samples)
            return pairs_of(self.loss(output, piece))

    def _backward(self, pairs: Mapping[str, Pair], weights: Mapping[str, float] | None, divisor: float | None) -> bool:
        """Add the gradients of one piece; whether there were any. Terms without weight add nothing."""
        terms = []
        for name, pair in pairs.items():
            by = divisor if weights is None else weights.get(name, 0.0)
            if by and pair.sum.requires_grad and (pair.weight or self.ranks.always_backward):
                term = pair.sum / by
                terms.append(term if self.scaler is None else self.scaler.scale(term))
        norms = None if self.norms is None else self.norms.piece(pairs, divisor if weights is None else None)
        with norms or nullcontext():
            if terms:
                torch.autograd.backward(terms)
        return bool(terms)


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first parameter is, else its first buffer, else the CPU."""
    tensor = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if tensor is None else tensor.device


def call(model: nn.Module, batch: Any, *, list_of_samples: bool | None = None) -> Any:
    """The model on a batch: a mapping as keywords, a tuple or a list of members as arguments, else as it is."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple) or (isinstance(batch, list) and not list_of_samples):
        return model(*batch)
    return model(batch)


def _guess(pairs: Mapping[str, Pair], sizes: BatchSizes) -> float:
    """A power of two near the weight of the whole batch, from its first piece.

    Gradients so have the size of a mean's from the start: fp16 neither overflows nor needs another loss scale.
    """
    first = max(pair.weight for pair in pairs.values()) or float(sizes.micro_batch_size)
    return power_of_two(first * sizes.global_batch_size / sizes.micro_batch_size)
