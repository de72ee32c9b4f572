"""Every row of the table of schedules at many sizes."""

from __future__ import annotations

from microbatch.pipeline.schedule import Schedule
from microbatch.pipeline.schedules import SCHEDULES


def sizes_of(name: str, ranks: range = range(1, 6), counts: tuple[int, ...] = (1, 2, 3, 5, 8, 11)) -> list[Schedule]:
    """The schedule at each size that makes sense for it."""
    row = SCHEDULES[name]
    chunks = row.only[:2] or (1, 2, 3)
    return [
        Schedule.of(name, ranks=p, num_micro_batches=m, chunks=v)
        for p in ranks
        if not (row.even and p % 2)
        for m in counts
        for v in chunks
    ]
