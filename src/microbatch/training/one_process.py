"""What a step shares with other processes when there are none: the shape that every kind of ranks has."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from microbatch.training.normalise import Total


class OneProcess:
    """The only process.

    A step calls, in this order: `piece` around the forward and backward of each piece, `reduce_weights` once when
    its own pieces are done (or before them, when the weights are known), `reduce_gradients` once before the update.

    Attributes:
        alone: whether the process's own weights are the global ones; a single piece then needs no scaling.
        always_backward: whether a piece without weight must run backward nevertheless, since other ranks wait for it.
    """

    alone = True
    always_backward = False

    def piece(self, index: int, number: int) -> AbstractContextManager[object]:  # noqa: ARG002 - for other ranks
        """Entered around forward and backward of piece `index` of `number`."""
        return nullcontext()

    def reduce_weights(self, totals: dict[str, Total]) -> dict[str, Total]:
        """Sums and weights over all ranks; every rank gets the same."""
        return totals

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up over all ranks the gradients in ``.grad``, each the sum over the rank's own pieces."""
