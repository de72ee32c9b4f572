"""Timelines and costs of steps that were measured: here of steps whose times are planted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from microbatch.errors import InvalidCosts, NoAnswer
from microbatch.pipeline.costs import Costs
from microbatch.pipeline.measured import RankTimes, measured_costs, measured_timeline
from microbatch.pipeline.mixed import mixed
from microbatch.pipeline.schedule import BACKWARD, INPUT_GRADIENT, Schedule
from microbatch.pipeline.simulate import simulate

FORWARD, INPUT, WEIGHT, FULL = [1.0, 1.3, 0.9, 1.1], [0.8, 1.2, 1.0, 0.9], [0.7, 0.6, 0.8, 1.0], [1.4, 1.7, 1.6, 1.8]
PLANTED = Costs(
    forward=FORWARD, input_gradient=INPUT, weight_gradient=WEIGHT, full_backward=FULL, message=[0.2, 0.1, 0.3],
    per_message=0.02, pairs_apart=True,
)  # fmt: skip


def step(
    schedule: Schedule, costs: Costs = PLANTED, shift: tuple[float, ...] = (), clocks: str = ""
) -> list[RankTimes]:
    """What the ranks would note down, each by its own clock."""
    timeline = simulate(schedule, costs)
    ranks = []
    for rank in range(schedule.ranks):
        places = schedule.of_rank(rank)
        late = shift[rank] if shift else 0.0
        ranks.append(
            RankTimes(
                clock=clocks[rank] if clocks else "one",
                actions=tuple((one.stage, one.kind, one.micro_batch) for one in map(schedule.action, places)),
                start=tuple(float(timeline.start[place]) + late for place in places),
                end=tuple(float(timeline.end[place]) + late for place in places),
            )
        )
    return ranks


def of(name: str, count: int = 8, ranks: int = 4, chunks: int | None = None) -> Schedule:
    return Schedule.of(name, ranks=ranks, num_micro_batches=count, chunks=chunks)


@pytest.mark.parametrize("name", ["one_f_one_b", "gpipe", "zb_h1"])
def test_a_step_comes_back_as_it_was(name: str) -> None:
    schedule = of(name)
    planted = simulate(schedule, PLANTED)
    found = measured_timeline(schedule, step(schedule))
    np.testing.assert_allclose(found.start, planted.start, atol=1e-12)
    np.testing.assert_allclose(found.end, planted.end, atol=1e-12)
    assert found.source == "measured"
    assert found.beside is not None and found.beside.source == "simulated"
    assert found.predicted.makespan == pytest.approx(planted.makespan, rel=1e-9)


def test_the_order_in_which_ranks_note_does_not_matter() -> None:
    schedule = of("zb_h1")
    mixed_up = [
        replace(one, actions=one.actions[::-1], start=one.start[::-1], end=one.end[::-1]) for one in step(schedule)
    ]
    np.testing.assert_allclose(measured_timeline(schedule, mixed_up).end, simulate(schedule, PLANTED).end, atol=1e-12)


@pytest.mark.parametrize("shift", [(0.0, 1e4, -3.7, 55.5), (9.0, 0.0, 1e6, -1e6)])
def test_clocks_of_other_machines_are_moved_until_no_message_is_early(shift: tuple[float, ...]) -> None:
    """Links that are as slow both ways leave no doubt about the offset but half of their difference."""
    schedule = of("one_f_one_b")
    found = measured_timeline(schedule, step(schedule, shift=shift, clocks="abcd"))
    wanted = simulate(schedule, PLANTED)
    crossing = schedule.crosses()
    assert (found.start[crossing] >= found.end[schedule.needs[crossing]] - 1e-9).all()
    np.testing.assert_allclose(found.start, wanted.start, atol=2.0)
    assert found.makespan == pytest.approx(wanted.makespan, rel=0.1)


def test_links_that_are_as_slow_both_ways_leave_no_doubt() -> None:
    """One message there and one back, each waited for: the middle of what they allow is the offset itself."""
    schedule = of("one_f_one_b", 1, 2)
    costs = Costs(forward=1.0, full_backward=2.0, message=0.25)
    found = measured_timeline(schedule, step(schedule, costs, shift=(3.0, -40.0), clocks="ab"))
    np.testing.assert_allclose(found.start, simulate(schedule, costs).start, atol=1e-9)


def test_ranks_of_one_machine_keep_their_clock() -> None:
    """Rank 3 shares the clock of rank 2, and ranks 0 and 1 theirs."""
    schedule = of("one_f_one_b")
    found = measured_timeline(schedule, step(schedule, shift=(0.0, 0.0, 70.0, 70.0), clocks="aabb"))
    wanted = simulate(schedule, PLANTED)
    for first in (0, 2):
        places = slice(int(schedule.offsets[first]), int(schedule.offsets[first + 2]))
        moved = found.start[places] - wanted.start[places]
        np.testing.assert_allclose(moved, moved[0], atol=1e-9)


def test_costs_are_read_off_a_step_with_both_kinds_of_backwards() -> None:
    schedule = mixed(of("one_f_one_b", 16))
    costs = measured_costs(simulate(schedule, PLANTED))
    for name, wanted in (("forward", FORWARD), ("input_gradient", INPUT), ("weight_gradient", WEIGHT),
                         ("full_backward", FULL)):  # fmt: skip
        np.testing.assert_allclose(costs.per_stage(name, 4), wanted, rtol=1e-9)
    assert costs.per_message == pytest.approx(0.02, rel=1e-6)
    np.testing.assert_allclose(costs.links(4), [0.2, 0.1, 0.3], atol=1e-6)


def test_costs_of_one_order_predict_the_others() -> None:
    costs = measured_costs(simulate(mixed(of("one_f_one_b", 4)), PLANTED))
    for name in ("gpipe", "one_f_one_b", "zb_h1", "zb_h2"):
        for count in (4, 8, 16):
            wanted = simulate(of(name, count), PLANTED).makespan
            assert simulate(of(name, count), costs).makespan == pytest.approx(wanted, rel=0.01)


def test_full_backwards_alone_are_halved() -> None:
    costs = measured_costs(simulate(of("gpipe"), PLANTED))
    np.testing.assert_allclose(costs.per_stage("full_backward", 4), FULL)
    np.testing.assert_allclose(costs.per_stage("weight_gradient", 4), np.asarray(FULL) / 2)


def test_split_backwards_alone_are_joined() -> None:
    costs = measured_costs(simulate(of("zb_h1"), PLANTED))
    assert costs.full_backward is None
    np.testing.assert_allclose(costs.per_stage("input_gradient", 4), INPUT)


def test_forwards_alone() -> None:
    schedule = of("forward_only")
    found = measured_timeline(schedule, step(schedule))
    np.testing.assert_allclose(found.costs.per_stage("forward", 4), FORWARD)
    assert found.predicted.makespan == pytest.approx(found.makespan)


def test_the_median_of_several_steps_counts() -> None:
    schedule = of("one_f_one_b")
    slow = replace(PLANTED, forward=[10.0] * 4)
    steps = [simulate(schedule, one) for one in (PLANTED, slow, PLANTED)]
    np.testing.assert_allclose(measured_costs(*steps).per_stage("forward", 4), FORWARD)


def test_what_a_step_takes_beside_its_actions_is_told() -> None:
    """Half a second before the first action, and 2 s (rank 0) or 1 s after the last one of the rank."""
    schedule = of("one_f_one_b", 4, 2)
    costs = Costs(forward=1.0, input_gradient=1.0, weight_gradient=1.0)
    done = simulate(schedule, costs)
    ends = [float(done.end[schedule.offsets[rank + 1] - 1]) + after for rank, after in ((0, 2.0), (1, 1.0))]
    ranks = [replace(one, began=-0.5, ended=end) for one, end in zip(step(schedule, costs), ends)]
    found = measured_timeline(schedule, ranks)
    np.testing.assert_allclose(found.costs.per_stage("optimizer", 2), [2.5, 1.5])
    assert found.predicted.makespan_with_optimizer == pytest.approx(done.makespan + 2.5)


def test_what_was_not_timed_is_named() -> None:
    schedule = of("one_f_one_b")
    ranks = step(schedule)
    ranks[2] = replace(ranks[2], actions=ranks[2].actions[:-1])
    with pytest.raises(NoAnswer, match="2B7 was not timed"):
        measured_timeline(schedule, ranks)
    with pytest.raises(NoAnswer, match="3 ranks were timed"):
        measured_timeline(schedule, ranks[:3])
    with pytest.raises(InvalidCosts, match="no step"):
        measured_costs()
    with pytest.raises(InvalidCosts, match="different numbers of stages"):
        measured_costs(simulate(of("gpipe")), simulate(of("gpipe", ranks=2)))


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "interleaved", "looped_bfs", "zb_h1", "dualpipe_v"])
def test_a_mixed_order_splits_every_second_backward(name: str) -> None:
    """It is proved again as it is made, and stays what it was in all else."""
    schedule = of(name)
    found = mixed(schedule)
    assert set(found.micro_batch[found.kind == BACKWARD].tolist()) <= {0, 2, 4, 6}
    if (schedule.kind == BACKWARD).any():
        assert {1, 3, 5, 7} <= set(found.micro_batch[found.kind == INPUT_GRADIENT].tolist())
    assert found.placements == schedule.placements
    assert mixed(of("gpipe", 1)) == of("gpipe", 1)
