"""Ranks with a shard of the model each, FSDP2 and HSDP: every layer is a meeting of all ranks.

So all ranks run the same number of pieces, at a size that they agree on before each try; a rank with less data runs
the rest without weight. A rank that fails takes part in the remaining collectives (see
`collectives.py`) and then every rank raises the same error; out of memory, all try a smaller size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from microbatch.batch.oom import drop_frames, is_out_of_memory, release
from microbatch.batch.split import split
from microbatch.errors import InvalidSettings
from microbatch.sizes import BatchSizes
from microbatch.training import gradients
from microbatch.training.memory.memory_model import largest_piece
from microbatch.training.memory.snapshot import Snapshot
from microbatch.training.normalise import Total, added_up, power_of_two
from microbatch.training.ranks.collectives import Collectives
from microbatch.training.ranks.gathering import Gathered, gather
from microbatch.training.ranks.meeting import Meeting, Traffic
from microbatch.training.ranks.one_process import Show
from microbatch.training.ranks.several import MARKED, Several

REHEARSED = 2
"""Items of the first piece of all, which shows the order of the collectives."""


class Sharded(Several):
    """See the module, and `microbatch.training.ranks.one_process.Ranks`.

    FSDP2 then adds gradients up without dividing them: the step divides.
    """

    retries_alone = False
    always_backward = False
    forward_only = False

    def __init__(self, model: nn.Module, group: Any, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self._model, self._device = model, device
        self._meeting = Meeting(_group_of(parameters) if group is None else group, device)
        self._collectives = Collectives(model)
        self.divisor: float | None = None
        self._weight_per_item = 1.0
        self._own, self._most, self._done, self._items = 0, 0, 0, 0
        self._example: Any = None
        self._short: Any = None
        self._outputs: list[tuple[list[Tensor], list[bool]]] = []
        self._roots = prepare(model)
        for root in self._roots:
            assert isinstance(root, nn.Module)
            root.register_forward_hook(self._keep_outputs)

    @property
    def items(self) -> int:
        return self._items

    @contextmanager
    def together(self) -> Iterator[None]:
        self._meeting.traffic = self._collectives.traffic = Traffic()
        with self._telling():
            yield

    def agree(self, batch: Any, sizes: BatchSizes, list_of_samples: bool | None) -> BatchSizes:
        """The smallest size that a rank asks for, and the largest number of pieces that a rank then has.

        Pieces by length are each rank's own; then only their number is agreed.
        """
        items = sizes.global_batch_size
        own = sizes.num_micro_batches if sizes.uneven else None
        said = self._meeting.hold({"items": items, "size": sizes.micro_batch_size, "pieces": own})
        every = [one["items"] for one in said]
        size = min((one["size"] for one in said if one["items"]), default=sizes.micro_batch_size)
        uneven = any(one["pieces"] for one in said)
        numbers = [one["pieces"] or 0 if uneven else -(-one["items"] // size) for one in said]
        self._own, self._most = numbers[self.rank], max(numbers)
        self._done, self._items = 0, sum(every)
        self.divisor = power_of_two(self._items * self._weight_per_item)
        self._example = self._short = None
        if items:
            self._example = _first(batch, items, sizes.pieces[0] if uneven else size, list_of_samples)
            self._short = _first(batch, items, REHEARSED, list_of_samples)
        if self._most and 0 in every:
            source = next(rank for rank, one in enumerate(every) if one)
            theirs = self._meeting.broadcast_object(self._short, source)
            if not items:
                self._example = self._short = theirs
        if not items:
            return BatchSizes(0, size, 0)
        return sizes if uneven else BatchSizes.of(global_batch_size=items, micro_batch_size=size)

    def probe_piece(self, batch: Any, items: int, size: int, list_of_samples: bool | None) -> Any:
        """What this rank runs once at a size that all ranks try: its longest items; another's where it has none."""
        self.agree(batch, BatchSizes(items, size, -(-items // size)), list_of_samples)
        self._own = self._most = 1  # nothing follows a try that fails
        return largest_piece(batch, size, list_of_samples) if items else self._example

    def idle_pieces(self, *, before: bool) -> Iterator[Any]:
        """Before: a small piece on every rank, at the first step. After: as many as other ranks have more."""
        if not self._most or (before and self._collectives.of_a_piece is not None):
            return
        start = Snapshot.take(self._model, self._device)
        for _ in range(1 if before else self._most - self._own):
            yield self._short if before else self._example
        start.restore()
        if before:
            self._done = 0

    @contextmanager
    def piece(self, index: int, number: int) -> Iterator[None]:  # noqa: ARG002
        self._collectives.piece_begins()
        self._outputs = []
        failure: Exception | None = None
        try:
            yield
            self._backward_of_nothing()
        except Exception as error:
            if self._collectives.of_a_piece is None:  # at the rehearsal the order is not known yet
                raise
            failure = error
        self._outputs = []
        if failure is not None:
            self._fail(failure)
        self._collectives.piece_ends()
        self._done += 1

    def meet(self, totals: dict[str, Total], divisor: float | None) -> tuple[dict[str, Total], float | None]:
        """See `Ranks`."""
        said = self._meeting.hold(
            {
                "totals": {name: [total.sum, total.weight] for name, total in totals.items()},
                "divisor": divisor,
            }
        )
        added = added_up([one["totals"] for one in said])
        weight = max((total.weight for total in added.values()), default=0.0)
        if weight and self._items:
            self._weight_per_item = weight / self._items
        self._done = 0
        return added, max((one["divisor"] for one in said if one["divisor"] is not None), default=None)

    def gather(self, note: Any, tensors: Sequence[Tensor]) -> Gathered:
        """See `Ranks`."""
        found = gather(self._meeting, note, tensors)
        self._done = 0
        return found

    def redone_together(self) -> AbstractContextManager[object]:
        """See `Ranks`: here every piece is one of all ranks."""
        return nullcontext()

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sharded gradients are sums already; those of parameters outside of FSDP2 are not."""
        for parameter in parameters:
            if not isinstance(parameter, DTensor):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self._meeting.all_reduce(parameter.grad)

    def share(self, said: dict[str, Any]) -> list[dict[str, Any]]:
        return self._meeting.hold(said)

    def add_up(self, tensor: Tensor) -> Tensor:
        return self._meeting.add_up(tensor)

    def showing_gradients(self, show: Show) -> AbstractContextManager[bool]:
        """See `Ranks`. Gradients of sharded parameters come through FSDP2's collectives."""
        return self._collectives.showing_gradients(show)

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        return gradients.global_norm(parameters)

    def share_found_inf(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Every rank has the same gradients."""

    def _fail(self, error: Exception) -> None:
        """Make the collectives that the others wait for, then raise on every rank."""
        memory, text = is_out_of_memory(error), f"{type(error).__name__}: {error}"
        drop_frames(error)
        gradients.clear(self._model.parameters())  # of whole parameters, where backward had begun
        for root in self._roots:
            root.reset_iter_state()
        gradients.clear(self._model.parameters())
        release(self._device)
        try:
            self._collectives.play_rest()
            for _ in range(self._most - self._done - 1):
                self._collectives.play_piece()
        except RuntimeError:  # there is nobody left to play with: that was the failure
            raise self._meeting.lost(text) from None
        if memory:
            self._meeting.tell_and_raise(text, memory)
        self._meeting.tell(error)
        setattr(error, MARKED, True)
        raise error

    def _keep_outputs(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
        reached: list[bool] = []
        for tensor in tensors:
            tensor.register_hook(lambda _: reached.append(True))
        self._outputs.append((tensors, reached))

    def _backward_of_nothing(self) -> None:
        """Backward with zeros from forwards that no loss has reached: gradients are 0, collectives are made.

        Not from the loss: a mean over no targets has the gradient NaN.
        """
        for tensors, reached in reversed(self._outputs):
            if tensors and not reached:
                torch.autograd.backward(tensors, [torch.zeros_like(tensor) for tensor in tensors])


def prepare(model: nn.Module) -> list[FSDPModule]:
    """Gradients are summed, unused parameters have zeros; the outermost sharded modules."""
    sharded = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    roots: dict[str, FSDPModule] = {}
    for name, module in sharded:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if hasattr(module, "set_reduce_scatter_unused_params"):
            module.set_reduce_scatter_unused_params(True, recurse=False)
        if not any(root == "" or name.startswith(f"{root}.") for root in roots):
            roots[name] = module
    return list(roots.values())


def _group_of(parameters: Sequence[nn.Parameter]) -> Any:
    mesh = next(parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor))
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() == dist.get_world_size():
        return None
    raise InvalidSettings(
        f"The model is on {mesh.size()} of {dist.get_world_size()} processes, in a mesh of {mesh.ndim} axes.",
        "Give the ranks that share its step: process_group=...",
    )


def _first(batch: Any, items: int, size: int, list_of_samples: bool | None) -> Any:
    sizes = [size, items - size] if size < items else [items]
    return next(split(batch, sizes, list_of_samples=list_of_samples))
