"""An engine of text for tests: it says what it was told to, piece by piece, and counts who left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from microbatch.errors import InvalidRequest, RequestTooLarge
from microbatch.llm.metrics import BUCKETS, Histogram, LLMMetrics, StepEvent
from microbatch.llm.results import Completion, Generation, Piece, TokenLogprob, TopToken, Usage
from microbatch.llm.sampling_params import SamplingParams


class Letters:
    """A tokenizer whose tokens are the first 256 characters; all others are token 63, a question mark."""

    def encode(self, text: str) -> list[int]:
        return [ord(each) if ord(each) < 256 else 63 for each in text]

    def text_of(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return "".join(map(chr, ids))

    def token_text(self, token_id: int) -> str:
        return chr(token_id)


@dataclass
class Asked:
    """What an engine was asked."""

    prompt: list[int]
    params: SamplingParams
    deadline: float | None
    priority: int
    tenant: str


def token(token_id: int, top: int) -> TokenLogprob:
    """A letter, with the letters after it as less likely ones."""
    letter = chr(token_id)
    likely = tuple(TopToken((token_id + k) % 256, chr((token_id + k) % 256), bytes([(token_id + k) % 256]), -0.5 - k)
                   for k in range(top))  # fmt: skip
    return TokenLogprob(token_id, letter, letter.encode("latin-1"), -0.5, likely)


class Echoing:
    """Answers with the letters of a text, one token each; with an index in front where several answers are wanted.

    Attributes:
        asked: in the order of asking.
        left: answers that were not wanted any more before their end.
        gate: pieces after the first wait for it; open from the start.
        fails: raised in the place of the third piece.
    """

    started = ready = True

    def __init__(self, text: str = "Hello, world.", *, context: int = 10**6) -> None:
        self.text, self.limits = text, SimpleNamespace(context=context, vocab_size=256)
        self.tokenizer = Letters()
        self.asked: list[Asked] = []
        self.left = 0
        self.gate: asyncio.Event | None = None
        self.fails: Exception | None = None
        self.ended = asyncio.Event()

    def start(self) -> Echoing:
        return self

    async def drain(self, timeout: float | None = None) -> None:
        self.ready = False

    def chat(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> list[int]:
        if any(message["content"] == "refuse" for message in messages):
            raise InvalidRequest("The template refuses it.", "Say something else.")
        said = "".join(f"<{each['role']}>{each['content']}" for each in messages)
        more = "".join(
            f"[{name}={value}]" for name, value in sorted(arguments.items()) if name != "add_generation_prompt"
        )
        return self.tokenizer.encode(said + more + ("<assistant>" if arguments["add_generation_prompt"] else ""))

    async def submit(
        self, prompt: Any, params: SamplingParams, *, deadline: float | None = None, priority: int = 0, tenant: str = ""
    ) -> Generation:
        stream = self.stream(prompt, params, deadline=deadline, priority=priority, tenant=tenant)
        pieces = [piece async for piece in stream]
        completions = []
        for index in range(params.n):
            own = [piece for piece in pieces if piece.index == index]
            logprobs = None if params.logprobs is None else tuple(one for each in own for one in each.logprobs or ())
            completions.append(Completion(
                index, "".join(each.text for each in own), tuple(i for each in own for i in each.token_ids), logprobs,
                own[-1].finish_reason, own[-1].stop_reason,
            ))  # fmt: skip
        usage = pieces[-1].usage
        assert usage is not None
        return Generation(tuple(self.asked[-1].prompt), tuple(completions), pieces[0].prompt_logprobs, usage)

    async def stream(
        self, prompt: Any, params: SamplingParams, *, deadline: float | None = None, priority: int = 0, tenant: str = ""
    ) -> AsyncIterator[Piece]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self.asked.append(Asked(ids, params, deadline, priority, tenant))
        self._check(ids)
        pieces = self._pieces(ids, params)
        done = False
        try:
            for number, piece in enumerate(pieces):
                if number and self.gate is not None:
                    await self.gate.wait()
                if number == 2 and self.fails is not None:
                    raise self.fails
                await asyncio.sleep(0)
                yield piece
            done = True
        finally:
            self.left += not done
            self.ended.set()

    def _check(self, ids: Sequence[int]) -> None:
        if not ids:
            raise InvalidRequest("The prompt is empty.", "Give text, or a list of token ids.")
        if not all(type(each) is int and 0 <= each < 256 for each in ids):
            raise InvalidRequest("The prompt holds an id outside of the vocabulary.", "Use this tokenizer.")
        if len(ids) > self.limits.context:
            raise RequestTooLarge(
                f"The prompt has {len(ids)} tokens; there is room for {self.limits.context}.", "Shorten it."
            )

    def _pieces(self, ids: Sequence[int], params: SamplingParams) -> list[Piece]:
        found = [piece for index in range(params.n) for piece in self._answer(index, params)]
        if params.prompt_logprobs is not None:
            scores = (None, *(token(each, params.prompt_logprobs) for each in ids[1:]))
            found[0] = replace(found[0], prompt_logprobs=scores)
        found[-1] = replace(found[-1], usage=Usage(len(ids), len(found), len(ids) // 2))
        return found

    def _answer(self, index: int, params: SamplingParams) -> list[Piece]:
        text = self.text if params.n == 1 else f"{index}{self.text}"
        cut = text if params.max_tokens is None else text[: params.max_tokens]
        reason, stop = "stop" if len(cut) == len(text) else "length", None
        for each in params.stop:
            if (at := cut.find(each)) >= 0:
                cut, reason, stop = cut[:at], "stop", each
        pieces = []
        for letter in cut or ".":
            scores = None if params.logprobs is None else (token(ord(letter), params.logprobs),)
            pieces.append(Piece(index, letter if cut else "", (ord(letter),), scores))
        pieces[-1] = replace(pieces[-1], finish_reason=reason, stop_reason=stop)
        return pieces

    def metrics(self) -> LLMMetrics:
        histograms = {
            name: Histogram(bounds, (2, *[0] * (len(bounds) - 1), 1), 7.5) for name, bounds in BUCKETS.items()
        }
        return LLMMetrics(
            num_requests_running=3, num_requests_waiting=2, kv_cache_usage_perc=0.25, num_preemptions=1,
            prefix_cache_queries=10, prefix_cache_hits=4, prompt_tokens=100, generation_tokens=50,
            request_success={"stop": 5, "length": 6}, steps=30, step_seconds=2.0, num_blocks=64, max_num_sequences=16,
            max_num_tokens=256, histograms=histograms, uptime=12.0, ready=self.ready,
            events=(StepEvent(9.0, "slow_step", "A step took 90 ms: prefill of 200 tokens."),),
        )  # fmt: skip
