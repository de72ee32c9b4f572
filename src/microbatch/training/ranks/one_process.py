"""What a step shares with other processes when there are none: the shape that every kind of ranks has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from microbatch.sizes import BatchSizes
from microbatch.training import gradients
from microbatch.training.normalise import Total
from microbatch.training.ranks.gathering import Gathered
from microbatch.training.ranks.meeting import Meeting

Show = Callable[[object, Tensor], None]
"""``show(key, gradient)``: a part of what this rank adds to its gradients; the key says which part."""


class Ranks(Protocol):
    """The processes that share a step.

    A step calls, in this order: `together` around everything; at each try `agree`; `idle_pieces` and `piece` around
    the forward and backward of each piece; where the loss is joint, `gather` and `redone_together` around what follows;
    `meet` when its own pieces are done (or before them, when the weights are known); `reduce_gradients` once before the
    update.

    Attributes:
        rank: of this process among them.
        number: of processes.
        alone: whether the process's own weights are the global ones; a single piece then needs no scaling.
        retries_alone: whether a rank may redo its pieces without the others.
        always_backward: whether a piece without weight must run backward nevertheless, since other ranks wait for it.
        forward_only: whether pieces may run forward without backward.
        divisor: what every rank divides its sums by while the weights are not known; None for each its own.
        sent_bytes: bytes that this rank has sent in this step, see `microbatch.training.ranks.meeting.Traffic`.
        calls: collectives of this step.
        items: of all ranks in this step.
        meeting: where the ranks talk; None for one process.
    """

    @property
    def rank(self) -> int: ...
    @property
    def number(self) -> int: ...
    @property
    def alone(self) -> bool: ...
    @property
    def retries_alone(self) -> bool: ...
    @property
    def always_backward(self) -> bool: ...
    @property
    def forward_only(self) -> bool: ...
    @property
    def divisor(self) -> float | None: ...
    @property
    def sent_bytes(self) -> int: ...
    @property
    def calls(self) -> int: ...
    @property
    def items(self) -> int: ...
    @property
    def meeting(self) -> Meeting | None: ...

    def together(self) -> AbstractContextManager[object]:
        """Around a step: an error of one rank is raised on every rank."""

    def agree(self, batch: Any, sizes: BatchSizes, list_of_samples: bool | None) -> BatchSizes:
        """A try begins at these sizes, or at those that all ranks can use."""

    def idle_pieces(self, *, before: bool) -> Iterator[Any]:
        """Pieces to run without weight before or after the rank's own, since other ranks run some."""

    def piece(self, index: int, number: int) -> AbstractContextManager[object]:
        """Entered around forward and backward of piece `index` of `number`."""

    def meet(self, totals: dict[str, Total], divisor: float | None) -> tuple[dict[str, Total], float | None]:
        """Sums and weights over all ranks, and the common number that their sums count as divided by."""

    def gather(self, note: Any, tensors: Sequence[Tensor]) -> Gathered:
        """Note and tensors of every rank, see `microbatch.training.ranks.gathering.gather`."""

    def redone_together(self) -> AbstractContextManager[object]:
        """Around what follows a `gather`: other ranks go on with what this one gave.

        Out of memory, this rank tells them. Where `retries_alone`, they hear of it as RankOutOfMemory and begin again
        at their own size.
        """

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up over all ranks the gradients in ``.grad``, each the sum over the rank's own pieces."""

    def share(self, said: dict[str, Any]) -> list[dict[str, Any]]:
        """What every rank says (plain values), in the order of ranks."""

    def add_up(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks."""

    def showing_gradients(self, show: Show) -> AbstractContextManager[bool]:
        """Around the pieces of a try: `show` gets gradients that do not come through leaves; whether it gets all."""

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """2-norm of the gradients of the whole model, of which this rank may hold a part."""

    def share_found_inf(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """What a scaler has found on one rank, it has found on all."""


class OneProcess:
    """The only process."""

    rank = 0
    number = 1
    alone = True
    retries_alone = True
    always_backward = False
    forward_only = True
    divisor: float | None = None
    sent_bytes = 0
    calls = 0
    meeting: Meeting | None = None

    def __init__(self) -> None:
        self.items = 0

    def together(self) -> AbstractContextManager[object]:
        return nullcontext()

    def agree(self, batch: Any, sizes: BatchSizes, list_of_samples: bool | None) -> BatchSizes:  # noqa: ARG002
        self.items = sizes.global_batch_size
        return sizes

    def idle_pieces(self, *, before: bool) -> Iterator[Any]:  # noqa: ARG002
        return iter(())

    def piece(self, index: int, number: int) -> AbstractContextManager[object]:  # noqa: ARG002
        return nullcontext()

    def meet(self, totals: dict[str, Total], divisor: float | None) -> tuple[dict[str, Total], float | None]:
        return totals, divisor

    def gather(self, note: Any, tensors: Sequence[Tensor]) -> Gathered:
        return [(note, list(tensors))]

    def redone_together(self) -> AbstractContextManager[object]:
        return nullcontext()

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Nothing to add."""

    def share(self, said: dict[str, Any]) -> list[dict[str, Any]]:
        return [said]

    def add_up(self, tensor: Tensor) -> Tensor:
        return tensor

    def showing_gradients(self, show: Show) -> AbstractContextManager[bool]:  # noqa: ARG002
        return nullcontext(True)

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        return gradients.global_norm(parameters)

    def share_found_inf(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Every rank has the same gradients."""
