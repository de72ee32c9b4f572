"""Who computes what in a step: generation first, prompts share, nothing starves, nobody is moved to and fro."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from microbatch.errors import RequestTooLarge
from microbatch.llm.budget import Budget
from microbatch.llm.fairness import FEW, Served
from microbatch.llm.kv_blocks import blocks_for
from microbatch.llm.scheduler import HEAD_START, MOST_SKIPS, SchedulerView, SequenceView, Step, admissible, schedule
from microbatch.llm.step_model import StepModel

LINE = StepModel((1, 1000), (0.010, 0.1099), per_cached=1e-6)
"""10 ms and 0.1 ms for each token, and 1 µs for each cached one."""


def view_of(
    running: tuple[SequenceView, ...] = (),
    waiting: tuple[SequenceView, ...] = (),
    *,
    tokens: int = 256,
    sequences: int = 64,
    free: int = 1000,
    num_blocks: int = 1000,
    **more: object,
) -> SchedulerView:
    view = SchedulerView(running, waiting, free, 16, num_blocks, Budget(tokens, sequences))
    return replace(view, **more)  # type: ignore[arg-type]


def generating(key: object, known: int = 100, **more: object) -> SequenceView:
    return replace(SequenceView(key, known, known - 1), **more)  # type: ignore[arg-type]


def tokens_of(step: Step) -> dict[object, int]:
    return {share.key: share.tokens for share in step.shares}


def test_generation_goes_first_and_prompts_share_the_rest() -> None:
    running = (SequenceView("long", 5000, 256), generating("a"), generating("b"))
    step = schedule(view_of(running, (SequenceView("short", 40, arrived=1.0),)))
    assert [share.key for share in step.shares[:2]] == ["a", "b"]
    assert tokens_of(step) == {"a": 1, "b": 1, "short": 40, "long": 214}
    assert step.reason == "2 generate; 254 tokens of 2 prompts"


@pytest.mark.parametrize("budget", [32, 64, 256, 1024])
@pytest.mark.parametrize("long_ones", [1, 3])
def test_a_short_prompt_behind_long_ones_has_its_first_token_within_three_steps(budget: int, long_ones: int) -> None:
    left = {f"long {number}": 20_000 for number in range(long_ones)}
    done = dict.fromkeys(left, 0)
    for steps in range(1, 4):
        prompts = [SequenceView(key, known, done[key]) for key, known in left.items()]
        waiting = (SequenceView("short", budget // 2, arrived=1.0),) if steps == 1 else ()
        step = schedule(view_of(tuple(prompts), waiting, tokens=budget, num_blocks=10_000, free=9_000))
        left.setdefault("short", budget // 2)
        for key, tokens in tokens_of(step).items():
            done[str(key)] = done.get(str(key), 0) + tokens
        if done["short"] == budget // 2:
            break
    assert done["short"] == budget // 2
    assert sum(done.values()) == budget * steps
    assert min(done[key] for key in left if key.startswith("long 0")) >= steps * budget // 4


def test_equal_prompts_proceed_together_and_all_of_the_budget_is_used() -> None:
    step = schedule(view_of(tuple([SequenceView(key, 5000, 16, arrived=float(key)) for key in range(4)])))
    assert sum(tokens_of(step).values()) == 256
    assert min(tokens_of(step).values()) >= 32


def test_a_step_of_prompts_keeps_within_its_time() -> None:
    running = tuple([generating(number, 1000) for number in range(10)])
    prompt = SequenceView("prompt", 5000, 1000)
    view = view_of((*running, prompt), tokens=5000, model=LINE)
    step = schedule(replace(view, budget=Budget(5000, 64, seconds=0.05)))
    tokens = sum(tokens_of(step).values())
    assert LINE.seconds(tokens, 11_000, 11) <= 0.05 < LINE.seconds(tokens + 2, 11_000, 11)


def test_nobody_begins_who_would_make_generation_alone_too_long() -> None:
    running = tuple([generating(number, 10_000) for number in range(3)])
    waiting = (SequenceView("new", 500, arrived=9.0),)
    view = view_of(running, waiting, model=LINE, budget=Budget(500, 64, seconds=0.045))
    assert schedule(view).reason == "3 generate; 1 wait: one more would make each step too long"
    assert "new" in tokens_of(schedule(replace(view, budget=Budget(500, 64, seconds=0.06))))


def test_blocks_come_from_the_cheapest_that_frees_enough_and_never_from_the_first() -> None:
    running = (
        generating("first", 17, arrived=0.0),
        generating("costly", 513, arrived=1.0),
        generating("cheap", 129, arrived=2.0),
        generating("shares all", 81, arrived=3.0, frees=0),
    )
    step = schedule(view_of(running, (SequenceView("new", 10),), free=0, num_blocks=47))
    assert step.preempted == ("cheap",)
    assert tokens_of(step) == {"first": 1, "costly": 1, "shares all": 1}
    assert step.reason == "3 generate; 1 gave way, for 0 blocks were free"
    again = tuple([replace(each, preempted=3) if each.key == "cheap" else each for each in running])
    assert schedule(view_of(again, free=0, num_blocks=47)).preempted == ("costly",)


def test_a_copy_before_writing_takes_a_block() -> None:
    children = tuple([generating(key, 100, arrived=float(key), copies=1, frees=0) for key in range(3)])
    assert schedule(view_of(children, free=3)).preempted == ()
    step = schedule(view_of(children, free=1, num_blocks=8))
    assert len(step.preempted) == 2


def test_who_gave_way_begins_again_only_with_twice_the_room() -> None:
    running = tuple([generating(number) for number in range(4)])
    for preempted, room in [(0, 4), (1, 8), (2, 16)]:
        back = SequenceView("back", 160, arrived=-1.0, preempted=preempted)
        assert "back" in tokens_of(schedule(view_of(running, (back,), free=10 + room)))
        assert "back" not in tokens_of(schedule(view_of(running, (back,), free=9 + room)))
    alone = SequenceView("back", 160, preempted=20)
    assert "back" in tokens_of(schedule(view_of((), (alone,), free=10, num_blocks=10)))


def test_one_that_does_not_fit_is_passed_by_a_bounded_number_of_times() -> None:
    big, small = SequenceView("big", 1600), SequenceView("small", 16, arrived=1.0)
    step = schedule(view_of((generating("a"),), (big, small), free=50))
    assert ("small" in tokens_of(step), step.skipped) == (True, ("big",))
    step = schedule(view_of((generating("a"),), (replace(big, skipped=MOST_SKIPS), small), free=50))
    assert tokens_of(step) == {"a": 1}
    assert step.reason == "1 generate; 2 wait: one that waits needs 100 blocks, and 50 are free"


def test_a_longer_prompt_is_passed_by_a_bounded_number_of_times() -> None:
    under_way, long = SequenceView("under way", 900, 16), SequenceView("long", 500)
    short = tuple([SequenceView(number, 20, arrived=1.0) for number in range(9)])
    step = schedule(view_of((under_way,), (long, *short), tokens=32))
    assert ("long" in tokens_of(step), "long" in step.skipped) == (False, True)
    step = schedule(view_of((under_way,), (replace(long, skipped=MOST_SKIPS), *short), tokens=32))
    assert "long" in tokens_of(step)


def test_priority_goes_first_and_age_makes_up_for_it() -> None:
    old, urgent = SequenceView("old", 50, arrived=0.0), SequenceView("urgent", 50, arrived=1.0, priority=1)
    assert "urgent" in tokens_of(schedule(view_of((), (old, urgent), sequences=1)))
    late = replace(urgent, arrived=HEAD_START + 1)
    assert "old" in tokens_of(schedule(view_of((), (old, late), sequences=1)))


def test_a_tenant_with_many_requests_does_not_keep_others_waiting() -> None:
    many = tuple([SequenceView(number, 50, arrived=0.0, tenant="many") for number in range(50)])
    one = SequenceView("one", 50, arrived=5.0, tenant="one")
    view = view_of((), (*many, one), sequences=3, served={"many": 100.0, "one": 90.0})
    assert "one" in tokens_of(schedule(view))
    assert "one" not in tokens_of(schedule(replace(view, served={"many": 100.0, "one": 900.0})))


def test_counters_of_tenants_save_nothing_up_and_forget_nothing_owed() -> None:
    served = Served()
    served.came("a")
    assert served.tokens == {}
    served.computed("a", 500)
    served.came("b")
    assert served.tokens == {"a": 500.0, "b": 500.0}
    served.computed("b", 100)
    served.left("b")
    served.came("b")
    assert served.tokens["b"] == 600.0
    for number in range(3 * FEW):
        served.came(str(number))
        served.left(str(number))
    assert len(served._tokens) <= 2 * 2 + FEW + 1


def test_what_is_cached_and_held_by_others_costs_nothing() -> None:
    waiting = SequenceView("new", 330, cached=320, held=20)
    step = schedule(view_of((generating("a"),), (waiting,), free=2))
    assert tokens_of(step) == {"a": 1, "new": 10}
    assert "new" not in tokens_of(schedule(view_of((generating("a"),), (replace(waiting, held=0),), free=2)))


@pytest.mark.parametrize(
    ("prompt", "answer", "words"),
    [
        (100, 61, None),
        (100, 62, "need 11 blocks of 16 tokens, and 10 are available"),
        (990, 20, "are 1010, and the model's context has 1000"),
        (1000, 1, "are 1001"),
    ],
)
def test_what_can_never_be_served_is_refused(prompt: int, answer: int, words: str | None) -> None:
    if words is None:
        admissible(prompt, answer, 10, 16, 1000)
        return
    with pytest.raises(RequestTooLarge, match=words):
        admissible(prompt, answer, 10, 16, 1000)


sequences = st.builds(
    SequenceView,
    key=st.none(),
    known=st.integers(1, 400),
    computed=st.integers(0, 399),
    arrived=st.floats(0, 100),
    priority=st.integers(-1, 1),
    tenant=st.sampled_from("ab"),
    skipped=st.integers(0, MOST_SKIPS + 1),
    preempted=st.integers(0, 40),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(sequences, max_size=12),
    st.lists(sequences, max_size=12),
    st.integers(0, 40),
    st.integers(1, 600),
    st.integers(1, 16),
    st.sampled_from([None, 0.001, 0.02]),
)
def test_whatever_the_state_a_step_keeps_its_bounds_and_the_first_proceeds(
    running: list[SequenceView], waiting: list[SequenceView], free: int, tokens: int, slots: int, target: float | None
) -> None:
    runs = [replace(each, key=n, computed=min(each.computed, each.known - 1)) for n, each in enumerate(running)]
    waits = [replace(each, key=100 + n, computed=0) for n, each in enumerate(waiting)]
    used = sum(blocks_for(each.computed, 16) for each in runs)
    view = SchedulerView(
        tuple(runs), tuple(waits), free, 16, max(30, used + free), Budget(tokens, slots, seconds=target), LINE,
        served={"a": 3.0, "b": 1.0},
    )  # fmt: skip
    view = replace(view, free_blocks=view.num_blocks - used)
    step = schedule(view)
    by_key, given_tokens = {each.key: each for each in (*runs, *waits)}, tokens_of(step)
    assert len(given_tokens) == len(step.shares)
    assert step.reason
    decodes = [each for each in runs if each.known - each.computed == 1 and each.key not in step.preempted]
    assert [share.key for share in step.shares[: len(decodes)]] == [
        each.key for each in sorted(decodes, key=lambda each: each.arrived - HEAD_START * each.priority)
    ]
    assert sum(given_tokens.values()) <= max(tokens, len(decodes) + 1)
    assert all(1 <= count <= by_key[key].known - by_key[key].computed for key, count in given_tokens.items())
    freed = sum(blocks_for(by_key[key].computed, 16) for key in step.preempted)
    taken = sum(
        blocks_for(by_key[key].computed + count, 16) - blocks_for(by_key[key].computed, 16)
        for key, count in given_tokens.items()
    )
    assert taken <= view.free_blocks + freed
    assert not set(step.preempted) & set(given_tokens)
    assert set(step.skipped) <= {each.key for each in waits} - set(given_tokens)
    if runs:
        first = min(runs, key=lambda each: each.arrived - HEAD_START * each.priority)
        assert first.key in given_tokens
    elif waits:
        assert given_tokens
    begun = [key for key in given_tokens if key in {each.key for each in waits}]
    assert len(begun) <= max(0, slots - len(runs))
