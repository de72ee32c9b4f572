"""A schedule to measure with: F, I, W and full backwards of every stage in one step."""

from __future__ import annotations

import numpy as np

from microbatch.pipeline.schedule import BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Schedule, prove


def mixed(schedule: Schedule) -> Schedule:
    """The same order, where every second micro-batch's full backward is an input and a weight gradient.

    So one step times all four kinds of actions, for schedules that use either. Micro-batches 1, 3, 5 and so on are
    split; what is split already stays, and so does a schedule of one micro-batch.
    """
    orders = []
    for rank, order in enumerate(schedule.orders):
        places = slice(int(schedule.offsets[rank]), int(schedule.offsets[rank + 1]))
        split = (schedule.kind[places] == BACKWARD) & (schedule.micro_batch[places] % 2 == 1)
        doubled = np.repeat(order, np.where(split, 2, 1))
        second = np.cumsum(np.where(split, 2, 1))[split] - 1
        doubled[second] += WEIGHT_GRADIENT - BACKWARD
        doubled[second - 1] += INPUT_GRADIENT - BACKWARD
        orders.append(doubled)
    return prove(
        f"{schedule.name}, half split", schedule.num_micro_batches, schedule.placements, orders, schedule.directions
    )
