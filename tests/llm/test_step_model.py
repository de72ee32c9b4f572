"""A step's time from measured steps, and the budget that follows from it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch.errors import InvalidSettings, NoAnswer
from microbatch.llm.budget import GROWTH_SHARE, MOST_TOKENS, SLOW, BudgetFollower, limits
from microbatch.llm.step_model import ENOUGH, StepModel, StepSample, fit, nonnegative, pairs_of

MACHINE = StepModel(
    (1, 8, 16, 32, 64, 128, 256, 512),
    (0.0098, 0.0136, 0.0189, 0.0279, 0.0542, 0.1005, 0.19, 0.38),
    per_cached=1e-7,
    per_sequence=1e-5,
    per_pair=1e-8,
)
"""Measured decode steps of a small model on two cores, continued in proportion."""


def steps(count: int, slower: Callable[[int], float] = lambda _: 1.0, seed: int = 0) -> list[StepSample]:
    """Random steps of `MACHINE`, within 3 % of what it says, times how much slower it is at each."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(count):
        generating = int(random.integers(1, 40))
        chunk = int(random.choice([0, 0, 16, 100, 400])) if number % 2 else 0
        old, cached = int(random.integers(0, 2000)), generating * int(random.integers(10, 600))
        sample = StepSample(
            generating + chunk, cached + old, generating + (chunk > 0), 1.0, pairs_of(chunk, old), chunk
        )
        seconds = MACHINE.seconds(sample.tokens, sample.cached, sample.sequences, sample.pairs)
        seconds *= float(random.uniform(0.97, 1.03)) * slower(number)
        found.append(StepSample(sample.tokens, sample.cached, sample.sequences, seconds, sample.pairs, chunk))
    return found


def test_a_fit_finds_the_machine_again() -> None:
    model = fit(steps(300))
    for tokens, cached, sequences, pairs in [
        (1, 100, 1, 0),
        (20, 4000, 20, 0),
        (200, 9000, 21, 50_000),
        (430, 0, 9, 0),
    ]:
        expected = MACHINE.seconds(tokens, cached, sequences, pairs)
        assert model.seconds(tokens, cached, sequences, pairs) == pytest.approx(expected, rel=0.1)
    assert model.error < 3
    assert MACHINE.per_pair / 2 < model.per_pair < 2 * MACHINE.per_pair


def test_interrupted_steps_do_not_spoil_a_fit() -> None:
    model = fit(steps(300, slower=lambda number: 5.0 if number % 12 == 0 else 1.0))
    assert model.seconds(20, 4000, 20) == pytest.approx(MACHINE.seconds(20, 4000, 20), rel=0.06)


def test_few_samples_are_no_model() -> None:
    with pytest.raises(NoAnswer, match=f"{ENOUGH - 1} measured steps"):
        fit(steps(ENOUGH - 1))


@given(st.integers(1, 600), st.integers(0, 10**5), st.integers(1, 64), st.integers(0, 3000), st.floats(0.0001, 1.0))
def test_tokens_within_a_time_are_the_most(
    tokens: int, cached: int, sequences: int, depth: int, allowed: float
) -> None:
    def seconds(count: int) -> float:
        return MACHINE.seconds(count, cached, sequences, depth * max(0, count - sequences))

    most = MACHINE.tokens_within(allowed, cached, sequences, depth)
    assert seconds(most) <= allowed + 1e-12 or most == 0
    assert seconds(most + 1) > allowed - 1e-12
    assert seconds(tokens + 1) >= seconds(tokens)


def test_beyond_the_largest_size_time_grows_in_proportion() -> None:
    assert MACHINE.seconds(5120, 0, 0) == pytest.approx(3.8)
    assert MACHINE.scaled(2.0).seconds(64, 1000, 3, 70) == pytest.approx(2 * MACHINE.seconds(64, 1000, 3, 70))


@given(st.integers(0, 10**6))
def test_least_squares_without_negative_coefficients(seed: int) -> None:
    random = np.random.default_rng(seed)
    columns, wanted = random.normal(size=(12, 4)), random.normal(size=12)
    found = nonnegative(columns, wanted)
    gradient = columns.T @ (wanted - columns @ found)
    assert (found >= 0).all()
    assert (gradient <= 1e-6).all()
    assert np.abs(gradient[found > 0]).max(initial=0.0) < 1e-6


