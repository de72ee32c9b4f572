"""Seeds, probabilities and stops: what an answer holds is the same alone and in company, whole and in pieces."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from microbatch.llm.engine import LLMEngine
from microbatch.llm.results import Completion, Generation
from microbatch.llm.sampling_params import SamplingParams
from tests.llm.engines import EOS, an_engine, model_of, prompts_of

PROMPT = list(range(40, 60))
CROWDED: dict[str, Any] = {"num_blocks": 24, "max_num_tokens": 16, "max_num_sequences": 6}


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    with an_engine(**CROWDED) as made:
        yield made


def seeded(**more: Any) -> SamplingParams:
    given: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 16, "seed": 7, "ignore_eos": True, **more}
    return SamplingParams(**given)


def tokens(answer: Generation) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in answer.completions]


def test_a_seed_decides_alone_and_in_any_company(engine: LLMEngine) -> None:
    alone = tokens(engine.generate([PROMPT], seeded(n=3))[0])
    assert len(set(alone)) == 3
    for mates in ([seeded(seed=3)] * 6, [seeded(seed=None)] * 6, [seeded(temperature=0.0)] * 6):
        prompts = [*prompts_of(3, seed=2), PROMPT, *prompts_of(3, seed=4)]
        before = engine.metrics().num_preemptions
        answers = engine.generate(prompts, [*mates[:3], seeded(n=3), *mates[3:]])
        assert tokens(answers[3]) == alone
        assert engine.metrics().num_preemptions > before
    assert tokens(engine.generate([PROMPT], seeded(n=1))[0]) == alone[:1]


def test_the_seed_of_the_engine_decides_for_those_without() -> None:
    params = seeded(seed=None)
    found = []
    for seed in (5, 5, 6):
        with an_engine(seed=seed) as engine:
            found.append([tokens(answer) for answer in engine.generate([PROMPT, PROMPT], params)])
    assert found[0] == found[1] != found[2]
    assert found[0][0] != found[0][1]


@torch.no_grad()
def reference(ids: list[int]) -> torch.Tensor:
    logits = model_of("text")(torch.tensor([ids])).logits[0]
    found: torch.Tensor = logits.log_softmax(-1)
    return found


def test_probabilities_of_prompt_and_answer_are_those_of_the_model(engine: LLMEngine) -> None:
    engine.generate([PROMPT], seeded())  # the cache holds the prompt, and must not be used: its logits are gone
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    answer = engine.generate([PROMPT], params)[0]
    ids = [*PROMPT, *answer.token_ids]
    wanted = reference(ids)
    assert answer.prompt_logprobs is not None and answer.prompt_logprobs[0] is None
    scored = [*answer.prompt_logprobs[1:], *(answer.completions[0].logprobs or ())]
    assert len(scored) == len(ids) - 1
    for place, score in enumerate(scored):
        assert score is not None and score.token_id == ids[place + 1]
        assert score.logprob == pytest.approx(float(wanted[place, ids[place + 1]]), abs=1e-4)
        top = wanted[place].topk(len(score.top))
        assert [each.token_id for each in score.top] == top.indices.tolist()
        assert [each.logprob for each in score.top] == pytest.approx(top.values.tolist(), abs=1e-4)
        assert score.bytes.decode("utf-8", "replace") == score.token or len(score.bytes) >= 1
    assert [len(score.top) for score in scored if score] == [2] * (len(PROMPT) - 1) + [3] * 6


def first(answer: Generation) -> Completion:
    return answer.completions[0]


def test_every_way_to_end(engine: LLMEngine) -> None:
    plain = first(engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=14, ignore_eos=True))[0])
    assert (plain.finish_reason, plain.stop_reason) == ("length", None)
    third = plain.token_ids[2]
    place = plain.token_ids.index(third)

    def ended(**how: Any) -> Completion:
        return first(engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=14, **how))[0])

    by_id = ended(stop_token_ids=(third,), ignore_eos=True)
    assert (by_id.finish_reason, by_id.stop_reason) == ("stop", third)
    assert by_id.token_ids == plain.token_ids[: place + 1]
    shown = ended(stop_token_ids=(third,), ignore_eos=True, include_stop_in_output=True)
    assert len(shown.text) > len(by_id.text) and shown.text.startswith(by_id.text)

    stop = plain.text[4:6]
    by_text = ended(stop=(stop,), ignore_eos=True)
    assert (by_text.finish_reason, by_text.stop_reason) == ("stop", stop)
    assert by_text.text == plain.text[: plain.text.index(stop)]
    assert ended(stop=(stop,), ignore_eos=True, include_stop_in_output=True).text == by_text.text + stop

    eos = ended(logit_bias={EOS: 1000.0})
    assert (eos.finish_reason, eos.stop_reason, eos.text, eos.token_ids) == ("stop", None, "", (EOS,))
    assert ended(logit_bias={EOS: 1000.0}, ignore_eos=True).token_ids == (EOS,) * 14
    late = ended(logit_bias={EOS: 1000.0}, min_tokens=5)
    assert len(late.token_ids) == 6 and late.token_ids[-1] == EOS and EOS not in late.token_ids[:5]


STOPS = ("a", "e ", "\ufffd", "w3", "w41", "th")


def some_params(random_: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=random_.choice((0.0, 0.7, 1.3)), seed=random_.randrange(10**6), max_tokens=random_.randint(1, 24),
        n=random_.choice((1, 1, 1, 2)), stop=tuple(random_.sample(STOPS, random_.choice((0, 0, 1, 2)))),
        logprobs=random_.choice((None, None, 1)), top_k=random_.choice((0, 5)), min_tokens=random_.choice((0, 0, 1)),
    )  # fmt: skip


async def chaos(engine: LLMEngine, asked: list[Any], random_: random.Random) -> list[Any]:
    """Each request in a task of its own: some are cancelled, some leave their stream early, the rest is read whole."""

    async def read(prompt: list[int], params: SamplingParams, leave_after: int | None) -> list[Any]:
        pieces = []
        async for piece in engine.stream(prompt, params):
            pieces.append(piece)
            if leave_after is not None and len(pieces) > leave_after:
                break
        return pieces

    tasks = []
    for prompt, params in asked:
        leaves = random_.choice((None, None, None, 0, 3))
        tasks.append(asyncio.create_task(read(prompt, params, leaves)))
        if random_.random() < 0.15:
            asyncio.get_running_loop().call_later(random_.random() * 0.05, tasks[-1].cancel)
        if random_.random() < 0.2:
            await asyncio.sleep(0.002)
    return list(await asyncio.gather(*tasks, return_exceptions=True))


def same(pieces: list[Any], offline: Generation) -> bool:
    """What came of a stream is the begin of its offline answer; all of it where it was read to the end."""
    whole = bool(pieces) and pieces[-1].usage is not None
    for completion in offline.completions:
        own = [piece for piece in pieces if piece.index == completion.index]
        text, ids = "".join(piece.text for piece in own), tuple(i for piece in own for i in piece.token_ids)
        if not completion.text.startswith(text) or completion.token_ids[: len(ids)] != ids:
            return False
        if whole and (text, ids, own[-1].finish_reason, own[-1].stop_reason) != (
            completion.text, completion.token_ids, completion.finish_reason, completion.stop_reason,
        ):  # fmt: skip
            return False
    return True


def test_many_requests_that_come_leave_and_stop_in_any_order(engine: LLMEngine) -> None:
    random_ = random.Random(4)
    asked = [(prompt, some_params(random_)) for prompt in prompts_of(120, seed=9, longest=24, vocabulary=512)]
    offline = engine.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    assert sum(each.finish_reason == "stop" for answer in offline for each in answer.completions) > 20
    found = asyncio.run(chaos(engine, asked, random_))
    cancelled = sum(isinstance(each, asyncio.CancelledError) for each in found)
    read = [(each, wanted) for each, wanted in zip(found, offline) if not isinstance(each, asyncio.CancelledError)]
    assert cancelled > 3 and len(read) > 60
    assert all(isinstance(each, list) and same(each, wanted) for each, wanted in read)
    engine.generate([PROMPT], seeded())  # aborts that were under way have been seen by now
    now = engine.metrics()
    assert now.free_blocks == now.num_blocks and now.request_success["abort"] > 5
    assert engine._prepared is not None
    engine._prepared.pool.check()
