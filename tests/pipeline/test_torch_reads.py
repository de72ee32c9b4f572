"""torch's own lowering takes our orders: it places every send and receive, and its simulator runs to the end."""

from __future__ import annotations

import csv
import io

import pytest

from microbatch.pipeline.schedule import Schedule
from microbatch.pipeline.schedules import SCHEDULES

EXECUTABLE = [name for name in SCHEDULES if name not in ("dualpipe", "chimera")]


@pytest.mark.parametrize("name", EXECUTABLE)
def test_torch_lowers_our_orders(name: str) -> None:
    from torch.distributed.pipelining import schedules as torchs

    for ranks, count in ((2, 3), (4, 8)):
        schedule = Schedule.of(name, ranks=ranks, num_micro_batches=count)
        rows = list(csv.reader(io.StringIO(schedule.to_csv())))
        actions = {rank: [torchs._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
        assert [[str(action) for action in row] for row in actions.values()] == rows
        lowered = torchs._add_send_recv(
            {rank: list(row) for rank, row in actions.items()}, schedule.placement.__getitem__, schedule.stages
        )
        ran = [action for row in lowered.values() for action in row if action.is_compute_op]
        assert len(ran) == sum(len(row) for row in rows)


@pytest.mark.parametrize("name", [name for name, row in SCHEDULES.items() if row.torch])
def test_the_class_of_torch_exists(name: str) -> None:
    from torch.distributed.pipelining import schedules as torchs

    assert hasattr(torchs, SCHEDULES[name].torch)