def test_the_two_limits_for_a_target() -> None:
    found = limits(MACHINE, 0.05, 500, 10**6)
    sequences, tokens = found.max_sequences, found.max_tokens
    assert MACHINE.seconds(sequences, 500 * sequences, sequences) <= GROWTH_SHARE * 0.05
    assert MACHINE.seconds(sequences + 1, 500 * (sequences + 1), sequences + 1) > GROWTH_SHARE * 0.05
    assert MACHINE.seconds(tokens, 500 * sequences, sequences) <= 0.05
    assert MACHINE.seconds(tokens + 1, 500 * sequences, sequences) > 0.05
    assert found.limited_by == "target"
    assert f"{sequences} sequences of 500 tokens" in found.reason


def test_limits_by_memory_and_by_throughput() -> None:
    assert (limits(MACHINE, 0.05, 500, 4000).max_sequences, limits(MACHINE, 0.05, 500, 4000).limited_by) == (
        8,
        "memory",
    )
    best = limits(MACHINE, None, 100, 10**6)
    assert best.limited_by == "throughput"
    assert best.max_sequences < 256


@pytest.mark.parametrize(
    ("target", "memory", "words"), [(0.005, 10**6, "One sequence alone takes 9.86 ms"), (0.05, 400, "does not fit")]
)
def test_limits_that_cannot_be_met_are_said(target: float, memory: int, words: str) -> None:
    with pytest.raises(InvalidSettings, match=words):
        limits(MACHINE, target, 500, memory)


def test_the_budget_meets_the_target_and_follows_a_machine_that_slows_down_and_recovers() -> None:
    follower = BudgetFollower(time_per_output_token_target=0.05)
    tokens = []
    for phase, slower in enumerate((1.0, 2.0, 1.0)):
        for sample in steps(200, slower=lambda _, slower=slower: slower, seed=phase):  # type: ignore[misc]
            follower.observe(sample)
        assert follower.model is not None
        assert follower.model.seconds(20, 4000, 20) == pytest.approx(slower * MACHINE.seconds(20, 4000, 20), rel=0.1)
        tokens.append(follower.budget.max_tokens)
    assert tokens[1] < 0.7 * tokens[0]
    assert tokens[2] > 1.4 * tokens[1]
    assert "50 ms" in follower.budget.reason


def test_before_anything_is_known_a_step_grows_by_what_the_largest_allows() -> None:
    follower = BudgetFollower(time_per_output_token_target=0.05)
    assert follower.budget.max_tokens == 16
    follower.observe(StepSample(16, 0, 1, 0.019))
    assert follower.budget.max_tokens == 32
    follower.observe(StepSample(32, 0, 1, 0.040))
    assert follower.budget.max_tokens == 40


def test_bounds_are_kept_and_a_first_token_target_halves() -> None:
    follower = BudgetFollower(time_per_output_token_target=1.0, max_tokens=100, max_sequences=7, model=MACHINE)
    assert (follower.budget.max_tokens, follower.budget.max_sequences) == (100, 7)
    waits = BudgetFollower(time_to_first_token_target=0.1, model=MACHINE).budget
    assert waits == BudgetFollower(time_per_output_token_target=0.05, model=MACHINE).budget
    assert BudgetFollower(model=MACHINE).budget.max_tokens < MOST_TOKENS


@pytest.mark.parametrize("name", ["time_per_output_token_target", "max_tokens", "max_sequences"])
def test_a_bound_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(InvalidSettings, match=f"{name} is 0"):
        BudgetFollower(**{name: 0})  # type: ignore[arg-type]


def test_every_slow_step_has_its_reason() -> None:
    follower = BudgetFollower(time_per_output_token_target=0.05, model=MACHINE)
    usual = MACHINE.seconds(20, 1000, 20)
    assert follower.observe(StepSample(20, 1000, 20, usual)) is None
    busy = follower.observe(StepSample(20, 1000, 20, 2 * SLOW * usual))
    assert busy is not None and "the machine was busy: 3.0 times" in busy
    prompt = MACHINE.seconds(200, 1000, 21)
    chunk = follower.observe(StepSample(200, 1000, 21, prompt, prefill=180))
    assert chunk is not None and chunk.endswith("prefill of 180 tokens")
    many = follower.observe(StepSample(64, 90_000, 64, MACHINE.seconds(64, 90_000, 64)))
    assert many is not None and many.endswith("64 sequences, 90000 cached tokens")


def test_a_budget_grows_with_its_target() -> None:
    budgets = [BudgetFollower(time_per_output_token_target=each / 100, model=MACHINE).budget for each in range(2, 20)]
    assert all(a.max_tokens <= b.max_tokens and a.max_sequences <= b.max_sequences for a, b in pairwise(budgets))
