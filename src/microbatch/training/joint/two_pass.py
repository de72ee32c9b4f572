"""Two passes over the pieces, for a loss that needs the whole batch at once.

1. Every piece runs forward, and only the values that the loss needs of it are kept (see `terms.py`).
2. The loss of the joined values gives its gradient with respect to them, and to parameters of its own. Ranks exchange
   their values first, so that each knows the loss of all.
3. Every piece runs forward again from the same random state, and its part of that gradient goes into its backward.

This costs one more forward pass. Memory holds the activations of one piece, and the joined values with what the loss
makes of them.

The first pass builds its graph and drops it: kernels and compiled code differ without gradients, and both passes must
draw the same random numbers. All weights are known after it, so that each sum is divided by its own at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from microbatch.errors import RankOutOfMemory
from microbatch.sizes import BatchSizes
from microbatch.training.joint.terms import terms_of
from microbatch.training.joint.values import Collected
from microbatch.training.memory.snapshot import Snapshot
from microbatch.training.normalise import Loss, Total, added_up
from microbatch.training.passes import Passes
from microbatch.training.phase import BACKWARD, FORWARD, during

Each = Callable[[int, Any], object]
"""Called with the number of a piece and what its loss returned."""

Roots = Callable[[int, Any], tuple[list[Tensor], list[Tensor | None]]]
"""Of the number of a piece and what its loss returned: what backward starts from, and with which gradients."""


class Order(Protocol):
    """How the pieces run in each of the passes."""

    def forward(self, passes: Passes, loss: Loss, batch: Any, sizes: BatchSizes, each: Each) -> None:
        """Forward of every piece."""

    def backward(self, passes: Passes, loss: Loss, batch: Any, sizes: BatchSizes, roots: Roots) -> bool:
        """Forward and backward of every piece; whether any had something to go backward from."""


class PieceByPiece:
    """Each piece as a whole, one after another."""

    def forward(self, passes: Passes, loss: Loss, batch: Any, sizes: BatchSizes, each: Each) -> None:
        def run(index: int, piece: list[Any]) -> None:
            with during(FORWARD):
                each(index, replace(passes, loss=loss).result_of(piece.pop()))

        passes.idle(before=True)
        _take_turns(passes, batch, sizes, run)
        passes.idle(before=False)

    def backward(self, passes: Passes, loss: Loss, batch: Any, sizes: BatchSizes, roots: Roots) -> bool:
        trained: list[bool] = []

        def run(index: int, piece: list[Any]) -> None:
            with during(FORWARD):
                tensors, gradients = roots(index, replace(passes, loss=loss).result_of(piece.pop()))
            with during(BACKWARD):
                if tensors:
                    torch.autograd.backward(tensors, gradients)
            trained.append(bool(tensors))

        _take_turns(passes, batch, sizes, run)
        passes.idle(before=False)
        return any(trained)


def _take_turns(passes: Passes, batch: Any, sizes: BatchSizes, run: Callable[[int, list[Any]], None]) -> None:
    """Call `run` with the number of each piece and a list that alone holds it."""
    pieces = passes.pieces(batch, sizes)
    for index in range(sizes.num_micro_batches):
        piece = [next(pieces)]
        with passes.ranks.piece(index, sizes.num_micro_batches):
            run(index, piece)


def run(
    passes: Passes,
    loss: Loss,
    batch: Any,
    sizes: BatchSizes,
    *,
    items: bool,
    order: Callable[[], Order],
    start: Snapshot,
    empty: Callable[[], None],
) -> dict[str, Total]:
    """Gradients of the whole batch over all ranks, each sum divided by its weight, are added to ``.grad``.

    Args:
        passes: how a piece runs; its loss is that of a piece alone.
        loss: ``loss(output, piece)``, pairs and joint terms.
        batch: the whole batch of this rank.
        sizes: how it is cut.
        items: whether the rows of joint values are items: one row for several items is then shared by all pieces.
        order: makes what says how the pieces run.
        start: random state and buffers before the step.
        empty: empties the gradients.

    Returns:
        Sum and weight of each term over all pieces and ranks.

    Raises:
        InvalidLoss: the loss returned something else, or uses what cannot be joined.
        InvalidModel: the loss depends on no parameter that is trained.
    """
    while True:
        try:
            with passes.ranks.redone_together():
                return _two_passes(passes, loss, batch, sizes, items, order(), start, empty)
        except RankOutOfMemory:
            if not passes.ranks.retries_alone:
                raise
        start.restore()  # another rank begins again in smaller pieces, with other random numbers


def _two_passes(
    passes: Passes, loss: Loss, batch: Any, sizes: BatchSizes, items: bool, order: Order, start: Snapshot,
    empty: Callable[[], None],
) -> dict[str, Total]:  # fmt: skip
    empty()
    collected = Collected(sizes.pieces if items and sizes.num_micro_batches else ())
    order.forward(passes, loss, batch, sizes, collected.add)
    note, tensors = collected.told()
    start.restore()
    empty()
    said = passes.ranks.gather(note, tensors)
    weights = {name: total.weight for name, total in added_up([note["totals"] for note, _ in said]).items()}
    totals = collected.totals()
    if len(said) > 1:
        torch.manual_seed(said[0][0]["seed"])  # a loss that draws random numbers draws the same on every rank
    with during(FORWARD):
        for values in collected.terms.values():
            totals |= values.differentiate(passes, said, passes.ranks.rank)
    start.restore_random()

    def roots(index: int, result: Any) -> tuple[list[Tensor], list[Tensor | None]]:
        pairs, joint = terms_of(result)
        given: list[tuple[Tensor, Tensor | None]] = [(root, None) for root in passes.roots(pairs, weights, None)]
        for name, term in joint.items():
            given += collected.terms[name].gradients(term, index)
        return [tensor for tensor, _ in given], [gradient for _, gradient in given]

    trained = order.backward(passes, loss, batch, sizes, roots)
    everywhere, _ = passes.ranks.meet(totals, None)
    passes.check_trained(trained, everywhere)
    return everywhere
