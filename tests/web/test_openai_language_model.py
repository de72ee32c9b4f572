"""OpenAI's own client against a real engine: a tiny model with random weights, behind a real server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from microbatch.llm.engine import LLMEngine
from microbatch.llm.sampling_params import SamplingParams
from tests.llm.engines import an_engine
from tests.web.running import running

PROMPTS = [[5, 6, 7, 8, 9], [20, 30, 40]]


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    return an_engine(num_blocks=32)


@pytest.fixture(scope="module")
def client(engine: LLMEngine) -> Iterator[openai.OpenAI]:
    with running({"tiny": engine}) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as found:
        yield found


def complete(client: openai.OpenAI, prompt: Any, **more: Any) -> Any:
    return client.completions.create(model="tiny", prompt=prompt, **more)


def test_whole_and_streamed_are_what_the_engine_gives(client: openai.OpenAI, engine: LLMEngine) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=7, n=2)
    expected = [each.text for answer in engine.generate(PROMPTS, params) for each in answer.completions]
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 0.8, "seed": 7, "n": 2}
    whole = complete(client, PROMPTS, **asked)
    assert [choice.text for choice in whole.choices] == expected
    texts = [""] * 4
    for chunk in complete(client, PROMPTS, stream=True, **asked):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected
    assert whole.usage.prompt_tokens == 8


def test_ids_of_prompts_come_once_for_each_answer_of_a_stream(client: openai.OpenAI) -> None:
    found: dict[int, list[list[int]]] = {}
    for chunk in complete(
        client, PROMPTS, stream=True, max_tokens=4, n=2, extra_body={"return_token_ids": True, "ignore_eos": True}
    ):
        for choice in chunk.choices:
            told = (choice.model_extra or {}).get("prompt_token_ids")
            found.setdefault(choice.index, []).extend([told] if told is not None else [])
    assert found == {0: [PROMPTS[0]], 1: [PROMPTS[0]], 2: [PROMPTS[1]], 3: [PROMPTS[1]]}


def test_probabilities_and_a_chat(client: openai.OpenAI) -> None:
    scored = complete(client, PROMPTS[0], max_tokens=3, temperature=0, logprobs=2, echo=True).choices[0].logprobs
    assert len(scored.tokens) == len(scored.token_logprobs) == 8
    assert scored.token_logprobs[0] is None
    assert all(value <= 0 for value in scored.token_logprobs[1:])
    messages: Any = [{"role": "user", "content": "Hi"}]
    said = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=4, logprobs=True, top_logprobs=2, temperature=0
    )
    content = said.choices[0].logprobs
    assert content is not None and content.content is not None
    for token in content.content:
        assert len(token.top_logprobs) == 2
        assert token.logprob == max(each.logprob for each in token.top_logprobs)


def test_a_stop_string_ends_an_answer_before_it(client: openai.OpenAI) -> None:
    text = complete(client, PROMPTS[0], max_tokens=12, temperature=0).choices[0].text
    stop = text[3:5]
    (choice,) = complete(client, PROMPTS[0], max_tokens=12, temperature=0, stop=stop).choices
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")


def test_what_the_cache_cannot_hold_is_refused_at_once(client: openai.OpenAI) -> None:
    before = time.monotonic()
    with pytest.raises(openai.BadRequestError) as told:
        complete(client, PROMPTS[0], max_tokens=200)
    assert time.monotonic() - before < 5
    assert told.value.code == "context_length_exceeded"
    assert "32" in str(told.value)


def test_a_client_that_goes_leaves_no_block_behind(client: openai.OpenAI, engine: LLMEngine) -> None:
    for _ in range(5):
        stream = complete(client, PROMPTS, max_tokens=100, n=2, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
    end = time.monotonic() + 60
    while engine.metrics().num_requests_running or engine.metrics().free_blocks < engine.metrics().num_blocks:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert engine.metrics().request_success["abort"] >= 1
