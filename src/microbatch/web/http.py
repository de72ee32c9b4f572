"""The routes by which items are sent: one item, or many, in each of the forms, answered together or as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from microbatch.errors import InvalidRequest
from microbatch.web.codecs import Codec, rows_of
from microbatch.web.engine import Engine, submit, submit_many
from microbatch.web.items import Form, blamed
from microbatch.web.negotiation import NDJSON, wire_of
from microbatch.web.options import Options
from microbatch.web.predict_operation import predict_operation, predict_operation_by_name
from microbatch.web.request import Request
from microbatch.web.response import Response, json_response
from microbatch.web.routes import Route
from microbatch.web.statuses import DEFECT, Answer, answer_to, item_error, note, own_form
from microbatch.web.streaming import stream

LARGE = 256 * 2**10
"""Bytes of a body from which on it is decoded, and numbers of a result from which on it is encoded, in a thread."""
ENVELOPE = ("item", "items", "stream")


class Asked(NamedTuple):
    """What a request wants.

    Attributes:
        items: each of them, or the error of one that cannot be read.
        many: whether it was a list.
        stream: whether results are wanted as they come.
    """

    items: list[Any]
    many: bool
    stream: bool = False


async def predict(request: Request) -> Response:
    """``POST /predict`` and ``POST /predict/{name}``."""
    name, engine = request.engine(request.parameters.get("name"))
    form = request.application.forms.get(name)
    if form is None:
        raise InvalidRequest(f"{name!r} generates text.", "Ask POST /v1/completions.", status=404)
    wire = wire_of(request.header(b"content-type"), request.header(b"accept"))
    options, many = request.options, request.flag(b"microbatch-many")
    body = await request.body()
    if len(body) < LARGE:
        asked = read(body, wire.reads, form, many=many)
    else:
        asked = await asyncio.to_thread(read, body, wire.reads, form, many=many)
    if asked.stream or wire.stream:
        return await _streamed(engine, form, asked, options, wire.stream or NDJSON)
    if asked.many:
        return await _answer_many(engine, form, asked.items, options, wire.writes)
    return await _answer_one(engine, form, asked.items[0], options, wire.writes)


def read(body: bytes, codec: Codec, form: Form, *, many: bool = False) -> Asked:
    """The items of a body, each checked and in the form of the engine's examples.

    Args:
        body: of the request.
        codec: of the body.
        form: of the items.
        many: the rows of a body that is an array are the items; documents say it themselves.

    Raises:
        InvalidRequest: the body cannot be read.
    """
    value = codec.decode(body)
    if codec.documents:
        asked = opened(value)
    elif many:
        asked = Asked(rows_of(value), True)
    else:
        asked = Asked([value], False)
    items = asked.items
    for place, item in enumerate(items):
        items[place] = _readable(form, item)
    return asked


def opened(document: Any) -> Asked:
    """A document is an item, or the envelope of one or several: an object with ``item`` or ``items``.

    Raises:
        InvalidRequest: an envelope with something else in it.
    """
    if not isinstance(document, dict) or not ("item" in document or "items" in document):
        return Asked([document], False)
    unknown = [name for name in document if name not in ENVELOPE]
    if unknown or ("item" in document and "items" in document):
        wrong = f"has {unknown[0]!r:.40} in it" if unknown else "has both"
        raise InvalidRequest(f"An object with item or items is an envelope; this one {wrong}.", _ENVELOPE_REMEDY)
    items, flag = document.get("items", [document.get("item")]), document.get("stream", False)
    if not isinstance(items, list) or not isinstance(flag, bool):
        raise InvalidRequest(f"items is a {type(items).__name__}, stream a {type(flag).__name__}.", _ENVELOPE_REMEDY)
    return Asked(items, "items" in document, flag)


_ENVELOPE_REMEDY = "Send item, or a list of items, and stream as true or false where results are wanted as they come."


def _readable(form: Form, value: Any) -> Any:
    try:
        return form.read(value)
    except InvalidRequest as error:
        return error


async def _answer_one(engine: Engine, form: Form, item: Any, options: Options, codec: Codec) -> Response:
    if isinstance(item, InvalidRequest):
        raise item
    try:
        result = await submit(engine, item, options)
    except Exception as error:
        raise blamed(error, form, item) from error
    value = {"result": result} if codec.documents else result
    if weight(result) < LARGE:
        return Response(200, codec.encode(value), codec.media_type)
    return await _encoded(codec, codec.encode, value)


async def _answer_many(engine: Engine, form: Form, items: list[Any], options: Options, codec: Codec) -> Response:
    """All items that could be read are run; each failure stays with its item."""
    results = list(items)
    good = [place for place, item in enumerate(items) if not isinstance(item, InvalidRequest)]
    if good:
        answered = await submit_many(engine, [items[place] for place in good], options)
        for place, result in zip(good, answered):
            results[place] = blamed(result, form, items[place])
    failures = {place: each for place, each in enumerate(results) if isinstance(each, Exception)}
    if codec.documents:
        return await _document(results, failures, codec)
    if failures:
        raise next(iter(failures.values()))
    assert codec.encode_rows is not None
    return await _encoded(codec, codec.encode_rows, results)


async def _document(results: list[Any], failures: Mapping[int, Exception], codec: Codec) -> Response:
    """Results in order, null where an item failed, and the failures beside them.

    The request was taken, so its status is 200, unless no item has a result and the server is to blame for it.
    """
    for error in failures.values():
        note(error, "an item")
    answers = {place: answer_to(error) for place, error in failures.items()}
    document: dict[str, Any] = {
        "results": [None if place in failures else result for place, result in enumerate(results)],
        "errors": [item_error(place, answer) for place, answer in answers.items()],
    }
    worst = _worst(list(answers.values())) if len(answers) == len(results) else None
    if worst is not None:
        return json_response(document | own_form(worst), worst.status, worst.headers)
    return await _encoded(codec, codec.encode, document)


def _worst(answers: Sequence[Answer]) -> Answer | None:
    """The first failure that is not the client's."""
    return next((answer for answer in answers if answer.status >= DEFECT), None)


async def _streamed(engine: Engine, form: Form, asked: Asked, options: Options, kind: str) -> Response:
    refused = {place: item for place, item in enumerate(asked.items) if isinstance(item, InvalidRequest)}
    if not asked.many and refused:
        raise refused[0]
    return Response(200, await stream(engine, form, asked.items, refused, options, kind), kind)


async def _encoded(codec: Codec, encode: Callable[[Any], bytes], value: Any) -> Response:
    body = await asyncio.to_thread(encode, value) if weight(value) >= LARGE else encode(value)
    return Response(200, body, codec.media_type)


def weight(value: Any) -> int:
    """About how many numbers a result holds, from a look at its first members."""
    kind = type(value)
    if kind is list or kind is tuple:
        return len(value) * weight(value[0]) if value else 1
    if kind is dict:
        return sum(map(weight, value.values()))
    if kind in _SINGLE:
        return 1
    size = getattr(value, "numel", None)
    return int(size()) if callable(size) else int(getattr(value, "size", 1))


_SINGLE = frozenset({float, int, bool, str, type(None)})

ROUTES = (
    Route("POST", "/predict", predict, predict_operation),
    Route("POST", "/predict/{name}", predict, predict_operation_by_name),
)
