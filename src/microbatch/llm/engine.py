"""Generation with continuous batching: prompts come in one by one and share every step of the model."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from microbatch.batch.progress import Progress
from microbatch.curves.profile import Profile
from microbatch.errors import Draining, InvalidRequest, InvalidSettings, UserError
from microbatch.llm.delivery import Reply
from microbatch.llm.limits import Limits
from microbatch.llm.loop import NEVER
from microbatch.llm.metrics import LLMMetrics
from microbatch.llm.prepare import Plan, Prepared, load_parts, prepare
from microbatch.llm.prompts import prompt_ids
from microbatch.llm.reading import Reader, generation_of
from microbatch.llm.results import Generation, Piece
from microbatch.llm.sampling_params import SamplingParams, check_params
from microbatch.llm.scheduler import admissible
from microbatch.llm.sequence import Request
from microbatch.llm.service import Service
from microbatch.llm.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or a conversation."""

LONG_TEXT = 20_000
"""Characters from which a prompt is made into tokens beside the event loop, not on it."""
MOST_PRIORITY = 1_000_000
"""Far beyond what `HEAD_START` makes of any wait; larger numbers would not be seconds any more."""
GREEDY_16 = SamplingParams()


class LLMEngine:
    """Generates with a language model; requests come from event loops and threads, and leave their batch when done.

    What a request gets does not depend on who else is there. In a ``with`` block the engine is closed at the end::

        with microbatch.LLMEngine.from_pretrained("path/to/model") as engine:
            print(engine.generate("The capital of France is")[0].text)
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str = "",
        dtype: str | torch.dtype | None = None,
        time_per_output_token_target: float | None = None,
        time_to_first_token_target: float | None = None,
        profile: str | Path | Profile | None = None,
        memory_limit: int | None = None,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_num_sequences: int | None = None,
        max_num_tokens: int | None = None,
        max_waiting: int = 1024,
        prefix_caching: bool = True,
        invariant: bool = False,
        seed: int | None = None,
    ) -> None:
        """
        Args:
            model: a causal language model of transformers, which is not changed.
            tokenizer: a `microbatch.llm.tokenizer.Tokenizer`, or the folder that it is read from.
            name: for logs, errors and clients.
            dtype: of weights and cache; the model's own by default.
            time_per_output_token_target: seconds between two tokens of a stream; bounds the tokens of a step.
            time_to_first_token_target: seconds from a request to its first token.
            profile: measured curve of the model in decode mode, for the first steps; else a second of measuring.
            memory_limit: bytes for the cache and the work of a step.
            num_blocks: of the cache; found from memory if left out.
            block_size: tokens of a block.
            max_num_sequences: most sequences in a step.
            max_num_tokens: most tokens in a step, of prompts and answers together.
            max_waiting: most sequences that wait; whoever comes then is refused with `Overloaded`.
            prefix_caching: prompts that begin alike are computed once.
            invariant: the same bits whatever the batch; slower.
            seed: where the seeds of requests without one come from.

        Raises:
            InvalidModel, InvalidSettings: what cannot be served, or settings outside their range.
        """
        self._plan = Plan(
            model=model, tokenizer=tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.from_folder(tokenizer),
            dtype=dtype,
            time_per_output_token_target=time_per_output_token_target,
            time_to_first_token_target=time_to_first_token_target, profile=profile, memory_limit=memory_limit,
            num_blocks=num_blocks, block_size=block_size, max_num_sequences=max_num_sequences,
            max_num_tokens=max_num_tokens, max_waiting=max_waiting, prefix_caching=prefix_caching,
            invariant=invariant,
        )  # fmt: skip
        self.name = name or type(model).__name__
        self._random = random.Random(seed)
        self._starting = threading.Lock()
        self._prepared: Prepared | None = None
        self._service: Service | None = None
        self._closed = False

    @classmethod
    def from_pretrained(cls, path: str | Path, **settings: Any) -> LLMEngine:
        """An engine for a Hugging Face folder, safetensors or what `microbatch convert` made.

        Args:
            path: the folder, with its tokenizer.
            settings: as for the class; and `device`, where it runs.
        """
        model, tokenizer = load_parts(Path(path), settings.pop("dtype", None), settings.pop("device", None))
        settings.setdefault("name", Path(path).resolve().name)
        return cls(model, tokenizer, **settings)

    def start(self) -> LLMEngine:
        """Be ready for requests: pack the weights, size the cache, warm up and measure. The first request does it too.

        Raises:
            InvalidModel, InvalidSettings: see the class.
            Draining: it was closed.
        """
        with self._starting:
            if self._closed:
                raise Draining(f"{self.name} has been closed.", "Make a new one.")
            if self._service is None:
                prepared = self._prepared = prepare(self._plan)
                service = Service(
                    self.name, prepared.loop, prepared.counters, max_waiting=self._plan.max_waiting,
                    clock=time.monotonic,
                )  # fmt: skip
                service.start()
                self._service = service
                weakref.finalize(self, service.stop)
        return self

    def __enter__(self) -> LLMEngine:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def started(self) -> bool:
        """Whether it has begun to serve."""
        return self._service is not None

    @property
    def ready(self) -> bool:
        """Whether requests are welcome: started and not about to stop."""
        return self._service is not None and self._service.ready

    @property
    def tokenizer(self) -> Tokenizer:
        """Between text and tokens."""
        return self._plan.tokenizer

    @property
    def limits(self) -> Limits:
        """What it keeps to, with the reasons; starts the engine if need be."""
        return self._started().limits

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY_16,
        *,
        progress: Progress | None = None,
    ) -> list[Generation]:
        """The answers to prompts, in order, for a thread that may wait.

        Args:
            prompts: texts, lists of token ids or conversations (lists of messages); or one of these.
            params: for all of them, or one for each.
            progress: called with the share that is done and a text.

        Raises:
            InvalidRequest, RequestTooLarge: a prompt that cannot be answered, before any is begun.
            Exception: the first that a request ends with; the others are aborted.
        """
        self._started()
        many = _each_prompt(prompts)
        each_params = [params] * len(many) if isinstance(params, SamplingParams) else list(params)
        if len(each_params) != len(many):
            raise InvalidRequest(f"There are {len(many)} prompts and {len(each_params)} params.", "Give one for each.")
        answered: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        asked = [(self._ids(prompt), each) for prompt, each in zip(many, each_params)]
        requests = [self._request(ids, each, _teller(number, answered)) for number, (ids, each) in enumerate(asked)]
        results: dict[int, Generation] = {}
        with closing(self._answers(iter(requests), answered)) as answers:
            for number, answer in answers:
                if isinstance(answer, Exception):
                    raise answer
                results[number] = answer
                if progress is not None:
                    progress(len(results) / len(many), f"{len(results)} of {len(many)} prompts")
        return [results[number] for number in range(len(many))]

    def generate_each(
        self, asked: Iterable[tuple[Prompt, SamplingParams]]
    ) -> Iterator[tuple[int, Generation | Exception]]:
        """The number and the answer of each request as it is complete, in whichever order; its error in its place.

        Args:
            asked: prompts with how to choose tokens; read as room comes, so there may be any number of them.
        """
        self._started()
        answered: SimpleQueue[tuple[int, Any]] = SimpleQueue()

        def requests() -> Iterator[Request | Exception]:
            for number, (prompt, params) in enumerate(asked):
                try:
                    yield self._request(self._ids(prompt), params, _teller(number, answered))
                except UserError as error:
                    yield error

        return self._answers(requests(), answered)

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams = GREEDY_16,
        *,
        deadline: float | None = None,
        priority: int = 0,
        tenant: str = "",
    ) -> Generation:
        """The whole answer to a prompt.

        Args:
            prompt: text, token ids, or the messages of a conversation.
            params: how to choose tokens.
            deadline: seconds from now, after which the answer is `DeadlineExceeded`.
            priority: larger goes first.
            tenant: whose it is; tenants are served alike, by tokens.

        Raises:
            Overloaded, DeadlineExceeded, RequestTooLarge, InvalidRequest, Draining: see `microbatch.errors`.
            ModelFailed: the model failed for this request.
            Exception: what a logits processor of this request raised.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Exception | None] = loop.create_future()
        request = await self._entered(prompt, params, Reply(_resolver(future), loop=loop), deadline, priority, tenant)
        try:
            error = await future
        finally:
            self._abort(request)
        if error is not None:
            raise error
        return generation_of(request, self.tokenizer)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams = GREEDY_16,
        *,
        deadline: float | None = None,
        priority: int = 0,
        tenant: str = "",
    ) -> AsyncGenerator[Piece, None]:
        """The pieces of an answer as they come; see `submit`.

        Whoever leaves the loop, by ``break``, an error or cancellation, aborts the request; close the iterator
        (``contextlib.aclosing``) to do so at once.
        """
        messages: asyncio.Queue[Any] = asyncio.Queue()
        reply = Reply(messages.put_nowait, streams=True, loop=asyncio.get_running_loop())
        request = await self._entered(prompt, params, reply, deadline, priority, tenant)
        reader = Reader(request, self.tokenizer)
        try:
            while (message := await messages.get()) is not None:
                if isinstance(message, Exception):
                    raise message
                yield reader.piece(message)
        finally:
            self._abort(request)

    def chat(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> list[int]:
        """A conversation as a prompt, by the template of the model.

        Args:
            messages: each with ``role`` and ``content``.
            arguments: as for `Tokenizer.chat_prompt`: tools, add_generation_prompt, and what the template knows.

        Raises:
            InvalidRequest: no template, or messages that it refuses.
        """
        return self.tokenizer.encode(self.tokenizer.chat_prompt(messages, **arguments), special=False)

    def metrics(self) -> LLMMetrics:
        """What has happened so far; starts the engine if need be."""
        prepared, service = self._started(), self._service
        assert service is not None
        budget, pool = prepared.loop.follower.budget, prepared.pool
        return LLMMetrics(
            **prepared.counters.totals(),
            num_requests_running=service.running,
            num_requests_waiting=service.waiting,
            kv_cache_usage_perc=pool.usage,
            prefix_cache_queries=pool.queries,
            prefix_cache_hits=pool.hits,
            num_blocks=pool.num_blocks,
            free_blocks=pool.free_blocks,
            block_size=self._plan.block_size,
            max_num_sequences=budget.max_sequences,
            max_num_tokens=budget.max_tokens,
            budget_reason=budget.reason,
            step_model=str(prepared.loop.follower.model or ""),
            uptime=time.monotonic() - prepared.counters.born,
            ready=service.ready,
            draining=service.draining,
            retry_after=service.seconds_to_drain(),
            notes=prepared.limits.notes,
        )

    async def drain(self, timeout: float | None = None) -> None:
        """Take no more requests, answer those that are there, and stop; see `close`."""
        await asyncio.to_thread(self.close, timeout)

    def close(self, timeout: float | None = None) -> None:
        """Take no more requests, answer those that are there, and stop.

        Args:
            timeout: seconds after which what is unfinished is answered with `Draining`; None waits for all.
        """
        with self._starting:
            self._closed = True
            service = self._service
        if service is not None:
            service.close(timeout)

    # -- behind them

    def _started(self) -> Prepared:
        if self._prepared is None or self._service is None:
            self.start()
        assert self._prepared is not None
        return self._prepared

    def _ids(self, prompt: Prompt) -> tuple[int, ...]:
        if _is_conversation(prompt):
            prompt = self.chat(prompt)  # type: ignore[arg-type]
        return prompt_ids(prompt, self.tokenizer, self._started().limits.vocab_size)  # type: ignore[arg-type]

    async def _entered(
        self,
        prompt: Prompt,
        params: SamplingParams,
        reply: Reply,
        deadline: float | None,
        priority: int,
        tenant: str,
    ) -> Request:
        if self._service is None:
            await asyncio.to_thread(self._started)
        beside = len(prompt) > LONG_TEXT if isinstance(prompt, str) else _is_conversation(prompt)
        ids = await asyncio.to_thread(self._ids, prompt) if beside else self._ids(prompt)
        request = self._request(ids, params, reply, deadline, priority, tenant)
        assert self._service is not None
        self._service.enter(request)
        return request

    def _request(
        self,
        ids: tuple[int, ...],
        params: SamplingParams,
        reply: Reply,
        deadline: float | None = None,
        priority: int = 0,
        tenant: str = "",
    ) -> Request:
        """A request that has been found admissible."""
        limits, now = self._started().limits, time.monotonic()
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(
                f"A {type(params).__name__} is no SamplingParams.", "Give microbatch.SamplingParams()."
            )
        check_params(params, limits.vocab_size)
        if not isinstance(tenant, str):
            raise InvalidSettings(f"tenant={tenant!r} is not text.", "Give the name of whose request it is.")
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MOST_PRIORITY:
            raise InvalidSettings(f"priority={priority!r} is no small whole number.", "Give one; larger goes first.")
        most = limits.most_tokens(len(ids))
        wanted = most if params.max_tokens is None else params.max_tokens
        admissible(len(ids), wanted, limits.num_blocks, limits.block_size, limits.context)
        seed = self._random.getrandbits(62) if params.seed is None else params.seed
        ends = frozenset() if params.ignore_eos else frozenset(self.tokenizer.eos_ids)
        due = NEVER if deadline is None else now + _checked(deadline)
        return Request(ids, params, wanted, ends, seed, reply, now, due, priority, tenant)

    def _abort(self, request: Request) -> None:
        if self._service is not None:
            self._service.abort(request)

    def _answers(
        self, requests: Iterator[Request | Exception], answered: SimpleQueue[tuple[int, Any]]
    ) -> Generator[tuple[int, Generation | Exception], None, None]:
        """Enter requests as room comes, and give out their answers as they are complete, an error in its place."""
        service, open_, number, more = self._service, dict[int, Request](), 0, True
        assert service is not None
        try:
            while more or open_:
                while more and len(open_) < self._plan.max_waiting:
                    request = next(requests, None)
                    if request is None:
                        more = False
                    elif isinstance(request, Exception):
                        yield number, request
                    else:
                        open_[number] = request
                        service.enter(request, patient=True)
                    number += 1
                if open_:
                    done, error = answered.get()
                    request = open_.pop(done)
                    yield done, error or generation_of(request, self.tokenizer)
        finally:
            for request in open_.values():
                service.abort(request)


def _is_conversation(prompt: Prompt) -> bool:
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _each_prompt(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Several prompts, although one may have been given alone."""
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int | Mapping)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _teller(number: int, answered: SimpleQueue[tuple[int, Any]]) -> Reply:
    return Reply(lambda message: answered.put((number, message)))


def _resolver(future: asyncio.Future[Exception | None]) -> Any:
    """Told in the event loop of the future; it may have been cancelled meanwhile.

    An error is a result here: a future refuses to raise `StopIteration`, and others are told by the same call.
    """

    def resolve(message: Exception | None) -> None:
        if not future.done():
            future.set_result(message)

    return resolve


def _checked(deadline: float) -> float:
    with suppress(TypeError, OverflowError):
        if math.isfinite(deadline) and deadline > 0 and not isinstance(deadline, bool):
            return deadline
    raise InvalidSettings(f"deadline={deadline!r} is no number of seconds above 0.", "Leave it out for none.")
