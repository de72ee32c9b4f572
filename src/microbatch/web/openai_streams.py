"""Answers to several prompts, together or as they come, in the server-sent events that OpenAI's clients read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from microbatch.web.engine import arguments
from microbatch.web.negotiation import SSE
from microbatch.web.openai_errors import openai_form, too_large_is_a_mistake_in
from microbatch.web.options import Options
from microbatch.web.plain import to_json
from microbatch.web.response import Response
from microbatch.web.statuses import answer_to, note
from microbatch.web.streaming import as_event
from microbatch.web.text_engine import TextEngine

if TYPE_CHECKING:
    from microbatch.llm.results import Generation, Piece
    from microbatch.llm.sampling_params import SamplingParams

Prompt = str | Sequence[int]
Placed = tuple[int, "Piece"]
"""A piece and the place of its prompt."""
Write = Callable[[int, "Piece"], list[dict[str, Any]]]
"""The documents that a piece of a prompt becomes."""

DONE = b"data: [DONE]\n\n"
UNBUFFERED = ((b"x-accel-buffering", b"no"),)
"""Asks proxies to hand parts on as they come."""


async def generations(
    engine: TextEngine, prompts: Sequence[Prompt], params: SamplingParams, options: Options, member: str
) -> list[Generation]:
    """The answers to prompts, in order.

    Args:
        engine: that answers.
        prompts: each text or token ids.
        params: of all of them.
        options: deadline, priority and tenant.
        member: of the body, that the prompts came in.

    Raises:
        Exception: the first failure; this API has no answer for a part of a request. The rest is aborted.
    """
    given = arguments(engine, options)
    with too_large_is_a_mistake_in(member):
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(engine.submit(prompt, params, **given)) for prompt in prompts]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def streamed(
    engine: TextEngine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    options: Options,
    member: str,
    *,
    first: Sequence[dict[str, Any]],
    write: Write,
    last: Callable[[], list[dict[str, Any]]],
) -> Response:
    """The same as server-sent events. Whether the engine takes the prompts is known before the response begins.

    Args:
        engine, prompts, params, options, member: see `generations`.
        first: documents before the first piece.
        write: see `Write`.
        last: documents after the last one.

    Raises:
        Exception: what an engine raises before the first piece.
    """
    given = arguments(engine, options)
    pieces = together([engine.stream(prompt, params, **given) for prompt in prompts])
    with too_large_is_a_mistake_in(member):
        begun = await anext(pieces)

    async def documents() -> AsyncGenerator[dict[str, Any], None]:
        async with aclosing(pieces):
            for document in [*first, *write(*begun)]:
                yield document
            async for placed in pieces:
                for document in write(*placed):
                    yield document
        for document in last():
            yield document

    return Response(200, events(documents()), SSE, UNBUFFERED)


async def together(streams: Sequence[AsyncIterator[Piece]]) -> AsyncGenerator[Placed, None]:
    """The pieces of several streams as they come, each with the place of its stream.

    The first failure ends all of them, and so does leaving this one.
    """
    ready: asyncio.Queue[Placed | BaseException | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(place, stream, ready)) for place, stream in enumerate(streams)]
    left = len(tasks)
    try:
        while left:
            message = await ready.get()
            if isinstance(message, BaseException):
                raise message
            if message is None:
                left -= 1
            else:
                yield message
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(place: int, stream: Any, ready: asyncio.Queue[Any]) -> None:
    try:
        async with aclosing(stream) as pieces:
            async for piece in pieces:
                ready.put_nowait((place, piece))
    except Exception as error:
        ready.put_nowait(error)
    else:
        ready.put_nowait(None)


async def events(documents: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    """Server-sent events of documents; what fails in between is told as one, since the status has been sent."""
    try:
        async with aclosing(documents):
            async for document in documents:
                yield as_event(to_json(document))
    except Exception as error:
        note(error, "a stream")
        yield as_event(to_json(openai_form(answer_to(error))))
    yield DONE
