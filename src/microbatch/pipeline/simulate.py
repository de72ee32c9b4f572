"""When each action of a schedule starts and ends, given what actions and messages cost. No torch, no clock.

Each rank works through its actions in order and starts each as soon as it is free and what the action needs has
arrived. A pair that runs as one starts when both of its parts can, and sends both results at its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from microbatch.errors import InvalidCosts
from microbatch.pipeline.costs import Costs, Floats
from microbatch.pipeline.schedule import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Schedule
from microbatch.pipeline.timeline import Timeline


def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    forward: ArrayLike = 1.0,
    input_gradient: ArrayLike = 1.0,
    weight_gradient: ArrayLike = 1.0,
    message: ArrayLike = 0.0,
    memory_limit: float | None = None,
    memory_limit_bytes: int | None = None,
) -> Timeline:
    """The time axis of one step.

    Args:
        schedule: as `Schedule.of` or `Schedule.from_csv` give it.
        costs: everything that can cost something. The next four are short for `Costs` with only them.
        forward: seconds of F, one number or one per stage.
        input_gradient: of I.
        weight_gradient: of W.
        message: travel time over the link behind each stage.
        memory_limit: most activations of a rank, in micro-batches on one rank's layers.
        memory_limit_bytes: most bytes of a rank.

    Raises:
        InvalidCosts: values that do not fit the schedule's stages, or that are negative.

    >>> simulate(Schedule.of("one_f_one_b", ranks=4, num_micro_batches=8)).bubble_over_ideal
    0.375
    """
    given = costs or Costs(
        forward=forward, input_gradient=input_gradient, weight_gradient=weight_gradient, message=message
    )
    if memory_limit_bytes is not None and given.activation_bytes is None:
        raise InvalidCosts(
            f"A limit of {memory_limit_bytes} bytes says nothing about activations whose size is unknown.",
            "Give activation_bytes, or a memory_limit in micro-batches.",
        )
    start, end = time_actions(schedule, given)
    return Timeline(
        schedule=schedule,
        costs=given,
        start=start,
        end=end,
        memory_limit=memory_limit,
        memory_limit_bytes=memory_limit_bytes,
    )


@dataclass(frozen=True, slots=True)
class Waits:
    """What each action costs its rank and its reader, in the order of the schedule.

    Attributes:
        work: seconds of the action.
        travel: from its end until what it needs has come, for the action that needs something.
        receive: seconds of its rank's own time before it starts.
        send: seconds of its rank's own time after its end.
    """

    work: Floats
    travel: Floats
    receive: Floats
    send: Floats


def waits_of(schedule: Schedule, costs: Costs) -> Waits:
    """The costs of all actions at once."""
    work = np.empty(len(schedule))
    for kind in (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, BACKWARD):
        chosen = schedule.kind == kind
        if chosen.any():
            work[chosen] = costs.times(kind, schedule)[schedule.stage[chosen], schedule.micro_batch[chosen]]
    if costs.pair != 1.0 and not costs.pairs_apart:
        work[_in_pairs(schedule)] *= costs.pair
    crosses = schedule.crosses()
    link = np.where(schedule.kind == FORWARD, schedule.stage - 1, schedule.stage)
    travel = np.zeros(len(schedule))
    if schedule.stages > 1:
        travel[crosses] = costs.links(schedule.stages)[link[crosses]]
    receive = np.where(crosses, costs.per_message, 0.0)
    send = np.zeros(len(schedule))
    senders = schedule.needs[crosses]
    send[senders] = costs.per_message + (0.0 if costs.overlap else travel[crosses])
    travel[crosses] += costs.per_message
    return Waits(work, travel, receive, send)


def _in_pairs(schedule: Schedule) -> np.ndarray:
    first = schedule.is_joined
    return np.asarray(first | np.concatenate(([False], first[:-1])))


def time_actions(schedule: Schedule, costs: Costs) -> tuple[Floats, Floats]:
    """Start and end of every action. One pass over the turns that proved the schedule free of deadlock."""
    waits = waits_of(schedule, costs)
    together = schedule.is_joined.any() and not costs.pairs_apart
    passing = _pass_with_pairs if together else _pass
    end = np.asarray(passing(schedule, waits))
    return end - waits.work, end


def _pass(schedule: Schedule, waits: Waits) -> list[float]:
    needs, travel = schedule.needs.tolist(), waits.travel.tolist()
    before, after = (waits.receive + waits.work).tolist(), waits.send.tolist()
    rank = schedule.rank.tolist()
    free = [0.0] * schedule.ranks
    end = [0.0] * len(needs)
    for index in schedule.turns:
        here = rank[index]
        ready = free[here]
        needed = needs[index]
        if needed >= 0:
            arrival = end[needed] + travel[index]
            if arrival > ready:
                ready = arrival
        ready += before[index]
        end[index] = ready
        free[here] = ready + after[index]
    return end


def _pass_with_pairs(schedule: Schedule, waits: Waits) -> list[float]:
    """The same where two actions may run as one: both needs first, both results at the end of the second."""
    needs, travel, work = schedule.needs.tolist(), waits.travel.tolist(), waits.work.tolist()
    receive, send = waits.receive.tolist(), waits.send.tolist()
    rank, is_joined = schedule.rank.tolist(), schedule.is_joined.tolist()
    free = [0.0] * schedule.ranks
    end, leaves = [0.0] * len(needs), [0.0] * len(needs)
    second_of_pair = False
    for index in schedule.turns:
        here = rank[index]
        ready = free[here]
        if not second_of_pair:
            parts = (index, index + 1) if is_joined[index] else (index,)
            for part in parts:
                if needs[part] >= 0:
                    ready = max(ready, leaves[needs[part]] + travel[part])
            ready += sum(receive[part] for part in parts)
        end[index] = leaves[index] = free[here] = ready + work[index]
        if second_of_pair:
            leaves[index - 1] = end[index]
            free[here] += send[index - 1] + send[index]
        elif not is_joined[index]:
            free[here] += send[index]
        second_of_pair = is_joined[index]
    return end
