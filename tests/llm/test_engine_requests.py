"""What may go wrong with one request, and that nobody else notices."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import pytest
import torch

from microbatch.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    InvalidSettings,
    ModelFailed,
    Overloaded,
    RequestTooLarge,
)
from microbatch.llm.engine import LLMEngine
from microbatch.llm.row_pieces import Row
from microbatch.llm.runner import StepLogits
from microbatch.llm.sampling_params import SamplingParams
from tests.llm.engines import VOCABULARY, an_engine, prompts_of

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    with an_engine() as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_is_left(engine: LLMEngine) -> Iterator[None]:
    yield
    settled(engine)


def settled(engine: LLMEngine) -> None:
    """Every block is free again, soon."""
    until = time.monotonic() + 20
    while (now := engine.metrics()).free_blocks < now.num_blocks or now.num_requests_running + now.num_requests_waiting:
        assert time.monotonic() < until, now
        time.sleep(0.005)


class Between:
    """Stands before the model's steps; `act` may change rows or raise."""

    def __init__(self, engine: LLMEngine, act: Callable[[Any, Sequence[Row]], StepLogits]) -> None:
        engine.start()
        assert engine._prepared is not None
        self._loop, self._act = engine._prepared.loop, act
        self._runner = self._loop._runner
        self.steps = 0

    def __enter__(self) -> Between:
        self._loop._runner = self
        return self

    def __exit__(self, *_: object) -> None:
        self._loop._runner = self._runner

    def step(self, rows: Sequence[Row]) -> StepLogits:
        self.steps += 1
        return self._act(self._runner, rows)

    def copy(self, pairs: Any) -> None:
        self._runner.copy(pairs)


def slowly(runner: Any, rows: Sequence[Row]) -> StepLogits:
    time.sleep(0.01)
    logits: StepLogits = runner.step(rows)
    return logits


def test_every_form_of_a_prompt(engine: LLMEngine) -> None:
    text = engine.generate("hello", GREEDY)
    ids = engine.generate(engine.tokenizer.encode("hello"), GREEDY)
    assert len(text) == len(ids) == 1 and text[0].token_ids == ids[0].token_ids and len(text[0].token_ids) == 12
    assert text[0].usage.prompt_tokens == len(text[0].prompt_token_ids) and text[0].usage.completion_tokens == 12
    chat = [{"role": "user", "content": "hi"}]
    assert engine.generate(chat, GREEDY)[0].prompt_token_ids == tuple(engine.chat(chat))
    both_prompts: list[Any] = ["hello", [5, 6]]
    both = engine.generate(both_prompts, [GREEDY, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)])
    assert both[0].token_ids == text[0].token_ids and len(both[1].token_ids) == 3


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "empty"),
        ([], "empty"),
        ([5, VOCABULARY], f"{VOCABULARY}"),
        ([5, -1], "-1"),
        ([5, True], "True"),
        (7.5, "float"),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_runs(engine: LLMEngine, prompt: Any, said: str) -> None:
    steps = engine.metrics().steps
    with pytest.raises(InvalidRequest, match=said):
        engine.generate([PROMPT, prompt], GREEDY)
    assert engine.metrics().steps == steps


def test_too_large_for_the_cache_names_both_numbers_at_once() -> None:
    with an_engine(num_blocks=8) as small:
        start = time.monotonic()
        with pytest.raises(RequestTooLarge, match=r"need 13 blocks.* 8 are available"):
            small.generate([PROMPT], SamplingParams(max_tokens=46))
        assert time.monotonic() - start < 2
        with pytest.raises(RequestTooLarge, match="context has 256"):
            small.generate([PROMPT], SamplingParams(max_tokens=300))
        assert len(small.generate([PROMPT], SamplingParams(max_tokens=None, ignore_eos=True))[0].token_ids) == 28


def test_a_stream_gives_what_submit_gives(engine: LLMEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, n=2, logprobs=2)

    async def both() -> None:
        whole = await engine.submit(PROMPT, params)
        pieces = [piece async for piece in engine.stream(PROMPT, params)]
        for completion in whole.completions:
            own = [piece for piece in pieces if piece.index == completion.index]
            assert tuple(i for piece in own for i in piece.token_ids) == completion.token_ids
            assert "".join(piece.text for piece in own) == completion.text
            scores = [one.logprob for piece in own for one in piece.logprobs or ()]
            assert scores == pytest.approx([one.logprob for one in completion.logprobs or ()], abs=1e-4)
            assert [piece.finish_reason for piece in own] == [None] * 8 + ["length"]
        assert [piece.usage for piece in pieces[:-1]] == [None] * 17
        assert (
            pieces[-1].usage is not None and pieces[-1].usage.completion_tokens == 18 == whole.usage.completion_tokens
        )

    asyncio.run(both())


