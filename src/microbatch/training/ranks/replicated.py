"""Ranks with a replica of the model each, in DistributedDataParallel or plain: one reduction per step.

No piece communicates, so ranks may cut their batches differently, have none, or redo theirs alone after running out
of memory. When a rank's pieces are done it comes to the meeting, which adds up sums and weights; then the gradients
of the whole step are added up once, in buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from microbatch.batch.oom import drop_frames, is_out_of_memory
from microbatch.errors import InvalidModel, RankFailed
from microbatch.sizes import BatchSizes
from microbatch.training import gradients
from microbatch.training.normalise import Total, added_up
from microbatch.training.ranks.buckets import BUCKET_BYTES, dtype_of_sum, in_buckets, reduce_bucket, whole_gradient
from microbatch.training.ranks.gathering import Gathered, gather
from microbatch.training.ranks.meeting import Meeting, Traffic
from microbatch.training.ranks.one_process import Show
from microbatch.training.ranks.several import Several


class Replicated(Several):
    """See the module, and `microbatch.training.ranks.one_process.Ranks`."""

    retries_alone = True
    always_backward = False
    forward_only = True
    divisor: float | None = None

    def __init__(self, model: nn.Module, group: Any, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self._model, self._parameters = model, parameters
        self._ddp = next((m for m in model.modules() if isinstance(m, DistributedDataParallel)), None)
        self._meeting = Meeting(group, device)
        self._buckets: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._held: list[list[Any]] = []
        self._next = 0
        self._own_items = self.items = 0
        self._factor = 1.0
        self._versions: list[tuple[int, int]] = []

    @contextmanager
    def together(self) -> Iterator[None]:
        self._meeting.traffic = Traffic()
        self._held, self._next = [], 0
        self._versions = self._buffer_versions()
        with self._telling():
            yield

    def agree(self, batch: Any, sizes: BatchSizes, list_of_samples: bool | None) -> BatchSizes:  # noqa: ARG002
        """This rank's own sizes: the weights are global, so it does not matter how a rank cuts."""
        self._next = 0
        self._own_items = sizes.global_batch_size
        return sizes

    def idle_pieces(self, *, before: bool) -> Iterator[Any]:  # noqa: ARG002
        return iter(())

    def piece(self, index: int, number: int) -> AbstractContextManager[object]:  # noqa: ARG002
        if self._ddp is None:
            return nullcontext()
        self._ddp.require_forward_param_sync = False  # its buffers are broadcast once per step, below
        return self._ddp.no_sync()

    def meet(self, totals: dict[str, Total], divisor: float | None) -> tuple[dict[str, Total], float | None]:
        """See `Ranks`. A rank that redoes its pieces hears again what was said at the meetings that it was at."""
        parameters = self._trained()
        if self._next == len(self._held):
            self._allocate(parameters)  # what does not fit fails here, where it can be redone alone
            self._held.append(
                self._meeting.hold(
                    {
                        "totals": {name: [total.sum, total.weight] for name, total in totals.items()},
                        "divisor": divisor,
                        "items": self._own_items,
                        "gradients": _marks(p.grad is not None for p in parameters),
                        "model": [len(parameters), sum(p.numel() for p in parameters)],
                        "buffers": _marks(a != b for a, b in zip(self._versions, self._buffer_versions(), strict=True)),
                    }
                )
            )
        said = self._held[self._next]
        self._next += 1
        _check_same_model([one["model"] for one in said])
        self.items = sum(one["items"] for one in said)
        divisors = [one["divisor"] for one in said if one["divisor"] is not None]
        common = max(divisors, default=None)
        self._factor = 1.0 if divisor is None or common is None else divisor / common
        return added_up([one["totals"] for one in said]), common

    def gather(self, note: Any, tensors: Sequence[Tensor]) -> Gathered:
        """See `Ranks`."""
        if self._next == len(self._held):
            self._held.append(gather(self._meeting, note, tensors))
        self._next += 1
        return self._held[self._next - 1]

    @contextmanager
    def redone_together(self) -> Iterator[None]:
        """See `Ranks`. What was said before then no longer holds: smaller pieces draw other random numbers."""
        failure: Exception | None = None
        try:
            yield
        except RankFailed:
            self._held, self._next = [], 0
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = error
        if failure is not None:
            self._held, self._next = [], 0
            drop_frames(failure)
            self._meeting.tell(failure, memory=True)
            raise failure

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Ranks`. A gradient that no rank has stays None, one that some have is a sum on all."""
        said = self._held[self._next - 1]
        used = _on_any([one["gradients"] for one in said])
        if self._factor != 1.0:
            gradients.scale(parameters, self._factor)
        by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter, is_used in zip(parameters, used, strict=True):
            if is_used:
                gradient = whole_gradient(parameter)
                by_kind.setdefault((gradient.dtype, gradient.device), []).append(gradient)
        for kind, tensors in by_kind.items():
            for bucket in in_buckets(tensors):
                reduce_bucket(self._meeting, bucket, self._buckets[kind])
        self._share_buffers(_on_any([one["buffers"] for one in said]))

    def share(self, said: dict[str, Any]) -> list[dict[str, Any]]:
        return self._meeting.hold(said)

    def add_up(self, tensor: Tensor) -> Tensor:
        return self._meeting.add_up(tensor)

    def showing_gradients(self, show: Show) -> AbstractContextManager[bool]:  # noqa: ARG002
        return nullcontext(True)

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        return gradients.global_norm(parameters)

    def share_found_inf(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Every rank has the same gradients."""

    def _allocate(self, parameters: Iterable[nn.Parameter]) -> None:
        """Room for one bucket of each kind, kept from step to step."""
        needed: dict[tuple[torch.dtype, torch.device], int] = {}
        for parameter in parameters:
            kind = (dtype_of_sum(parameter), parameter.device)
            needed[kind] = needed.get(kind, 0) + parameter.numel()
        for (dtype, device), numel in needed.items():
            if (dtype, device) not in self._buckets:
                size = max(min(numel, BUCKET_BYTES // dtype.itemsize), 1)
                self._buckets[dtype, device] = torch.empty(size, dtype=dtype, device=device)

    def _share_buffers(self, changed: list[bool]) -> None:
        """The buffers that a step changed (running statistics) become the first rank's, as under DDP."""
        if self._ddp is not None and not self._ddp.broadcast_buffers:
            return
        for buffer, has_changed in zip(self._model.buffers(), changed, strict=True):
            if has_changed:
                self._meeting.broadcast(buffer.detach())

    def _buffer_versions(self) -> list[tuple[int, int]]:
        return [(id(buffer), buffer._version) for buffer in self._model.buffers()]

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._parameters if parameter.requires_grad]


def _marks(flags: Iterable[bool]) -> str:
    return "".join("1" if flag else "0" for flag in flags)


def _on_any(marks: Sequence[str]) -> list[bool]:
    return ["1" in column for column in zip(*marks)]


def _check_same_model(models: list[list[int]]) -> None:
    if any(model != models[0] for model in models):
        listed = ", ".join(f"rank {rank} {numbers[0]} of {numbers[1]}" for rank, numbers in enumerate(models))
        raise InvalidModel(
            f"The ranks train different parameters (tensors of elements): {listed}.",
            "Build the same model and freeze the same parameters on every rank.",
        )
