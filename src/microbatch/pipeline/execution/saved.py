"""What forwards keep for their backwards: bytes by stage and micro-batch, counted while a pipeline runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

from microbatch.pipeline.execution.measuring import recorder_of
from microbatch.pipeline.execution.shapes import tensors_of
from microbatch.pipeline.schedule import FORWARD, Action

if TYPE_CHECKING:
    from microbatch.pipeline.execution.pipeline import Pipeline

Bytes = dict[int, int]


@contextmanager
def counting_saved(pipe: Pipeline) -> Iterator[Bytes]:
    """Bytes of one micro-batch by stage of this rank, the largest that ran, known afterwards.

    Storages that autograd keeps count once, those of weights and of the batch not; what goes to the next stage is kept
    as well.
    """
    recorder, stages = recorder_of(pipe), {stage.index: stage for stage in pipe.stages}
    kept: dict[Action, dict[int, int]] = defaultdict(dict)
    others: dict[Action, set[int]] = {}

    def pack(tensor: Tensor) -> Any:
        action = recorder.action
        if action is not None and action.kind == FORWARD:
            if action not in others:  # weights are gathered for this forward, where they are sharded
                stage = stages[action.stage]
                given = tensors_of(stage.run.calls[action.micro_batch].members)
                others[action] = {_place(one) for one in [*stage.part.parameters(), *given]}
            if _place(tensor) not in others[action]:
                kept[action][_place(tensor)] = _storage(tensor).nbytes()
        return tensor.detach()  # not itself: it would keep its own graph alive

    found: Bytes = dict.fromkeys(stages, 0)
    with saved_tensors_hooks(pack, lambda packed: packed):
        yield found
    for action, storages in kept.items():
        found[action.stage] = max(found[action.stage], sum(storages.values()))
    for stage in stages:
        found[stage] += _sent_by(pipe, stage)


def _storage(tensor: Tensor) -> UntypedStorage:
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.untyped_storage()


def _place(tensor: Tensor) -> int:
    return _storage(tensor).data_ptr()


def _sent_by(pipe: Pipeline, stage: int) -> int:
    plans = () if pipe.last is None else pipe.last.plans
    if stage == len(pipe.placement) - 1:
        return 0
    return max((sum(meta.nbytes for meta in plan.messages[stage]) for plan in plans), default=0)