def test_who_leaves_a_stream_frees_its_blocks_within_two_steps(engine: LLMEngine) -> None:
    async def leave() -> int:
        async with aclosing(engine.stream(PROMPT, LONG)) as pieces:
            async for _ in pieces:
                break
        return between.steps

    with Between(engine, slowly) as between:
        steps = asyncio.run(leave())
        settled(engine)
        assert between.steps <= steps + 2
    assert engine.metrics().request_success["abort"] >= 1


def test_who_is_cancelled_is_aborted(engine: LLMEngine) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(engine.submit(PROMPT, LONG))
        while not engine.metrics().num_requests_running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with Between(engine, slowly):
        asyncio.run(cancel())
        settled(engine)


def test_a_deadline_ends_its_request_only(engine: LLMEngine) -> None:
    async def race() -> None:
        late = asyncio.create_task(engine.submit(PROMPT, LONG, deadline=0.1))
        other = asyncio.create_task(engine.submit(PROMPT, GREEDY))
        with pytest.raises(DeadlineExceeded, match="of at most 150 tokens"):
            await late
        assert len((await other).token_ids) == 12

    with Between(engine, slowly):
        asyncio.run(race())
    assert engine.metrics().expired == 1


@pytest.mark.parametrize("deadline", [0, -1, float("nan"), True, "soon"])
def test_a_deadline_is_a_time(engine: LLMEngine, deadline: Any) -> None:
    with pytest.raises(InvalidSettings, match="deadline"):
        asyncio.run(engine.submit(PROMPT, GREEDY, deadline=deadline))


def mates(engine: LLMEngine, bad: Any, *others: Any) -> list[Any]:
    """A request and its mates, at once; errors in their places."""

    async def together() -> list[Any]:
        asked = [engine.submit(prompt, params) for prompt, params in (bad, *others)]
        return await asyncio.gather(*asked, return_exceptions=True)

    return asyncio.run(together())


def test_a_processor_that_raises_ends_its_request_only(engine: LLMEngine) -> None:
    def raises(ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        if len(ids) > len(PROMPT) + 3:
            raise ZeroDivisionError("mine")
        return logits

    others = [(prompt, GREEDY) for prompt in prompts_of(4)]
    alone = [answer.token_ids for answer in engine.generate([prompt for prompt, _ in others], GREEDY)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logits_processors=(raises,))
    found = mates(engine, (PROMPT, params), *others)
    assert isinstance(found[0], ZeroDivisionError)
    assert [answer.token_ids for answer in found[1:]] == alone


def test_logits_that_are_not_finite_end_their_request_only(engine: LLMEngine) -> None:
    def poisoned(runner: Any, rows: Sequence[Row]) -> StepLogits:
        logits: StepLogits = runner.step(rows)
        for place, index in enumerate(logits.rows):
            if rows[index].end == 40:
                logits.last[place, 7] = float("nan")
        return logits

    others = [(prompt, GREEDY) for prompt in prompts_of(4, longest=20)]
    alone = [answer.token_ids for answer in engine.generate([prompt for prompt, _ in others], GREEDY)]
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=60, ignore_eos=True)
        with Between(engine, poisoned):
            found = mates(engine, (list(range(10, 40)), params), *others)
        assert isinstance(found[0], ModelFailed) and "not finite" in str(found[0])
        assert [answer.token_ids for answer in found[1:]] == alone


def test_a_step_that_runs_out_of_memory_is_made_smaller(engine: LLMEngine) -> None:
    def tight(runner: Any, rows: Sequence[Row]) -> StepLogits:
        if sum(len(row.ids) for row in rows) > 7:
            raise torch.OutOfMemoryError("CUDA out of memory")
        logits: StepLogits = runner.step(rows)
        return logits

    prompts = prompts_of(5)
    alone = [answer.token_ids for answer in engine.generate(prompts, GREEDY)]
    with Between(engine, tight):
        assert [answer.token_ids for answer in engine.generate(prompts, GREEDY)] == alone
    assert any(event.kind == "out_of_memory" for event in engine.metrics().events)


def test_a_row_that_fails_in_the_model_fails_alone(engine: LLMEngine) -> None:
    def fails(runner: Any, rows: Sequence[Row]) -> StepLogits:
        if any(33 in row.ids[:1] for row in rows):
            raise RuntimeError("index out of range in self")
        logits: StepLogits = runner.step(rows)
        return logits

    prompts = [prompt for prompt in prompts_of(4) if 33 not in prompt]
    alone = [answer.token_ids for answer in engine.generate(prompts, GREEDY)]
    with Between(engine, fails):
        found = mates(engine, ([33, 34], GREEDY), *((prompt, GREEDY) for prompt in prompts))
    assert isinstance(found[0], ModelFailed) and "index out of range" in str(found[0])
    spared = [(answer.token_ids, wanted) for answer, wanted in zip(found[1:], alone) if 33 not in wanted]
    assert spared and all(got == wanted for got, wanted in spared)


