"""The simulation against a slow one that shares nothing with it, and what must hold for any times."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch.errors import InvalidCosts
from microbatch.pipeline.action_text import parse_schedule
from microbatch.pipeline.costs import Costs
from microbatch.pipeline.schedule import LETTERS, Schedule
from microbatch.pipeline.schedules import SCHEDULES
from microbatch.pipeline.simulate import simulate
from tests.pipeline.slow import slow_ends

ONE_WAY = [name for name in SCHEDULES if name not in ("dualpipe", "chimera")]


def random_costs(schedule: Schedule, rng: random.Random) -> Costs:
    """Times of every stage and micro-batch for themselves."""
    shape = range(schedule.stages), range(schedule.num_micro_batches)
    tables = [[[rng.choice((0.0, rng.random(), 3 * rng.random())) for _ in shape[1]] for _ in shape[0]] for _ in "FIW"]
    return Costs(
        forward=tables[0], input_gradient=tables[1], weight_gradient=tables[2],
        message=[rng.random() for _ in range(schedule.stages)],
        per_message=rng.choice((0.0, 0.1)), overlap=rng.random() < 0.5,
    )  # fmt: skip


@given(
    name=st.sampled_from(list(SCHEDULES)),
    ranks=st.sampled_from((1, 2, 4)),
    count=st.integers(1, 7),
    seed=st.integers(0, 10**6),
)
def test_the_slow_simulator_agrees(name: str, ranks: int, count: int, seed: int) -> None:
    schedule = Schedule.of(name, ranks=ranks if not SCHEDULES[name].even else max(2, ranks), num_micro_batches=count)
    agrees(schedule, random_costs(schedule, random.Random(seed)))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["dualpipe_v", "dualpipe"])
def test_the_slow_simulator_agrees_on_pairs(name: str, seed: int) -> None:
    schedule = Schedule.of(name, ranks=4, num_micro_batches=9)
    assert schedule.is_joined.sum() > 10
    agrees(schedule, random_costs(schedule, random.Random(seed)))


def agrees(schedule: Schedule, costs: Costs) -> None:
    """The simulation ends every action when the slow one does."""
    timeline = simulate(schedule, costs)
    forward, inputs, weights = (np.asarray(t) for t in (costs.forward, costs.input_gradient, costs.weight_gradient))
    tables = {"F": forward, "I": inputs, "W": weights, "B": inputs + weights}
    message = np.asarray(costs.message)
    slow = slow_ends(
        schedule.to_csv(),
        lambda kind, stage, micro_batch: float(tables[kind][stage, micro_batch]),
        lambda link: float(message[link]),
        costs.per_message,
        costs.overlap,
    )
    for index in range(len(schedule)):
        action = schedule.action(index)
        key = (action.stage, LETTERS[action.kind], action.micro_batch)
        assert timeline.end[index] == pytest.approx(slow[key], abs=1e-9), str(action)


@given(name=st.sampled_from(list(SCHEDULES)), count=st.integers(1, 8), seed=st.integers(0, 10**6))
def test_longer_times_never_shorten_the_step(name: str, count: int, seed: int) -> None:
    rng = random.Random(seed)
    schedule = Schedule.of(name, ranks=4, num_micro_batches=count)
    costs = random_costs(schedule, rng)
    before = simulate(schedule, costs)
    stage = rng.randrange(schedule.stages)
    longer = costs.scaled(stage, 1 + rng.random(), schedule)
    slower = longer.with_link(rng.randrange(schedule.stages - 1), 1 + rng.random(), schedule.stages)
    after = simulate(schedule, slower)
    assert np.all(after.end >= before.end - 1e-12)
    assert after.makespan_with_optimizer >= before.makespan_with_optimizer - 1e-12


@given(name=st.sampled_from(list(SCHEDULES)), count=st.integers(1, 8), factor=st.floats(0.01, 100))
def test_the_unit_of_time_does_not_matter(name: str, count: int, factor: float) -> None:
    schedule = Schedule.of(name, ranks=2, num_micro_batches=count)
    one = simulate(schedule, Costs(forward=1, input_gradient=1.5, weight_gradient=0.5, message=0.3))
    two = simulate(schedule, Costs(forward=factor, input_gradient=1.5 * factor, weight_gradient=0.5 * factor,
                                   message=0.3 * factor))  # fmt: skip
    assert two.makespan == pytest.approx(factor * one.makespan)
    assert two.bubble_fraction == pytest.approx(one.bubble_fraction, abs=1e-9)


def test_messages() -> None:
    """Two ranks, one micro-batch: F, message, F, B, message, B."""
    schedule = Schedule.of("one_f_one_b", ranks=2, num_micro_batches=1)
    assert simulate(schedule, message=0.5).makespan == 7
    assert simulate(schedule, Costs(message=0.5, per_message=0.25)).makespan == 8
    assert simulate(schedule, Costs(message=[0.5])).makespan == simulate(schedule, Costs(message=[0.5, 9])).makespan


def test_messages_that_do_not_overlap_stop_the_sender() -> None:
    schedule = Schedule.of("gpipe", ranks=2, num_micro_batches=4)
    beside = simulate(schedule, Costs(message=0.5))
    instead = simulate(schedule, Costs(message=0.5, overlap=False))
    assert beside.makespan == (1 + 0.5 + 4) + 2 * 4 + 0.5 + 2
    assert instead.makespan > beside.makespan
    assert np.array_equal(instead.busy_per_rank, beside.busy_per_rank)


def test_stages_on_one_rank_send_nothing() -> None:
    schedule = Schedule.of("zb_v", ranks=1, num_micro_batches=3)
    assert simulate(schedule, message=100.0).makespan == 18


def test_the_optimizer_waits_for_all_only_with_a_global_clip() -> None:
    schedule = Schedule.of("one_f_one_b", ranks=2, num_micro_batches=2)
    alone = simulate(schedule, Costs(optimizer=[5.0, 1.0]))
    assert alone.makespan == 9
    assert alone.finish_per_rank.tolist() == [14, 8]
    clipped = simulate(schedule, Costs(optimizer=[5.0, 1.0], global_clip=True))
    assert clipped.finish_per_rank.tolist() == [14, 10]
    last = simulate(schedule, Costs(optimizer=[1.0, 5.0], global_clip=True))
    assert last.makespan_with_optimizer == 14
    assert simulate(schedule, Costs(optimizer=[1.0, 5.0])).makespan_with_optimizer == 12


def test_reductions_run_beside_the_work_and_follow_each_other() -> None:
    schedule = Schedule.of("looped_bfs", ranks=1, num_micro_batches=1, chunks=2)
    timeline = simulate(schedule, Costs(reduction=[1.0, 10.0]))
    # 0F 1F 1B 0B: stage 1 is done at 4 and reduced until 14, then stage 0.
    assert timeline.makespan == 6
    assert timeline.makespan_with_optimizer == 15
    assert simulate(schedule, Costs(reduction=[1.0, 0.5])).makespan_with_optimizer == 7


def test_full_backwards_may_have_times_of_their_own() -> None:
    schedule = Schedule.of("one_f_one_b", ranks=2, num_micro_batches=4)
    assert simulate(schedule, Costs(full_backward=1.5)).makespan == 5 * 2.5
    assert simulate(Schedule.of("zb_h1", ranks=2, num_micro_batches=4), Costs(full_backward=99)).makespan < 20


def test_bytes_count_weights_and_what_forwards_keep() -> None:
    schedule = Schedule.of("one_f_one_b", ranks=2, num_micro_batches=4)
    timeline = simulate(schedule, Costs(activation_bytes=[10, 30], weight_bytes=[100, 7]), memory_limit_bytes=121)
    assert timeline.peak_bytes == (120, 37)
    assert timeline.fits is True
    assert simulate(schedule, timeline.costs, memory_limit_bytes=119).fits is False
    both_ways = Schedule.of("dualpipe", ranks=2, num_micro_batches=4)
    assert simulate(both_ways, Costs(activation_bytes=0, weight_bytes=[100, 7])).peak_bytes == (107, 107)


def test_staircases_end_at_nothing_and_reach_the_peak() -> None:
    for name in SCHEDULES:
        if name != "forward_only":
            timeline = simulate(Schedule.of(name, ranks=4, num_micro_batches=8))
            for rank, peak in enumerate(timeline.peak_activations):
                times, held = timeline.memory_steps(rank)
                assert np.all(np.diff(times) >= 0)
                assert held[-1] == pytest.approx(0)
                assert held.max() == pytest.approx(peak)


def test_bubbles_of_a_rank_and_of_the_step() -> None:
    timeline = simulate(Schedule.of("one_f_one_b", ranks=4, num_micro_batches=8))
    assert timeline.bubble_per_rank.tolist() == pytest.approx([9 / 33, 6 / 30, 3 / 27, 0])
    assert timeline.idle_per_rank.tolist() == [9, 9, 9, 9]
    assert timeline.span_per_rank.tolist() == [33, 30, 27, 24]


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (Costs(forward=[1, 2]), "forward has 2 values, and the schedule has 4 stages"),
        (Costs(weight_gradient=-1), "weight_gradient must hold numbers of 0 or more, not -1"),
        (Costs(message=[1, 2]), "message has 2 values"),
        (Costs(forward=float("nan")), "forward must hold numbers"),
        (Costs(forward=[[1, 2]] * 4), "forward has 2 values for each stage, and there are 8 micro-batches"),
    ],
)
def test_costs_that_do_not_fit_are_told(costs: Costs, message: str) -> None:
    with pytest.raises(InvalidCosts, match=message):
        simulate(Schedule.of("one_f_one_b", ranks=4, num_micro_batches=8), costs)


def test_a_limit_in_bytes_needs_sizes() -> None:
    with pytest.raises(InvalidCosts, match="1000 bytes"):
        simulate(Schedule.of("gpipe", ranks=2, num_micro_batches=2), memory_limit_bytes=1000)


def test_an_own_order() -> None:
    """A last stage that alternates and a first that runs ahead is 1F1B, whatever it is called."""
    text = "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    assert simulate(parse_schedule(text)).makespan == 12


def test_the_document_has_its_keys() -> None:
    timeline = simulate(Schedule.of("one_f_one_b", ranks=2, num_micro_batches=2), memory_limit=2)
    document = timeline.to_json()
    assert {"makespan", "makespan_with_optimizer", "bubble_fraction", "bubble_over_ideal", "bubble_per_rank",
            "peak_activations", "critical_path"} <= set(document)  # fmt: skip
    assert "actions" not in document
    assert document["fits"] is True
    assert timeline.to_json(actions=True)["actions"][0] == {"rank": 0, "action": "0F0", "start": 0.0, "end": 1.0}


def test_half_a_million_actions_take_no_time() -> None:
    """64 ranks × 1,024 micro-batches × 4 chunks in under 2 s, here of processor time, made and proved included."""
    began = time.process_time()
    schedule = Schedule.of("interleaved", ranks=64, num_micro_batches=1024, chunks=4)
    timeline = simulate(schedule, message=0.01)
    assert timeline.makespan_with_optimizer > 0 and len(timeline.peak_activations) == 64
    assert time.process_time() - began < 2
    assert len(schedule) == 524_288
