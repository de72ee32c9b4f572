"""The routes by which items are sent: every form, every error, in this process."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from microbatch.errors import (
    DeadlineExceeded,
    Draining,
    InvalidBatch,
    InvalidOutput,
    ModelFailed,
    NotServed,
    Overloaded,
    RequestTooLarge,
    WorkerDied,
)
from microbatch.web.application import Application, application
from microbatch.web.codecs import ARRAY_EXTENSION
from tests.web.asking import JSON_TYPE, Reply, answered, as_json, ask
from tests.web.engines import Instant, Refusing, Waiting

ARRAY = np.arange(4, dtype=np.float32)


def doubling(examples: tuple[Any, ...] = (torch.zeros(4),), **options: Any) -> Application:
    return application({"model": Instant(lambda item: 2 * item, examples)}, **options)


def npy(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def unpacked(body: bytes) -> Any:
    """MessagePack with its arrays."""
    return msgspec.msgpack.decode(body, ext_hook=lambda code, data: np.load(io.BytesIO(bytes(data))))


@dataclass(frozen=True)
class Spoken:
    """How one form says an item, several, and reads what comes back."""

    one: bytes
    many: bytes
    result: Callable[[bytes], Any]
    results: Callable[[bytes], Any]
    many_headers: tuple[tuple[str, str], ...] = ()


ROWS = (("microbatch-many", "true"),)
PACKED = msgspec.msgpack.Ext(ARRAY_EXTENSION, npy(ARRAY))
FORMS = {
    "application/json": Spoken(
        as_json(ARRAY.tolist()),
        as_json({"items": [ARRAY.tolist()] * 2}),
        lambda body: json.loads(body)["result"],
        lambda body: json.loads(body)["results"],
    ),
    "application/msgpack": Spoken(
        msgspec.msgpack.encode(PACKED),
        msgspec.msgpack.encode({"items": [PACKED, PACKED]}),
        lambda body: unpacked(body)["result"],
        lambda body: unpacked(body)["results"],
    ),
    "application/x-npy": Spoken(
        npy(ARRAY),
        npy(np.stack([ARRAY, ARRAY])),
        lambda body: np.load(io.BytesIO(body)),
        lambda body: np.load(io.BytesIO(body)),
        ROWS,
    ),
    "application/safetensors": Spoken(
        safetensors.numpy.save({"item": ARRAY}),
        safetensors.numpy.save({"item": np.stack([ARRAY, ARRAY])}),
        lambda body: safetensors.numpy.load(body)["result"],
        lambda body: safetensors.numpy.load(body)["result"],
        ROWS,
    ),
}


@pytest.mark.parametrize("accepted", FORMS)
@pytest.mark.parametrize("sent", FORMS)
@pytest.mark.parametrize("path", ["/predict", "/predict/model"])
def test_every_form_of_body_gives_the_same_answer_in_every_form(path: str, sent: str, accepted: str) -> None:
    headers = {"content-type": sent, "accept": accepted}
    one = ask(doubling(), "POST", path, FORMS[sent].one, headers)
    assert (one.status, one.headers["content-type"]) == (200, accepted), one.body
    assert np.array_equal(FORMS[accepted].result(one.body), 2 * ARRAY)
    many = ask(doubling(), "POST", path, FORMS[sent].many, headers | dict(FORMS[sent].many_headers))
    assert many.status == 200, many.body
    assert np.array_equal(FORMS[accepted].results(many.body), [2 * ARRAY, 2 * ARRAY])


@pytest.mark.parametrize("sent", FORMS)
def test_the_function_sees_the_same_item_whatever_the_form(sent: str) -> None:
    engine = Instant(lambda item: item, (torch.zeros(4),))
    assert ask(application({"m": engine}), "POST", "/predict", FORMS[sent].one, {"content-type": sent}).status == 200
    ((item, _, _),) = engine.asked
    assert isinstance(item, torch.Tensor) and item.dtype == torch.float32
    assert item.tolist() == ARRAY.tolist()


@pytest.mark.parametrize("sent", FORMS)
def test_without_accept_the_answer_has_the_form_of_the_body(sent: str) -> None:
    for accept in ({}, {"accept": "*/*"}, {"accept": "text/html, application/*;q=0.1"}):
        reply = ask(doubling(), "POST", "/predict", FORMS[sent].one, {"content-type": sent} | accept)
        assert reply.headers["content-type"] == sent


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_body_may_come_in_parts(size: int) -> None:
    reply = ask(doubling(), "POST", "/predict", as_json([1, 2, 3, 4]), JSON_TYPE, size=size)
    assert reply.json() == {"result": [2.0, 4.0, 6.0, 8.0]}


def test_a_large_body_and_a_large_result_go_through_threads() -> None:
    values = list(range(300_000))
    app = application({"m": Instant(lambda item: 2 * item, (np.zeros(1, np.int64), np.zeros(2, np.int64)))})
    reply = ask(app, "POST", "/predict", as_json(values), JSON_TYPE)
    assert reply.json()["result"] == [2 * value for value in values]


@dataclass(frozen=True)
class Case:
    """A request that is refused, and how."""

    status: int
    method: str = "POST"
    path: str = "/predict"
    body: bytes = b"[1, 2, 3, 4]"
    headers: tuple[tuple[str, str], ...] = (("content-type", "application/json"),)
    says: str = ""


def of_type(name: str, *further: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    return (("content-type", name), *further)


JSON_WITH = of_type("application/json")
REFUSED = {
    "no JSON": Case(400, body=b"{", says="JSON"),
    "nothing": Case(400, body=b"", says="JSON"),
    "not in UTF-8": Case(400, body=b'"\xff"'),
    "deep": Case(400, body=b"[" * 100_000),
    "a text for numbers": Case(400, body=b'["1", "2", "3", "4"]', says="float"),
    "a ragged array": Case(400, body=b"[[1], 2, 3, 4]"),
    "another shape": Case(400, body=b"[1, 2, 3]", says="(3,)"),
    "too large a number": Case(400, body=b"[1e300, 2, 3, 4]", says="too large"),
    "both": Case(400, body=b'{"item": [1, 2, 3, 4], "items": []}', says="both"),
    "something else in the envelope": Case(400, body=b'{"item": [1, 2, 3, 4], "priorty": 1}', says="priorty"),
    "items that are no list": Case(400, body=b'{"items": 3}', says="int"),
    "stream that is no flag": Case(400, body=b'{"items": [], "stream": 1}', says="stream"),
    "a pickle in .npy": Case(400, body=b"", headers=of_type("application/x-npy")),
    "a deadline that passed": Case(400, headers=(*JSON_WITH, ("microbatch-deadline", "0")), says="deadline"),
    "a deadline that is none": Case(400, headers=(*JSON_WITH, ("microbatch-deadline", "soon")), says="soon"),
    "an endless deadline": Case(400, headers=(*JSON_WITH, ("microbatch-deadline", "inf"))),
    "no deadline at all": Case(400, headers=(*JSON_WITH, ("microbatch-deadline", "nan"))),
    "a fraction of priority": Case(400, headers=(*JSON_WITH, ("microbatch-priority", "0.5")), says="priority"),
    "too much priority": Case(400, headers=(*JSON_WITH, ("microbatch-priority", "11"))),
    "neither many nor one": Case(400, headers=(*JSON_WITH, ("microbatch-many", "yes")), says="yes"),
    "an unknown path": Case(404, path="/predictions", says="/predict"),
    "an unknown engine": Case(404, path="/predict/other", says="model"),
    "GET": Case(405, method="GET", says="POST"),
    "DELETE by name": Case(405, method="DELETE", path="/predict/model", says="POST"),
    "POST to health": Case(405, path="/health", says="GET"),
    "an unknown answer": Case(406, headers=(*JSON_WITH, ("accept", "image/png")), says="image/png"),
    "no answer wanted": Case(406, headers=(*JSON_WITH, ("accept", "application/json;q=0"))),
    "a large body": Case(413, body=b"[" + b"1," * 600 + b"1]", says="at most"),
    "an announced large body": Case(413, headers=(*JSON_WITH, ("content-length", "99999"))),
    "no type": Case(415, headers=(), says="application/json"),
    "a form": Case(415, headers=of_type("application/x-www-form-urlencoded")),
    "a pickle": Case(415, headers=of_type("application/octet-stream")),
    "compressed": Case(415, headers=(*JSON_WITH, ("content-encoding", "gzip")), says="gzip"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_with_its_reason(name: str) -> None:
    case = REFUSED[name]
    reply = ask(
        doubling(body_limit=1000 if name != "deep" else 10**6), case.method, case.path, case.body, dict(case.headers)
    )
    error = refusal(reply)
    assert reply.status == case.status, error
    assert case.says in f"{error['message']} {error['remedy']}"
    if case.status == 405:
        assert reply.headers["allow"] in f"{error['remedy']}"


RAISED: dict[str, tuple[Exception, int, dict[str, str]]] = {
    "full": (Overloaded("4 of 4 wait.", "Later.", retry_after=2.6), 429, {"retry-after": "3"}),
    "full for less": (Overloaded("4 of 4 wait.", "Later.", retry_after=2.1), 429, {"retry-after": "2"}),
    "full for a moment": (Overloaded("4 of 4 wait.", "Later.", retry_after=0.0), 429, {"retry-after": "1"}),
    "late": (DeadlineExceeded("Too late.", "Give it more time."), 504, {}),
    "draining": (Draining("About to stop."), 503, {}),
    "dead": (WorkerDied("It died."), 503, {}),
    "another reason": (NotServed("No."), 503, {}),
    "too large": (RequestTooLarge("9 of 4."), 413, {}),
    "refused by the function": (InvalidBatch("A bad item."), 400, {}),
    "wrong output": (InvalidOutput("3 for 4."), 500, {}),
    "model": (ModelFailed("It failed."), 500, {}),
    "own": (ValueError("what?"), 500, {}),
    "silent": (KeyError(), 500, {}),
    "with a traceback": (RuntimeError('bad\nTraceback (most recent call last):\n  File "secret.py"'), 500, {}),
    "only a traceback": (RuntimeError('Traceback (most recent call last):\n  File "secret.py"'), 500, {}),
}


@pytest.mark.parametrize("name", RAISED)
def test_each_error_has_its_status_for_one_item_and_for_many(name: str) -> None:
    error, status, headers = RAISED[name]
    for body in ([1], {"items": [[1], [2]]}, {"items": [[1]], "stream": True}):
        reply = ask(application({"m": Refusing(error)}), "POST", "/predict", as_json(body), JSON_TYPE)
        assert reply.status == status
        assert refusal(reply)["type"] == type(error).__name__
        assert headers.items() <= reply.headers.items()


def failing(item: float) -> float:
    if item < 0:
        raise ValueError("below zero")
    return item


def test_among_many_only_the_bad_one_fails() -> None:
    app = application({"m": Instant(failing, (1.0,))})
    reply = ask(app, "POST", "/predict", as_json({"items": [1, -1, "x", 4]}), JSON_TYPE)
    assert reply.status == 200
    assert reply.json()["results"] == [1.0, None, None, 4.0]
    first, second = reply.json()["errors"]
    assert (first["index"], first["status"], first["error"]["message"]) == (1, 500, "below zero")
    assert (second["index"], second["status"]) == (2, 400)
    assert set(second["error"]) == {"type", "message", "remedy"}


@pytest.mark.parametrize(("items", "status"), [([-1, -2], 500), ([-1, "x"], 500), (["x"], 200), ([], 200)])
def test_a_request_of_which_nothing_came_says_whose_fault_it_was(items: list[Any], status: int) -> None:
    reply = ask(application({"m": Instant(failing, (1.0,))}), "POST", "/predict", as_json({"items": items}), JSON_TYPE)
    assert reply.status == status
    assert reply.json()["results"] == [None] * len(items)
    assert [error["index"] for error in reply.json()["errors"]] == list(range(len(items)))
    assert ("error" in reply.json()) == (status == 500)


def test_an_array_has_no_place_for_errors_so_the_first_one_is_the_answer() -> None:
    app = application({"m": Instant(failing, (1.0,))})
    headers = {"content-type": "application/x-npy", "microbatch-many": "true"}
    reply = ask(app, "POST", "/predict", npy(np.array([1.0, -1.0])), headers)
    assert refusal(reply) == {"type": "ValueError", "message": "below zero", "remedy": refusal(reply)["remedy"]}


@pytest.mark.parametrize("accept", ["application/x-npy", "application/safetensors"])
@pytest.mark.parametrize("result", ["text", {"a": "text"}, [[1], [1, 2]], None])
def test_a_result_that_does_not_fit_into_the_form_is_406(accept: str, result: Any) -> None:
    app = application({"m": Instant(lambda _: result)})
    reply = ask(app, "POST", "/predict", b"1", JSON_TYPE | {"accept": accept})
    assert reply.status == 406, refusal(reply)


def test_a_result_without_any_form_is_the_servers_fault() -> None:
    reply = ask(application({"m": Instant(lambda _: object())}), "POST", "/predict", b"1", JSON_TYPE)
    assert (reply.status, refusal(reply)["type"]) == (500, "InvalidOutput")


def test_results_of_several_tensors_have_their_names() -> None:
    result = {"a": torch.ones(2), "b": torch.ones(3, dtype=torch.bfloat16)}
    app = application({"m": Instant(lambda _: result)})
    assert ask(app, "POST", "/predict", b"1", JSON_TYPE).json() == {"result": {"a": [1.0, 1.0], "b": [1.0, 1.0, 1.0]}}
    reply = ask(app, "POST", "/predict", b"1", JSON_TYPE | {"accept": "application/safetensors"})
    assert {name: value.shape for name, value in safetensors.numpy.load(reply.body).items()} == {"a": (2,), "b": (3,)}


def test_headers_carry_deadline_and_priority() -> None:
    engine = Instant(lambda item: item)
    headers = JSON_TYPE | {"microbatch-deadline": "0.5", "microbatch-priority": "-3"}
    ask(application({"m": engine}, deadline=9.0), "POST", "/predict", b"1", headers)
    ask(application({"m": engine}, deadline=9.0), "POST", "/predict", b"2", JSON_TYPE)
    ask(application({"m": engine}), "POST", "/predict", b'{"items": [3, 4]}', JSON_TYPE)
    assert engine.asked == [(1, 0.5, -3), (2, 9.0, 0), (3, None, 0), (4, None, 0)]


def test_of_several_engines_one_is_named() -> None:
    app = application({"a": Instant(lambda item: item), "b/c": Instant(lambda item: -item)})
    assert ask(app, "POST", "/predict/a", b"1", JSON_TYPE).json() == {"result": 1}
    assert ask(app, "POST", "/predict/b/c", b"1", JSON_TYPE).json() == {"result": -1}
    reply = ask(app, "POST", "/predict", b"1", JSON_TYPE)
    assert reply.status == 404 and "a, b/c" in refusal(reply)["remedy"]


STREAMED = [({"accept": "application/x-ndjson"}, False), ({}, True), ({"accept": "text/event-stream"}, False)]


@pytest.mark.parametrize(("headers", "flag"), STREAMED)
def test_a_stream_has_one_document_for_each_item(headers: dict[str, str], flag: bool) -> None:
    body = {"items": [1, -1, "x", 4]} | ({"stream": True} if flag else {})
    reply = ask(application({"m": Instant(failing, (1.0,))}), "POST", "/predict", as_json(body), JSON_TYPE | headers)
    assert reply.status == 200
    assert "content-length" not in reply.headers
    documents = sorted(streamed(reply), key=lambda document: document["index"])
    assert [document.get("status", 200) for document in documents] == [200, 500, 400, 200]
    assert [document.get("result") for document in documents] == [1.0, None, None, 4.0]
    assert len(reply.parts) >= 4


def test_a_stream_sends_each_result_as_it_comes() -> None:
    """Nothing waits for the slowest item: the engine holds one back until the other has been seen."""

    class OneByOne(Instant):
        def __init__(self) -> None:
            super().__init__(lambda item: item)
            self.seen = asyncio.Event()

        async def submit_each(self, items: Any, *, deadline: float | None = None, priority: int = 0) -> Any:
            yield 1, "quick"
            await asyncio.wait_for(self.seen.wait(), 30)
            yield 0, "slow"

    async def main() -> list[bytes]:
        engine, sent = OneByOne(), list[bytes]()
        body = [{"type": "http.request", "body": b'{"items": [1, 2], "stream": true}', "more_body": False}]

        async def receive() -> dict[str, Any]:
            if body:
                return body.pop()
            await asyncio.sleep(60)
            raise AssertionError

        async def send(message: dict[str, Any]) -> None:
            sent.append(message.get("body", b""))
            if b"quick" in sent[-1]:
                engine.seen.set()

        scope = {
            "type": "http", "method": "POST", "path": "/predict", "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }  # fmt: skip
        await application({"m": engine})(scope, receive, send)
        return sent

    lines = b"".join(asyncio.run(main())).splitlines()
    assert [json.loads(line) for line in lines] == [{"index": 1, "result": "quick"}, {"index": 0, "result": "slow"}]


def test_a_client_that_goes_takes_its_work_with_it() -> None:
    async def main() -> Waiting:
        engine = Waiting()
        gone = asyncio.Event()
        body = [{"type": "http.request", "body": b"1", "more_body": False}]

        async def receive() -> dict[str, Any]:
            if body:
                return body.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            raise AssertionError(message)

        scope = {
            "type": "http", "method": "POST", "path": "/predict", "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }  # fmt: skip
        task = asyncio.create_task(application({"m": engine})(scope, receive, send))
        while not engine.asked:
            await asyncio.sleep(0)
        assert not task.done()
        gone.set()
        assert await asyncio.wait({task}, timeout=30) == ({task}, set())
        return engine

    assert asyncio.run(main()).cancelled == 1


def test_a_cancelled_server_task_is_no_vanished_client() -> None:
    async def main() -> None:
        engine = Waiting()
        task = asyncio.create_task(answered(application({"m": engine}), "POST", "/predict", b"1", JSON_TYPE))
        while not engine.asked:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.cancelled == 1

    asyncio.run(main())


def test_keys_are_asked_for_where_there_are_some() -> None:
    app = doubling(keys=["correct-horse", "battery-staple"])
    body = as_json([1, 2, 3, 4])
    for headers in ({"authorization": "Bearer battery-staple"}, {"x-api-key": "correct-horse"}):
        assert ask(app, "POST", "/predict", body, JSON_TYPE | headers).status == 200
    for headers in ({}, {"authorization": "Bearer wrong-horse"}, {"authorization": "Basic battery-staple"}):
        reply = ask(app, "POST", "/predict", body, JSON_TYPE | headers)
        assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
        assert "horse" not in reply.body.decode()
    assert ask(app, "GET", "/health").status == ask(app, "GET", "/ready").status == 200


NAMES = st.text(max_size=8) | st.sampled_from(["item", "items", "stream"])
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
FUZZED = [
    doubling(),
    application({"m": Instant(lambda item: item, ())}),
    application({"m": Instant(lambda item: item, ("text",))}),
    application({"m": Instant(lambda item: item, ({"a": torch.zeros(2), "b": [1]},))}),
]


@given(st.sampled_from(FUZZED), st.sampled_from(sorted(FORMS)), st.binary(max_size=200), st.booleans())
@settings(max_examples=200)
def test_no_bytes_are_a_fault_of_the_server(app: Application, kind: str, body: bytes, many: bool) -> None:
    headers = {"content-type": kind, "accept": "application/json"} | ({"microbatch-many": "true"} if many else {})
    never_a_fault(ask(app, "POST", "/predict", body, headers))


@given(st.sampled_from(FUZZED), JSON_VALUES)
@settings(max_examples=200)
def test_no_document_is_a_fault_of_the_server(app: Application, value: Any) -> None:
    never_a_fault(ask(app, "POST", "/predict", json.dumps(value).encode("utf-8", "surrogatepass"), JSON_TYPE))
    packed = {"content-type": "application/msgpack"}
    try:
        body = msgspec.msgpack.encode(value)
    except (UnicodeEncodeError, OverflowError):
        return
    never_a_fault(ask(app, "POST", "/predict", body, packed))


@given(st.data(), st.sampled_from(sorted(FORMS)))
@settings(max_examples=200)
def test_a_damaged_body_is_no_fault_of_the_server(data: st.DataObject, kind: str) -> None:
    body = bytearray(FORMS[kind].one)
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    reply = ask(FUZZED[data.draw(st.integers(0, 3))], "POST", "/predict", bytes(body), {"content-type": kind})
    never_a_fault(reply)


def never_a_fault(reply: Reply) -> None:
    assert reply.status in (200, 400, 406), reply
    assert b"Traceback" not in reply.body
    if reply.status != 200:
        refusal(reply)


def refusal(reply: Reply) -> dict[str, str]:
    """The error that was sent, in the form that all have, without a trace of where it happened."""
    assert reply.headers["content-type"] == "application/json"
    assert b"Traceback" not in reply.body and b"secret.py" not in reply.body
    error: dict[str, str] = reply.json()["error"]
    assert set(error) == {"type", "message", "remedy"}
    assert error["message"]
    return error


def streamed(reply: Reply) -> list[dict[str, Any]]:
    """The documents of a stream, whichever way they are framed."""
    if reply.headers["content-type"] == "application/x-ndjson":
        return [json.loads(line) for line in reply.body.splitlines()]
    *events, done = reply.body.decode().split("\n\n")[:-1]
    assert done == "event: done\ndata: {}"
    return [json.loads(event.removeprefix("data: ")) for event in events]
