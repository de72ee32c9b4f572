"""OpenAI's own client, unchanged, against a real server: completions and chats, whole and streamed.

The engine is one that says what it is told to; `test_openai_language_model` asks a real one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from microbatch.errors import DeadlineExceeded, ModelFailed, Overloaded
from microbatch.serving.engine.batcher import DynamicBatcher
from tests.serving.engines import until as until_so
from tests.serving.functions import double
from tests.web.asking import JSON_TYPE, as_json, fetch
from tests.web.running import running
from tests.web.text_engines import Echoing

KEY = "a-key-of-this-test"
TEXT = "Hello, world."


@pytest.fixture(scope="module")
def engines() -> dict[str, Any]:
    return {"letters": Echoing(TEXT), "small": Echoing(TEXT, context=8), "double": DynamicBatcher(double)}


@pytest.fixture(scope="module")
def url(engines: dict[str, Any]) -> Iterator[str]:
    with running(engines, keys={KEY: "blue"}, body_limit=2**20) as found:
        yield found


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as found:
        yield found


def ask(url: str, path: str, document: Any, **headers: str) -> tuple[int, Any]:
    told = JSON_TYPE | {"Authorization": f"Bearer {KEY}"} | {name.replace("_", "-"): v for name, v in headers.items()}
    reply = fetch(url, "POST", f"/v1/{path}", as_json(document), told)
    return reply.status, reply.json()


def complete(client: openai.OpenAI, prompt: Any = "Say", **more: Any) -> Any:
    return client.completions.create(model="letters", prompt=prompt, **more)


def say(client: openai.OpenAI, content: Any = "Hi", **more: Any) -> Any:
    return client.chat.completions.create(model="letters", messages=[{"role": "user", "content": content}], **more)


# Completions.


def test_a_completion(client: openai.OpenAI) -> None:
    found = complete(client, max_tokens=5)
    (choice,) = found.choices
    assert (choice.text, choice.index, choice.finish_reason, choice.logprobs) == ("Hello", 0, "length", None)
    assert (found.object, found.model) == ("text_completion", "letters")
    assert found.id.startswith("cmpl-")
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (3, 5, 8)
    assert found.usage.prompt_tokens_details.cached_tokens == 1


def test_sixteen_tokens_where_nothing_is_said(client: openai.OpenAI, engines: dict[str, Any]) -> None:
    complete(client)
    assert engines["letters"].asked[-1].params.max_tokens == 16
    say(client)
    assert engines["letters"].asked[-1].params.max_tokens is None


def test_several_prompts_and_several_answers_to_each(client: openai.OpenAI) -> None:
    found = complete(client, ["a", "bc"], n=2, max_tokens=3)
    assert [(each.index, each.text) for each in found.choices] == [(0, "0He"), (1, "1He"), (2, "0He"), (3, "1He")]
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (3, 12)


@pytest.mark.parametrize("prompt", [[72, 105], [[72, 105], [72]], [[72.0, 105]]])
def test_token_ids_are_prompts(client: openai.OpenAI, engines: dict[str, Any], prompt: Any) -> None:
    before = len(engines["letters"].asked)
    complete(client, prompt, max_tokens=1)
    each = prompt if isinstance(prompt[0], list) else [prompt]
    assert [asked.prompt for asked in engines["letters"].asked[before:]] == each


@pytest.mark.parametrize("prompt", ["Say ", [83, 97, 121, 32]])
def test_an_echo_has_the_prompt_in_front_and_its_probabilities(client: openai.OpenAI, prompt: Any) -> None:
    found = complete(client, prompt, echo=True, logprobs=2, max_tokens=2)
    (choice,) = found.choices
    assert choice.text == "Say He"
    assert choice.logprobs.tokens == list("Say He")
    assert choice.logprobs.token_logprobs == [None, *[-0.5] * 5]
    assert choice.logprobs.text_offset == list(range(6))
    assert choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.top_logprobs[1] == {"a": -0.5, "b": -1.5}


def test_probabilities_of_a_completion(client: openai.OpenAI) -> None:
    chosen = complete(client, max_tokens=2, logprobs=0).choices[0].logprobs
    assert (chosen.tokens, chosen.token_logprobs) == (["H", "e"], [-0.5, -0.5])
    assert chosen.top_logprobs == [{"H": -0.5}, {"e": -0.5}]
    assert complete(client, max_tokens=2, logprobs=2).choices[0].logprobs.top_logprobs[0] == {"H": -0.5, "I": -1.5}


def test_stop_strings(client: openai.OpenAI) -> None:
    for stop in (",", [",", "world"]):
        (choice,) = complete(client, stop=stop).choices
        assert (choice.text, choice.finish_reason, choice.stop_reason) == ("Hello", "stop", ",")


def test_a_streamed_completion(client: openai.OpenAI) -> None:
    chunks = list(complete(client, max_tokens=5, stream=True, logprobs=1, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "Hello"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 4 + ["length"]
    assert [chunk.choices[0].logprobs.text_offset for chunk in chunks[:-1]] == [[0], [1], [2], [3], [4]]
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * 5
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == 8
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_of_several_prompts_and_answers(client: openai.OpenAI) -> None:
    texts: dict[int, str] = {}
    for chunk in complete(client, ["a", "b"], n=2, max_tokens=4, stream=True, echo=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == {0: "a0Hel", 1: "a1Hel", 2: "b0Hel", 3: "b1Hel"}


def test_usage_of_a_stream_counts_every_prompt(client: openai.OpenAI) -> None:
    *_, last = complete(client, ["a", "bc"], n=2, max_tokens=4, stream=True, stream_options={"include_usage": True})
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 16)


# Chats.


def test_a_chat(client: openai.OpenAI, engines: dict[str, Any]) -> None:
    found: Any = client.chat.completions.create(
        model="letters",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}]},
        ],
        max_completion_tokens=5,
        n=2,
    )
    assert engines["letters"].tokenizer.text_of(engines["letters"].asked[-1].prompt) == (
        "<system>Be brief.<user>Hi!<assistant>"
    )
    assert [each.message.content for each in found.choices] == ["0Hell", "1Hell"]
    assert {each.message.role for each in found.choices} == {"assistant"}
    assert (found.object, found.choices[1].index, found.choices[0].finish_reason) == ("chat.completion", 1, "length")
    assert found.usage.completion_tokens == 10


def test_an_answer_can_be_sent_back_as_it_came(client: openai.OpenAI) -> None:
    message = say(client).choices[0].message
    history = [{"role": "user", "content": "Hi"}, message, message.model_dump(), {"role": "user", "content": "And?"}]
    again = client.chat.completions.create(model="letters", messages=history)
    assert again.choices[0].message.content == TEXT


def test_probabilities_of_a_chat(client: openai.OpenAI) -> None:
    (choice,) = say(client, max_tokens=2, logprobs=True, top_logprobs=2).choices
    first, second = choice.logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("H", -0.5, [72])
    assert [(each.token, each.logprob) for each in second.top_logprobs] == [("e", -0.5), ("f", -1.5)]
    assert say(client, max_tokens=1, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert say(client, max_tokens=1).choices[0].logprobs is None


def test_a_streamed_chat(client: openai.OpenAI) -> None:
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    roles: list[str] = []
    *chunks, last = say(client, n=2, stream=True, stream_options={"include_usage": True}, logprobs=True)
    for chunk in chunks:
        assert chunk.object == "chat.completion.chunk"
        (choice,) = chunk.choices
        roles += [choice.delta.role] if choice.delta.role else []
        texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    assert texts == {0: f"0{TEXT}", 1: f"1{TEXT}"}
    assert ends == {0: "stop", 1: "stop"}
    assert roles == ["assistant"] * 2
    assert last.usage.completion_tokens == 2 * len(TEXT) + 2


def test_what_vllm_takes_beside(client: openai.OpenAI, engines: dict[str, Any]) -> None:
    extra = {
        "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 1, "ignore_eos": True,
        "stop_token_ids": [3, 4], "include_stop_str_in_output": True, "prompt_logprobs": 1, "return_token_ids": True,
        "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    found = say(
        client, "Hi", max_tokens=3, temperature=0.5, top_p=0.9, presence_penalty=0.1, frequency_penalty=-0.2, seed=7,
        logit_bias={"5": -100}, extra_body=extra,
    )  # fmt: skip
    asked = engines["letters"].asked[-1]
    params = asked.params
    assert (params.top_k, params.min_p, params.repetition_penalty, params.min_tokens) == (0, 0.1, 1.2, 1)
    assert (params.ignore_eos, params.stop_token_ids, params.include_stop_in_output) == (True, (3, 4), True)
    assert (params.temperature, params.top_p, params.presence_penalty) == (0.5, 0.9, 0.1)
    assert (params.frequency_penalty, params.seed, params.logit_bias) == (-0.2, 7, {5: -100.0})
    assert "[enable_thinking=False]" in engines["letters"].tokenizer.text_of(asked.prompt)
    assert found.choices[0].token_ids == [72, 101, 108]
    assert found.choices[0].prompt_token_ids == asked.prompt
    assert found.prompt_logprobs[0] is None
    assert found.prompt_logprobs[1][str(asked.prompt[1])]["logprob"] == -0.5


def test_deadline_priority_and_tenant_reach_the_engine(url: str, engines: dict[str, Any]) -> None:
    headers = {"Microbatch_Deadline": "5", "Microbatch_Priority": "2"}
    assert ask(url, "completions", {"model": "letters", "prompt": "a"}, **headers)[0] == 200
    asked = engines["letters"].asked[-1]
    assert (asked.deadline, asked.priority, asked.tenant) == (5, 2, "blue")


# What cannot be had.

CHAT = [{"role": "user", "content": "Hi"}]
NOT_OFFERED: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "audio": {"voice": "alloy", "format": "wav"},
    "modalities": ["text", "audio"],
    "response_format": {"type": "json_object"},
    "prediction": {"type": "content", "content": "a"},
    "reasoning_effort": "high",
    "store": True,
    "web_search_options": {},
    "chat_template": "{{ messages }}",
    "guided_json": {"type": "object"},
    "skip_special_tokens": False,
    "priority": 1,
}


@pytest.mark.parametrize("name", NOT_OFFERED)
def test_what_is_not_offered_is_named(url: str, name: str) -> None:
    document = {"model": "letters", "messages": CHAT, name: NOT_OFFERED[name]}
    status, answer = ask(url, "chat/completions", document)
    assert (status, answer["error"]["param"], answer["error"]["type"]) == (400, name, "invalid_request_error")
    assert f"{name} is not offered" in answer["error"]["message"]


@pytest.mark.parametrize(("name", "value"), [("suffix", "end"), ("best_of", 3)])
def test_what_completions_do_not_offer_is_named(url: str, name: str, value: Any) -> None:
    status, answer = ask(url, "completions", {"model": "letters", "prompt": "a", name: value})
    assert (status, answer["error"]["param"]) == (400, name)


def test_what_asks_for_nothing_is_taken(url: str) -> None:
    nothing: dict[str, Any] = {
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"], "audio": None,
        "store": False, "n": None, "stop": None, "logit_bias": None, "stream_options": None, "metadata": {"a": "b"},
        "user": "somebody", "temperature": 1, "max_tokens": 2.0, "stream": False,
    }  # fmt: skip
    assert ask(url, "chat/completions", {"model": "letters", "messages": CHAT, **nothing})[0] == 200
    assert ask(url, "completions", {"model": "letters", "prompt": "a", "best_of": 1, "suffix": None})[0] == 200


REFUSED: dict[str, tuple[dict[str, Any], int, str | None, str]] = {
    "an unknown model": ({"model": "gpt"}, 404, None, "'gpt' is not served here"),
    "a model of items": ({"model": "double"}, 404, None, "gives no text"),
    "no prompt": ({"prompt": ...}, 400, "prompt", "prompt"),
    "an empty prompt": ({"prompt": ""}, 400, None, "empty"),
    "an empty list": ({"prompt": []}, 400, "prompt", "empty list"),
    "a mixture": ({"prompt": ["a", 7]}, 400, "prompt", "unmixed"),
    "an id out of range": ({"prompt": [5, 256]}, 400, None, "outside of the vocabulary"),
    "half an id": ({"prompt": [1.5]}, 400, "prompt", "no token id"),
    "messages": ({"prompt": [CHAT]}, 400, "prompt", "no token id"),
    "an endless id": ({"prompt": [10**40]}, 400, None, "outside of the vocabulary"),
    "an unknown member": ({"promt": 1}, 400, "promt", "promt"),
    "a text for a number": ({"n": "two"}, 400, "n", "`$.n`"),
    "no answers": ({"n": 0}, 400, "n", "`$.n`"),
    "a cold": ({"temperature": -1}, 400, "temperature", "temperature"),
    "too many likely ones": ({"logprobs": 21}, 400, "logprobs", "logprobs"),
    "an empty stop": ({"stop": ["a", ""]}, 400, "stop[1]", "stop"),
    "too many stops": ({"stop": ["a"] * 65}, 400, "stop", "stop"),
    "no tokens": ({"max_tokens": 0}, 400, "max_tokens", "max_tokens"),
    "fewer than at least": ({"max_tokens": 2, "min_tokens": 3}, 400, "min_tokens", "min_tokens"),
    "a word for an id": ({"logit_bias": {"the": 1}}, 400, "logit_bias", "'the'"),
    "a bias of no token": ({"logit_bias": {"256": 1}}, 400, "logit_bias", "256"),
    "a stop of no token": ({"stop_token_ids": [256]}, 400, "stop_token_ids", "256"),
    "options of no stream": ({"stream_options": {"include_usage": True}}, 400, "stream_options", "only for a stream"),
    "a streamed echo with scores": ({"stream": True, "echo": True, "logprobs": 1}, 400, "echo", "echo"),
    "no object": ([1], 400, None, "expected"),  # type: ignore[dict-item]
    "a body that is too large": ({"prompt": "a" * 2**20}, 413, None, "at most 1.05 MB"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_request_is_told_in_openai_s_form(url: str, case: str) -> None:
    changes, status, param, words = REFUSED[case]
    document: Any = {"model": "letters", "prompt": "a"}
    document = document | changes if isinstance(changes, dict) else changes
    if isinstance(document, dict):
        document = {name: value for name, value in document.items() if value is not ...}
    found, answer = ask(url, "completions", document)
    assert found == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["param"] == param
    assert words in answer["error"]["message"]


HOSTILE: dict[str, tuple[Any, str | None]] = {
    "no messages": ([], "messages"),
    "a text": ("Hi", "messages"),
    "no object": (["Hi"], "messages[0]"),
    "an unknown role": ([{"role": "root", "content": "a"}], "messages[0].role"),
    "no role": ([{"content": "a"}], "messages[0].role"),
    "a number": ([{"role": "user", "content": 7}], "messages[0].content"),
    "a picture": ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
    "a member of its own": ([{"role": "user", "content": "a", "__class__": "b"}], "messages[0].__class__"),
    "calls of tools": ([*CHAT, {"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages[1].tool_calls"),
    "what the template refuses": ([{"role": "user", "content": "refuse"}], None),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_messages_are_400(url: str, case: str) -> None:
    messages, param = HOSTILE[case]
    status, answer = ask(url, "chat/completions", {"model": "letters", "messages": messages})
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_arguments_of_a_template_cannot_take_the_place_of_the_others(url: str, name: str) -> None:
    document = {"model": "letters", "messages": CHAT, "chat_template_kwargs": {name: []}}
    status, answer = ask(url, "chat/completions", document)
    assert (status, answer["error"]["param"]) == (400, f"chat_template_kwargs.{name}")


def test_what_a_message_says_is_text_and_nothing_else(client: openai.OpenAI, engines: dict[str, Any]) -> None:
    content = "{{ 7 * 7 }}{% for x in range(10**9) %}\x00" + "\N{PILE OF POO}" * 1000
    assert say(client, content).choices[0].message.content == TEXT
    prompt = engines["letters"].tokenizer.text_of(engines["letters"].asked[-1].prompt)
    assert prompt.startswith("<user>{{ 7 * 7 }}{% for")


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_too_large_is_400_and_says_so(url: str, stream: bool) -> None:
    document = {"model": "small", "prompt": ["short", "much too long"], "stream": stream}
    status, answer = ask(url, "completions", document)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "context_length_exceeded", "prompt")
    assert "13 tokens; there is room for 8" in answer["error"]["message"]
    status, answer = ask(url, "chat/completions", {"model": "small", "messages": CHAT})
    assert (status, answer["error"]["param"]) == (400, "messages")


def test_models(client: openai.OpenAI, url: str) -> None:
    listed = {model.id: model for model in client.models.list()}
    assert listed.keys() == {"letters", "small"}
    assert client.models.retrieve("small").max_model_len == 8  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("double")


def test_predict_and_embeddings_say_where_text_is(url: str) -> None:
    headers = JSON_TYPE | {"Authorization": f"Bearer {KEY}"}
    reply = fetch(url, "POST", "/predict/letters", b"1", headers)
    assert (reply.status, reply.json()["error"]["remedy"]) == (404, "Ask POST /v1/completions.")
    assert ask(url, "embeddings", {"model": "letters", "input": "a"})[0] == 404
    assert json.loads(fetch(url, "POST", "/predict/double", b"1", headers).body) == {"result": 2}


def test_a_key_is_asked_for(url: str) -> None:
    stranger = openai.OpenAI(base_url=f"{url}/v1", api_key="another-key", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError) as told:
        complete(stranger)
    assert told.value.code == "invalid_api_key"


# What goes wrong on the way.


@pytest.fixture
def failing() -> Iterator[tuple[Echoing, openai.OpenAI]]:
    engine = Echoing(TEXT)
    with running({"letters": engine}) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        yield engine, client


FAILURES: dict[str, tuple[Exception, int]] = {
    "the model": (ModelFailed("The model failed: RuntimeError: boom", "See the log."), 500),
    "a defect": (ZeroDivisionError("division by zero"), 500),
    "a deadline": (DeadlineExceeded("The deadline passed.", "Give it more time."), 504),
    "a full queue": (Overloaded("8 of at most 8 wait.", retry_after=3.0), 429),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_has_its_status_or_ends_a_stream(failing: tuple[Echoing, openai.OpenAI], case: str) -> None:
    engine, client = failing
    engine.fails, status = FAILURES[case]
    with pytest.raises(openai.APIStatusError) as told:
        complete(client, ["a", "b"])
    assert told.value.status_code == status
    stream = iter(say(client, stream=True))
    assert "".join(next(stream).choices[0].delta.content for _ in range(3)) == "He"  # after who speaks
    with pytest.raises(openai.APIError) as told_later:
        next(stream)
    assert str(engine.fails).split(".")[0] in str(told_later.value)
    assert engine.left == len(engine.asked)


def test_a_client_that_goes_ends_its_answers(failing: tuple[Echoing, openai.OpenAI]) -> None:
    engine, client = failing
    engine.gate = asyncio.Event()
    stream = complete(client, ["a", "b"], stream=True)
    assert next(iter(stream)).choices[0].text == "H"
    stream.close()
    until(lambda: engine.left == 2)
    with pytest.raises(openai.APITimeoutError):
        complete(client, timeout=0.3)
    until(lambda: engine.left == 3)


def until(done: Callable[[], bool]) -> None:
    asyncio.run(until_so(done))
