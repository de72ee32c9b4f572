"""Whole traces through the scheduler and the blocks: everything ends, targets are met, tenants share."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from microbatch.llm.kv_blocks import blocks_for
from microbatch.llm.simulate import SimulatedRequest, SimulatedRun, simulate
from tests.llm.test_step_model import MACHINE

WANDERS = (0.96, 0.98, 1.0, 1.0, 1.0, 1.02, 1.03, 1.05, 1.08, 1.12)


def trace(count: int, rate: float, seed: int = 0, prompt: int = 256, answer: int = 128) -> list[SimulatedRequest]:
    """Independent arrivals of mixed lengths."""
    draws, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draws.expovariate(rate)
        found.append(SimulatedRequest(now, draws.randint(8, prompt), draws.randint(4, answer)))
    return found


requests = st.builds(
    SimulatedRequest,
    arrived=st.floats(0, 3),
    prompt_tokens=st.integers(1, 70),
    output_tokens=st.integers(1, 40),
    priority=st.integers(-1, 2),
    tenant=st.sampled_from(["", "a", "b"]),
    prefix=st.sampled_from([("", 0), ("x", 12), ("y", 40)]),
)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(requests, min_size=1, max_size=25),
    st.integers(4, 40),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([None, 0.004, 0.05]),
    st.sampled_from([3, 40, 400]),
    st.booleans(),
)
def test_every_request_ends_whatever_comes(
    wanted: list[SimulatedRequest], num_blocks: int, size: int, target: float | None, tokens: int, known: bool
) -> None:
    run = simulate(
        wanted, MACHINE, num_blocks=num_blocks, block_size=size, time_per_output_token_target=target, max_tokens=tokens,
        max_sequences=6, known=known,
    )  # fmt: skip
    fits = [each for each in wanted if blocks_for(each.prompt_tokens + each.output_tokens - 1, size) <= num_blocks]
    assert [answer.request for answer in run.answers] == fits
    assert len(run.refused) == len(wanted) - len(fits)
    assert all(len(answer.times) == answer.request.output_tokens for answer in run.answers)
    assert max([answer.preempted for answer in run.answers], default=0) <= num_blocks.bit_length() + 2
    assert all(step.reason and step.tokens for step in run.steps)
    once = sum(each.prompt_tokens + each.output_tokens - 1 for each in fits)
    assert run.computed <= 4 * once


def test_a_cache_that_is_too_small_for_all_costs_little() -> None:
    wanted = trace(200, 8)
    tight = simulate(wanted, MACHINE, num_blocks=100)
    assert tight.preemptions > 10
    once = sum(each.prompt_tokens + each.output_tokens - 1 for each in wanted)
    assert tight.computed < 1.1 * once
    assert max(answer.preempted for answer in tight.answers) <= 4


@pytest.mark.parametrize("known", [True, False], ids=["known", "learnt"])
@pytest.mark.parametrize("target", [0.05, 0.1])
@pytest.mark.parametrize("rate", [4, 8], ids=["inside capacity", "beyond it"])
def test_the_target_is_met_by_99_percent_of_steps(target: float, rate: float, known: bool) -> None:
    run = simulate(
        trace(200, rate), MACHINE, num_blocks=4000, time_per_output_token_target=target, ratios=WANDERS, known=known
    )
    assert run.within_target >= 0.99
    slow = [step for step in run.steps if step.generating and step.seconds > target]
    assert all(step.slow for step in slow)
    assert run.to_json()["within_target"] == run.within_target


def test_the_target_is_met_after_the_machine_has_slowed_down() -> None:
    run = simulate(
        trace(200, 4), MACHINE, num_blocks=4000, time_per_output_token_target=0.1, ratios=WANDERS,
        slower=lambda now: 1.5 if 10 < now < 25 else 1.0,
    )  # fmt: skip
    assert run.within_target >= 0.98
    assert any("busy" in (step.slow or "") for step in run.steps)


@pytest.mark.parametrize("newcomer", [500, 2000, 8000])
def test_a_stream_stands_still_by_the_budget_and_not_by_the_prompt_of_a_newcomer(newcomer: int) -> None:
    def gap(tokens: int) -> float:
        stream = SimulatedRequest(0.0, 20, 400)
        run = simulate([stream, SimulatedRequest(1.0, newcomer, 4)], MACHINE, num_blocks=1000, max_tokens=tokens)
        return run.answers[0].largest_gap

    plain = replace(MACHINE, per_pair=0.0, per_cached=0.0)
    for tokens in (64, 128, 256):
        assert gap(tokens) <= MACHINE.seconds(tokens, newcomer + 420, 2, tokens * newcomer) + 1e-9
        assert gap(tokens) >= plain.seconds(tokens, 0, 2) - 1e-9


@pytest.mark.parametrize("prompt", [4000, 16_000])
def test_short_prompts_behind_a_long_one_start_within_three_steps(prompt: int) -> None:
    short = [SimulatedRequest(0.5, 30 + 10 * number, 8) for number in range(5)]
    run = simulate([SimulatedRequest(0.0, prompt, 8), *short], MACHINE, num_blocks=2000, max_tokens=256)
    assert max(answer.waited for answer in run.answers[1:]) <= 3
    assert run.answers[0].waited > 3


def test_no_long_prompt_is_starved_by_short_ones() -> None:
    short = [SimulatedRequest(number / 20, 20, 8) for number in range(1, 600)]
    long = [SimulatedRequest(0.2 + number / 100, 1500, 8) for number in range(3)]
    run = simulate([*long, *short], MACHINE, num_blocks=4000, time_per_output_token_target=0.1)
    assert max(answer.time_to_first_token for answer in run.answers[:3]) < 10


def test_a_tenant_that_sends_much_more_gets_no_more() -> None:
    flood = [SimulatedRequest(0.0, 100, 30, tenant="flood") for _ in range(200)]
    modest = [SimulatedRequest(number * 1.0, 100, 30, tenant="modest") for number in range(20)]

    def slowest(run: SimulatedRun) -> float:
        return max(each.times[-1] - each.request.arrived for each in run.answers if each.request in modest)

    shared = simulate([*flood, *modest], MACHINE, num_blocks=4000, max_sequences=16)
    one = simulate([replace(each, tenant="") for each in flood] + modest, MACHINE, num_blocks=4000, max_sequences=16)
    assert slowest(shared) < 4
    assert slowest(one) == pytest.approx(slowest(shared), rel=0.5)
    assert shared.served["flood"] == 200 * 129


def test_a_common_prefix_is_computed_once() -> None:
    wanted = [SimulatedRequest(number * 1.0, 200, 5, prefix=("system", 160)) for number in range(20)]
    run = simulate(wanted, MACHINE, num_blocks=400)
    assert [answer.cached for answer in run.answers] == [0, *[160] * 19]
    assert run.computed == 20 * 204 - 19 * 160
    assert simulate(wanted, MACHINE, num_blocks=400, prefix_caching=False).hits == 0


def test_what_can_never_be_served_is_refused_and_the_others_are_served() -> None:
    run = simulate([SimulatedRequest(0.0, 1000, 10), SimulatedRequest(0.0, 10, 10)], MACHINE, num_blocks=20)
    assert [len(answer.times) for answer in run.answers] == [10]
    ((_, words),) = run.refused
    assert "need 64 blocks of 16 tokens, and 20 are available" in words
