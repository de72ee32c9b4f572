"""Results one by one, each as soon as it is there: a line of JSON each, or server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from microbatch.errors import InvalidRequest
from microbatch.web.engine import Engine, submit_each
from microbatch.web.items import Form, blamed
from microbatch.web.negotiation import NDJSON, SSE
from microbatch.web.options import Options
from microbatch.web.plain import to_json
from microbatch.web.statuses import answer_to, item_error, note


def as_line(document: bytes) -> bytes:
    """One line of newline-delimited JSON."""
    return document + b"\n"


def as_event(document: bytes) -> bytes:
    """One server-sent event, as the HTML standard has it; JSON has no line breaks of its own."""
    return b"data: " + document + b"\n\n"


FRAMES: dict[str, tuple[Callable[[bytes], bytes], bytes]] = {
    NDJSON: (as_line, b""),
    SSE: (as_event, b"event: done\ndata: {}\n\n"),
}
"""How a document is framed, and what ends the stream: a browser's EventSource would ask again otherwise."""


async def stream(
    engine: Engine,
    form: Form,
    items: Sequence[Any],
    refused: Mapping[int, InvalidRequest],
    options: Options,
    kind: str,
) -> AsyncGenerator[bytes, None]:
    """The parts of a streamed body. Whether the engine takes the items at all is known before the first one.

    Args:
        engine: that answers.
        form: of its items.
        items: with errors in the places of those in `refused`.
        refused: items that could not be read.
        options: deadline and priority.
        kind: of the stream.

    Raises:
        Overloaded, RequestTooLarge, Draining: the engine does not.
    """
    places = [place for place in range(len(items)) if place not in refused]
    answers = submit_each(engine, [items[place] for place in places], options)
    first = await anext(answers, None) if places else None
    return _parts(form, items, places, refused, first, answers, kind)


async def _parts(
    form: Form,
    items: Sequence[Any],
    places: Sequence[int],
    refused: Mapping[int, InvalidRequest],
    first: tuple[int, Any] | None,
    answers: AsyncGenerator[tuple[int, Any], None],
    kind: str,
) -> AsyncGenerator[bytes, None]:
    frame, end = FRAMES[kind]
    try:
        for place, error in refused.items():
            yield frame(_document(place, error))
        if first is not None:
            place = places[first[0]]
            yield frame(_document(place, blamed(first[1], form, items[place])))
        async for index, result in answers:
            place = places[index]
            yield frame(_document(place, blamed(result, form, items[place])))
        if end:
            yield end
    finally:
        await answers.aclose()


def _document(place: int, result: Any) -> bytes:
    """Of one item: its result, or its error with the status that it would have had alone."""
    try:
        if isinstance(result, Exception):
            raise result
        return to_json({"index": place, "result": result})
    except Exception as error:
        note(error, "an item")
        return to_json(item_error(place, answer_to(error)))
