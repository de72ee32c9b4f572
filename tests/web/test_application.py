"""The application around its routes: settings, life and death, health, keys, paths."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from microbatch.errors import InvalidModel, InvalidSettings
from microbatch.web.application import application
from microbatch.web.keys import Keys
from microbatch.web.response import Response
from microbatch.web.routes import Route, Router
from tests.web.asking import JSON_TYPE, ask
from tests.web.engines import Instant


def echo(**options: Any) -> Any:
    return application({"model": Instant(lambda item: item)}, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"body_limit": 0}, "body_limit=0"),
        ({"body_timeout": 0.0}, "body_timeout=0"),
        ({"deadline": -1.0}, "deadline=-1"),
        ({"keys": ["short"]}, "5 characters"),
        ({"keys": ["with a space in it"]}, "18 characters"),
        ({"body_limit": 0, "deadline": 0.0}, "body_limit=0.*deadline=0"),
    ],
)
def test_settings_that_make_no_sense_are_one_error(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidSettings, match=says):
        echo(**options)


@pytest.mark.parametrize("engines", [{}, {"": None}, {"/x": None}])
def test_engines_have_names(engines: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettings):
        application({name: Instant(lambda item: item) for name in engines})


def test_readiness_follows_the_engines() -> None:
    good, bad = Instant(lambda item: item), Instant(lambda item: item, ready=False)
    app = application({"good": good, "bad": bad})
    reply = ask(app, "GET", "/ready")
    assert (reply.status, reply.json()) == (503, {"ready": False, "engines": {"good": True, "bad": False}})
    assert ask(app, "GET", "/health").status == 200
    bad.ready = True
    assert ask(app, "GET", "/ready").json()["ready"] is True
    app.stop()
    assert ask(app, "GET", "/ready").status == 503


def test_the_life_of_the_application_is_the_life_of_its_engines() -> None:
    engine = Instant(lambda item: item)
    sent = asyncio.run(lived(application({"model": engine})))
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert engine.started and engine.drained


def test_an_engine_that_cannot_start_says_why() -> None:
    class Broken(Instant):
        def start(self) -> Instant:
            raise InvalidModel("There is no model.", "Name one.")

    assert asyncio.run(lived(application({"model": Broken(lambda item: item)}))) == [
        "lifespan.startup.failed: There is no model. Name one."
    ]


async def lived(app: Any) -> list[str]:
    """What an application says at its start and its end."""
    sent: list[str] = []
    events = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]

    async def receive() -> dict[str, Any]:
        return events.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(": ".join(filter(None, [message["type"], message.get("message", "")])))

    await app({"type": "lifespan"}, receive, send)
    return sent


def test_a_web_socket_is_closed() -> None:
    async def main() -> list[str]:
        sent: list[str] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message["type"])

        await echo()({"type": "websocket", "path": "/"}, None, send)
        return sent

    assert asyncio.run(main()) == ["websocket.close"]


def test_streams_learn_that_the_end_is_near() -> None:
    async def main() -> tuple[bool, bool]:
        app = echo()
        asyncio.get_running_loop().call_later(0.01, app.stop)
        return await app.stops_within(0.0), await app.stops_within(60.0)

    assert asyncio.run(main()) == (False, True)


async def nothing(request: Any) -> Response:
    return Response(200, request.parameters.get("name", "").encode())


ROUTER = Router(
    [
        Route("GET", "/a", nothing, lambda _: None),
        Route("POST", "/a", nothing, lambda _: None),
        Route("POST", "/a/{name}", nothing, lambda _: None),
    ]
)


@pytest.mark.parametrize(
    ("method", "path", "found"),
    [
        ("GET", "/a", {}),
        ("HEAD", "/a", {}),
        ("POST", "/a/b", {"name": "b"}),
        ("POST", "/a/b/c", {"name": "b/c"}),
    ],
)
def test_a_path_finds_its_row(method: str, path: str, found: dict[str, str]) -> None:
    assert ROUTER.find(method, path)[1] == found


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("PUT", "/a", 405, b"GET, HEAD, POST"),
        ("GET", "/a/b", 405, b"POST"),
        ("POST", "/a/", 404, b""),
        ("GET", "/", 404, b""),
        ("GET", "", 404, b""),
        ("GET", "/A", 404, b""),
    ],
)
def test_a_path_without_a_row_says_what_there_is(method: str, path: str, status: int, allow: bytes) -> None:
    from microbatch.errors import InvalidRequest

    with pytest.raises(InvalidRequest) as caught:
        ROUTER.find(method, path)
    assert caught.value.status == status
    assert dict(caught.value.headers).get(b"allow", b"") == allow


def test_head_is_get() -> None:
    assert ask(echo(), "HEAD", "/health").status == 200


def test_keys_are_shown_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    keys = Keys({"correct-horse": "alice"})
    assert keys.tenant(b"Bearer correct-horse", b"") == keys.tenant(b"", b"correct-horse") == "alice"
    assert "horse" not in repr(keys) + repr(vars(keys))
    app = echo(keys=["correct-horse"])
    ask(app, "POST", "/predict", b"1", JSON_TYPE | {"authorization": "Bearer other-horse"})
    ask(app, "POST", "/predict", b"1", JSON_TYPE | {"authorization": "Bearer correct-horse"})
    assert "horse" not in caplog.text


@pytest.mark.parametrize(
    "header",
    [b"", b"Bearer", b"Bearer ", b"Bearer correct-horse2", b"Basic correct-horse", b"correct-horse", b"\xff\xff"],
)
def test_another_key_is_none(header: bytes) -> None:
    from microbatch.errors import InvalidRequest

    with pytest.raises(InvalidRequest) as caught:
        Keys(["correct-horse"]).tenant(header, b"")
    assert caught.value.status == 401


def test_what_fails_in_the_function_is_in_the_log_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    def fail(item: Any) -> Any:
        raise ValueError("what?")

    ask(application({"m": Instant(fail)}), "POST", "/predict", b"1", JSON_TYPE)
    assert "what?" in caplog.text and "Traceback" in caplog.text
