"""Ranks with some stages of the model each: all micro-batches of a step run in one schedule.

Every rank of a pipeline is given the same batch, or None where another rank has it; replicas of the pipeline have
batches of their own. Sums and weights are those of the last stages. The number that sums are divided by until the
weights are known is agreed before the step, so that gradients of all ranks have one scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from microbatch.errors import InvalidBatch, InvalidModel, InvalidSettings
from microbatch.pipeline.execution import failures
from microbatch.pipeline.execution.pipeline import Pipeline
from microbatch.pipeline.execution.sharing import fingerprint, from_rank, source_of
from microbatch.sizes import BatchSizes
from microbatch.training import gradients
from microbatch.training.normalise import Total, added_up, power_of_two
from microbatch.training.ranks.buckets import in_buckets, reduce_bucket, whole_gradient
from microbatch.training.ranks.gathering import Gathered
from microbatch.training.ranks.meeting import Meeting, Traffic
from microbatch.training.ranks.one_process import Show
from microbatch.training.ranks.several import Several
from microbatch.training.ranks.sharded import prepare

Columns = dict[int, list[dict[str, Any]]]
"""What the ranks of each pipeline said, by replica."""


class Pipelined(Several):
    """See the module, and `microbatch.training.ranks.one_process.Ranks`.

    Attributes:
        wanted: micro-batches of a step; ``"auto"`` as long as nobody has chosen.
        largest: most items of a micro-batch that fit; None where nothing is known.
    """

    retries_alone = False
    always_backward = False
    forward_only = True

    def __init__(self, pipe: Pipeline, num_micro_batches: int | str | None) -> None:
        self._pipe = pipe
        self.wanted = pipe.num_micro_batches if num_micro_batches is None else num_micro_batches
        self.largest: int | None = None
        layout = pipe.layout
        self._meeting = Meeting(layout.every, layout.device)
        self._data = None if layout.data is None else Meeting(layout.data, layout.device)
        self._weight_per_item = 1.0
        self._source: int | None = None
        self.divisor: float | None = None
        self.items = self.seed = 0
        for stage in pipe.stages:
            prepare(stage.module)  # FSDP2 adds up without dividing

    @contextmanager
    def together(self) -> Iterator[None]:
        self._meeting.traffic = Traffic()
        if self._data is not None:
            self._data.traffic = self._meeting.traffic
        with self._telling(), failures.stepping(self._pipe):
            yield

    def agree(self, batch: Any, sizes: BatchSizes, list_of_samples: bool | None) -> BatchSizes:  # noqa: ARG002
        """How the batch of this pipeline is cut: as many micro-batches as were asked for, more where memory ran out.

        Raises:
            InvalidBatch: ranks of one pipeline were given different batches.
            InvalidModel: no rank has anything to train.
        """
        place = self._pipe.layout.replica, self._pipe.rank
        said = self._meeting.hold(
            {
                "place": place,
                "items": sizes.global_batch_size,
                "print": fingerprint(batch) if sizes.global_batch_size else None,
                "pieces": list(sizes.uneven) if sizes.uneven else sizes.num_micro_batches,
                "trained": self._pipe.trained(),
                "seed": int(torch.randint(2**31, ())),
                "sharded": self.shards,
            }
        )
        columns = _columns(said)
        self.seed = columns[place[0]][0]["seed"]
        self._source = source_of([one["print"] for one in columns[place[0]]])
        for column in columns.values():  # so that every rank raises what one would
            source_of([one["print"] for one in column])
        if not any("1" in one["trained"] for one in said):
            raise InvalidModel("Every parameter of every stage is frozen.", "Set requires_grad of one to True.")
        self._pipe.train_only([one["trained"] for one in columns[place[0]]])
        items = {replica: max(one["items"] for one in column) for replica, column in columns.items()}
        self.items = sum(items.values())
        self.divisor = power_of_two(self.items * self._weight_per_item)
        return self._cut(columns, items, sharded=any(one["sharded"] for one in said))

    def _cut(self, columns: Columns, items: Mapping[int, int], *, sharded: bool) -> BatchSizes:
        """Sizes of this pipeline's pieces; replicas may have different numbers of them unless they share shards."""
        least = min((count for count in items.values() if count), default=0)
        counts = {}
        for replica, column in columns.items():
            asked = next((one["pieces"] for one in column if one["items"]), 0)
            counts[replica] = self._count(asked, least if sharded else items[replica]) if items[replica] else 0
        if sharded and len(set(counts.values())) > 1:
            listed = ", ".join(f"replica {replica} {count}" for replica, count in counts.items())
            raise InvalidBatch(
                f"Stages are sharded over replicas, which need the same number of micro-batches: {listed}.",
                "Give each replica an item at least, and pieces of one number.",
            )
        mine = self._pipe.layout.replica
        if not items[mine]:
            return BatchSizes(0, 1, 0)
        asked = next(one["pieces"] for one in columns[mine] if one["items"])
        if isinstance(asked, list):
            return BatchSizes.of(uneven=asked)
        return BatchSizes.of(global_batch_size=items[mine], num_micro_batches=counts[mine])

    def _count(self, asked: int | list[int], items: int) -> int:
        if isinstance(asked, list):
            return len(asked)
        wanted = self._pipe.ordering.count_of(items, self.wanted)
        fitting = 1 if self.largest is None else -(-items // self.largest)
        return wanted if self._pipe.ordering.own is not None else min(items, max(wanted, asked, fitting))

    @property
    def is_open(self) -> bool:
        """Whether somebody has still to choose the number of micro-batches."""
        return self.wanted == "auto" and self._pipe.ordering.own is None

    @contextmanager
    def cut_into(self, number: int) -> Iterator[None]:
        """So many micro-batches meanwhile."""
        before, self.wanted = self.wanted, number
        try:
            yield
        finally:
            self.wanted = before

    def of_all(self, batch: Any) -> Any:
        """The pipeline's batch, on every rank of it."""
        return batch if self._source is None else from_rank(batch, self._source, self._pipe.layout)

    def ready(self) -> None:
        """All ranks have what they need for the schedule; one that failed says so here, before any waits for it."""
        self._meeting.hold({})

    def idle_pieces(self, *, before: bool) -> Iterator[Any]:  # noqa: ARG002
        return iter(())

    def piece(self, index: int, number: int) -> AbstractContextManager[object]:  # noqa: ARG002
        return nullcontext()

    def meet(self, totals: dict[str, Total], divisor: float | None) -> tuple[dict[str, Total], float | None]:
        """See `Ranks`. The sums are those of the last stages; of ranks that share a batch one counts."""
        mine = self._pipe.holds_last and self._pipe.layout.counts
        said = self._meeting.hold(
            {"totals": {name: [total.sum, total.weight] for name, total in totals.items()} if mine else {}}
        )
        added = added_up([one["totals"] for one in said])
        weight = max((total.weight for total in added.values()), default=0.0)
        if weight and self.items:
            self._weight_per_item = weight / self.items
        return added, divisor

    def gather(self, note: Any, tensors: Sequence[Tensor]) -> Gathered:  # noqa: ARG002
        raise InvalidSettings("A joint loss needs two passes over all outputs.", "Train without a pipeline, or joint=.")

    def redone_together(self) -> AbstractContextManager[object]:
        return nullcontext()

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Over replicas of the pipeline, then over the copies of tied weights."""
        if self._data is not None:
            self._over_replicas([p for p in parameters if not isinstance(p, DTensor) or not self.shards])
        self._pipe.reduce_tied()

    def share(self, said: dict[str, Any]) -> list[dict[str, Any]]:
        return self._meeting.hold(said)

    def add_up(self, tensor: Tensor) -> Tensor:
        return self._meeting.add_up(tensor)

    def showing_gradients(self, show: Show) -> AbstractContextManager[bool]:  # noqa: ARG002
        return nullcontext(False)

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Of the gradients of all stages; a tied weight counts once."""
        again = {id(self._pipe.parameter(one.name)) for one in self._pipe.tied if not one.counts}
        own = gradients.global_norm([parameter for parameter in parameters if id(parameter) not in again])
        square = own.detach().to(self._pipe.device, torch.float64).square().reshape(1)
        dist.all_reduce(square, group=self._pipe.group)
        return square.sqrt()[0].to(own.dtype if own.is_floating_point() else torch.float32)

    def over_replicas(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks that hold the same stages."""
        return tensor if self._data is None else self._data.add_up(tensor)

    def share_found_inf(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """A gradient that is not finite on one rank counts on all."""
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        if not found:
            found[self._pipe.device] = torch.zeros((), device=self._pipe.device)
        for one in found.values():
            self._meeting.all_reduce(one)

    @property
    def shards(self) -> bool:
        """Whether stages are sharded over replicas, by FSDP2."""
        return any(isinstance(stage.module, FSDPModule) for stage in self._pipe.stages)

    def _over_replicas(self, parameters: Sequence[nn.Parameter]) -> None:
        """A gradient that no replica has stays None; one that some have is a sum on all."""
        assert self._data is not None
        if not parameters:
            return
        used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.float32)
        used = used.to(self._pipe.device)
        self._data.all_reduce(used)
        by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter, is_used in zip(parameters, used.tolist(), strict=True):
            if is_used:
                gradient = whole_gradient(parameter)
                local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
                by_kind.setdefault((local.dtype, local.device), []).append(local)
        for tensors in by_kind.values():
            for bucket in in_buckets(tensors):
                reduce_bucket(self._data, bucket)


def _columns(said: Sequence[dict[str, Any]]) -> Columns:
    """What the ranks of each pipeline said, in their order; of ranks that share a place the first."""
    columns: dict[int, dict[int, dict[str, Any]]] = {}
    for one in said:
        replica, rank = one["place"]
        column = columns.setdefault(replica, {})
        known = {one["print"], column.get(rank, one)["print"]} - {None}
        if len(known) > 1:
            raise InvalidBatch(
                f"Two ranks that share stage {rank} of a pipeline were given different batches.",
                "Give all ranks of a pipeline the same batch.",
            )
        column.setdefault(rank, one)
    return {replica: [column[rank] for rank in sorted(column)] for replica, column in sorted(columns.items())}