def test_a_defect_of_a_step_reaches_everybody_and_the_engine_goes_on(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(view: Any) -> Any:
        raise KeyError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr("microbatch.llm.loop.schedule", broken)
        found = mates(engine, (PROMPT, GREEDY), (PROMPT, GREEDY))
    assert all(isinstance(error, ModelFailed) and "a defect" in str(error) for error in found)
    assert len(engine.generate([PROMPT], GREEDY)[0].token_ids) == 12


def test_who_comes_when_too_many_wait_is_refused_with_a_time() -> None:
    with an_engine(max_num_sequences=1, max_waiting=2) as small, Between(small, slowly):

        async def crowd() -> list[Any]:
            asked = [asyncio.create_task(small.submit(PROMPT, GREEDY)) for _ in range(6)]
            return await asyncio.gather(*asked, return_exceptions=True)

        found = asyncio.run(crowd())
        refused = [answer for answer in found if isinstance(answer, Overloaded)]
        assert refused and all(error.retry_after > 0 for error in refused)
        assert small.metrics().refused == len(refused)
        assert len({answer.token_ids for answer in found if not isinstance(answer, Exception)}) == 1
        assert len(small.generate([PROMPT] * 9, GREEDY)) == 9  # who waits itself is not refused


def test_draining_answers_what_is_there_and_refuses_what_comes() -> None:
    async def drain() -> None:
        under_way = [asyncio.create_task(made.submit(PROMPT, GREEDY)) for _ in range(4)]
        while not made.metrics().num_requests_running:
            await asyncio.sleep(0.001)
        ending = asyncio.create_task(made.drain())
        while made.ready:
            await asyncio.sleep(0.001)
        with pytest.raises(Draining):
            await made.submit(PROMPT, GREEDY)
        assert {len(answer.token_ids) for answer in await asyncio.gather(*under_way)} == {12}
        await ending

    made = an_engine()
    with Between(made, slowly):
        asyncio.run(drain())
    with pytest.raises(Draining, match="closed"):
        made.start()


def test_a_drain_that_takes_too_long_tells_who_is_left() -> None:
    async def drain() -> None:
        under_way = asyncio.create_task(made.submit(PROMPT, LONG))
        while not made.metrics().num_requests_running:
            await asyncio.sleep(0.001)
        await made.drain(timeout=0.05)
        with pytest.raises(Draining, match="about to stop"):
            await under_way

    made = an_engine()
    with Between(made, slowly):
        asyncio.run(drain())
    assert made.metrics().free_blocks == made.metrics().num_blocks


def test_a_copy_of_the_process_says_so_at_once(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(InvalidSettings, match="fork"):
        engine.generate([PROMPT], GREEDY)


def test_an_engine_that_nobody_holds_ends_its_thread() -> None:
    made = an_engine(name="forgotten").start()
    assert "microbatch-forgotten" in {thread.name for thread in threading.enumerate()}
    del made
    gc.collect()
    assert "microbatch-forgotten" not in {thread.name for thread in threading.enumerate()}


def test_one_wake_up_for_each_step_and_loop(engine: LLMEngine) -> None:
    async def count() -> tuple[int, int]:
        loop, wake_ups = asyncio.get_running_loop(), 0
        original = loop.call_soon_threadsafe

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal wake_ups
            wake_ups += 1
            return original(*args, **kwargs)

        watched: Any = loop
        watched.call_soon_threadsafe = counted
        before = engine.metrics().steps

        async def read(prompt: list[int]) -> None:
            async for _ in engine.stream(prompt, GREEDY):
                pass

        await asyncio.gather(*(read(prompt) for prompt in prompts_of(6)))
        return wake_ups, engine.metrics().steps - before

    wake_ups, steps = asyncio.run(count())
    assert 12 <= wake_ups <= steps


def test_threads_and_event_loops_at_once(engine: LLMEngine) -> None:
    prompts = prompts_of(8)
    alone = [answer.token_ids for answer in engine.generate(prompts, GREEDY)]
    found: dict[int, Any] = {}

    def ask(number: int) -> None:
        if number % 2:
            found[number] = engine.generate([prompts[number]], GREEDY)[0].token_ids
        else:
            found[number] = asyncio.run(engine.submit(prompts[number], GREEDY)).token_ids

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(8)] == alone
