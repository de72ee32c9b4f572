"""The critical path has no slack, and what is said to gain gains."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch.pipeline.costs import Costs
from microbatch.pipeline.critical_path import critical_path, what_to_change
from microbatch.pipeline.schedule import Schedule
from microbatch.pipeline.schedules import SCHEDULES
from microbatch.pipeline.simulate import simulate


def uneven(schedule: Schedule, seed: int) -> Costs:
    rng = random.Random(seed)
    forward, inputs, weights, message = ([rng.uniform(0.5, 2) for _ in range(schedule.stages)] for _ in range(4))
    return Costs(forward=forward, input_gradient=inputs, weight_gradient=weights, message=message,
                 per_message=rng.choice((0, 0.2)), overlap=rng.random() < 0.5)  # fmt: skip


@given(name=st.sampled_from(list(SCHEDULES)), count=st.integers(1, 8), seed=st.integers(0, 10**6))
def test_every_step_begins_when_the_one_before_allows(name: str, count: int, seed: int) -> None:
    schedule = Schedule.of(name, ranks=4, num_micro_batches=count)
    costs = uneven(schedule, seed)
    path = critical_path(simulate(schedule, costs))
    assert path[0].start == pytest.approx(0) and path[0].waited_for == "start"
    links = np.append(costs.links(schedule.stages), 0)
    for one, two in pairwise(path):
        gap = two.start - one.end
        link = float(links[min(one.action.stage, two.action.stage)])
        message = link + 2 * costs.per_message
        if two.waited_for == "rank":  # its own messages may keep a rank for a while
            assert one.rank == two.rank and -1e-9 <= gap <= 2 * (max(links) + 2 * costs.per_message) + 1e-9
        elif one.rank != two.rank and not schedule.is_joined.any():
            assert gap == pytest.approx(message)
    assert path[-1].end == pytest.approx(simulate(schedule, costs).makespan)


def test_of_1f1b() -> None:
    path = critical_path(simulate(Schedule.of("one_f_one_b", ranks=2, num_micro_batches=2)))
    assert [str(step.action) for step in path] == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]


def test_the_slow_stage_is_what_to_change() -> None:
    schedule = Schedule.of("one_f_one_b", ranks=4, num_micro_batches=16)
    timeline = simulate(schedule, forward=[1, 1, 2, 1])
    first = what_to_change(timeline)[0]
    assert first.what == "stage 2"
    faster = simulate(schedule, timeline.costs.scaled(2, 0.9, schedule))
    assert first.seconds == pytest.approx(timeline.makespan - faster.makespan)


def test_a_slow_link_is_what_to_change() -> None:
    changes = what_to_change(simulate(Schedule.of("gpipe", ranks=3, num_micro_batches=1), message=[0.1, 9.0]))
    assert changes[0].what == "link 1-2"
    assert changes[0].seconds == pytest.approx(2 * 0.9)
