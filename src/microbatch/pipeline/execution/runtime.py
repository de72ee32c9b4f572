"""Our orders on torch's runtime: a schedule's own CSV is what torch loads, and torch adds the messages."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.distributed.pipelining.schedules import (
    _Action,
    _add_reduce_grad,
    _add_send_recv,
    _add_unshard_reshard,
    _PipelineScheduleRuntime,
)

from microbatch.errors import InvalidSchedule
from microbatch.pipeline.execution.stage import Stage
from microbatch.pipeline.placement import Placement, stages_of
from microbatch.pipeline.schedule import FORWARD, Schedule, encode, prove


class Runtime(_PipelineScheduleRuntime):
    """torch's, without its own run of the stages to learn shapes: they are known."""

    def _initialize_stages(self, *_: Any, **__: Any) -> None:
        """Nothing to learn."""

    def load(self, schedule: Schedule) -> None:
        """Take an order, as torch does, but for its check: ours was proved, and torch's knows no forward-only one."""
        rows = csv.reader(io.StringIO(schedule.to_csv()))
        actions = {
            rank: _add_reduce_grad(
                _add_unshard_reshard([_Action.from_str(cell) for cell in row]),  # type: ignore[arg-type]
                schedule.num_micro_batches,
            )
            for rank, row in enumerate(rows)
        }
        self.stage_index_to_group_rank = dict(enumerate(schedule.placement))
        self.pipeline_order_with_comms = _add_send_recv(
            actions,  # type: ignore[arg-type]
            stage_to_rank=schedule.placement.__getitem__,
            num_stages=schedule.stages,
        )

    def go(self) -> None:
        """One run over what the stages were given."""
        self._step_microbatches(return_outputs=False)


def lowered(schedule: Schedule, stages: Sequence[Stage]) -> Runtime:
    """The runtime of an order, for the stages of this rank.

    Raises:
        InvalidSchedule: an order that torch's runtime cannot run.
    """
    if schedule.only_simulated:
        raise InvalidSchedule(f"{schedule.name}: {schedule.only_simulated}", "Choose another schedule to run.")
    runtime = Runtime(  # type: ignore[no-untyped-call]
        list(stages), schedule.num_micro_batches, loss_fn=None, scale_grads=False
    )
    runtime.load(schedule)
    return runtime


def forwards(placement: Placement, count: int) -> Schedule:
    """Forwards only, for any placement: groups of p micro-batches through all stages of a rank, then the next group.

    All ranks follow one common order in which each action stands behind what it needs, so that none waits in a circle.
    """
    ranks = 1 + max(placement)
    orders = []
    for rank in range(ranks):
        codes = [
            encode(FORWARD, stage, np.arange(first, min(first + ranks, count)), count)
            for first in range(0, count, ranks)
            for stage in stages_of(placement, rank)
        ]
        orders.append(np.concatenate(codes))
    return prove("forward_only", count, (placement,), orders)
