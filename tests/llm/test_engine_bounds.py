"""What one request may do to the engine, and what is counted of it: bounds, ends and the cache."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from microbatch.errors import InvalidRequest, InvalidSettings, MicrobatchError
from microbatch.llm.engine import LLMEngine
from microbatch.llm.results import Generation
from microbatch.llm.row_pieces import Row
from microbatch.llm.runner import StepLogits
from microbatch.llm.sampling_params import SamplingParams
from tests.llm.engines import TEXT, an_engine, model_of, tokenizer_folder
from tests.llm.test_engine_requests import Between

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    with an_engine() as made:
        yield made


def test_a_processor_that_stops_an_iteration_keeps_nobody_waiting(engine: LLMEngine) -> None:
    """A future of asyncio refuses that exception; the requests of the same step are told all the same."""

    def stops(ids: Sequence[int], row: torch.Tensor) -> torch.Tensor:
        return next(iter([row][:0]))

    async def ask() -> list[Any]:
        bad = SamplingParams(temperature=0, max_tokens=8, logits_processors=(stops,))
        asked = [engine.submit(PROMPT, params) for params in (bad, GREEDY, GREEDY)]
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60)

    failed, *good = asyncio.run(ask())
    assert isinstance(failed, RuntimeError) and isinstance(failed.__cause__, StopIteration)
    assert all(isinstance(each, Generation) for each in good)


def test_prompts_that_end_in_their_first_step_are_found_by_others() -> None:
    prompt = list(range(10, 74))
    with an_engine(block_size=4) as engine:
        first, second = (engine.generate([prompt], SamplingParams(temperature=0, max_tokens=1))[0] for _ in range(2))
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens == 60  # all full blocks before the last token
    assert first.token_ids == second.token_ids


def test_answers_to_one_prompt_count_as_sequences() -> None:
    most = 0

    def watched(runner: Any, rows: Sequence[Row]) -> StepLogits:
        nonlocal most
        most = max(most, len(rows))
        found: StepLogits = runner.step(rows)
        return found

    params = SamplingParams(temperature=0.9, seed=1, max_tokens=12, n=3, ignore_eos=True)
    with an_engine(max_num_sequences=6) as engine, Between(engine, watched):
        answers = engine.generate([PROMPT] * 8, params)
    assert [len(each.completions) for each in answers] == [3] * 8
    assert most == 6


def test_more_answers_than_sequences_are_still_given_alone() -> None:
    with an_engine(max_num_sequences=2) as engine:
        answers = engine.generate([PROMPT] * 2, SamplingParams(temperature=0.9, seed=1, max_tokens=4, n=5))
    assert [len(each.completions) for each in answers] == [5, 5]


def test_tokens_of_a_step_bound_its_sequences_too() -> None:
    largest = 0

    def watched(runner: Any, rows: Sequence[Row]) -> StepLogits:
        nonlocal largest
        largest = max(largest, sum(len(row.ids) for row in rows))
        found: StepLogits = runner.step(rows)
        return found

    with an_engine(max_num_tokens=4) as engine, Between(engine, watched):
        engine.generate([PROMPT] * 10, GREEDY)
    assert largest <= 4


@pytest.mark.parametrize("priority", ["high", 10**400, True, 0.5])
def test_a_priority_is_a_small_whole_number(engine: LLMEngine, priority: Any) -> None:
    with pytest.raises(InvalidSettings, match="priority"):
        asyncio.run(engine.submit(PROMPT, GREEDY, priority=priority))


def test_a_deadline_beyond_all_floats_is_none(engine: LLMEngine) -> None:
    with pytest.raises(InvalidSettings, match="deadline"):
        asyncio.run(engine.submit(PROMPT, GREEDY, deadline=10**400))


def test_no_prompts_have_no_answers_before_the_start_either() -> None:
    with an_engine() as engine:
        assert engine.generate([]) == []
    assert LLMEngine(model_of(TEXT), tokenizer_folder(), num_blocks=40).generate([]) == []


def test_however_the_thread_ends_everybody_is_told() -> None:
    def leaves(ids: Sequence[int], row: torch.Tensor) -> torch.Tensor:
        raise SystemExit

    async def ask(engine: LLMEngine) -> list[Any]:
        bad = SamplingParams(temperature=0, max_tokens=8, logits_processors=(leaves,))
        asked = [engine.submit(PROMPT, params) for params in (bad, GREEDY)]
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60)

    with an_engine() as engine:
        assert all(isinstance(each, MicrobatchError) for each in asyncio.run(ask(engine)))
        assert not engine.ready
        with pytest.raises(MicrobatchError):
            engine.generate([PROMPT], GREEDY)


@pytest.mark.parametrize(
    "settings",
    [{"stop": ("a" * 1001,)}, {"n": 129}, {"temperature": 1e200}, {"repetition_penalty": 1e-300},
     {"logit_bias": {3: 1e300}}],
)  # fmt: skip
def test_settings_beyond_what_fp32_or_memory_hold_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    "settings",
    [{"top_k": 1, "top_p": 1e-9}, {"temperature": 1e-300}, {"top_p": 1e-12, "temperature": 1e30},
     {"repetition_penalty": 1e-6}, {"min_p": 1.0, "top_k": 2}],
)  # fmt: skip
def test_settings_at_the_edge_choose_a_token(engine: LLMEngine, settings: dict[str, Any]) -> None:
    (answer,) = engine.generate([PROMPT], SamplingParams(max_tokens=4, seed=3, ignore_eos=True, **settings))
    assert len(answer.token_ids) == 4
