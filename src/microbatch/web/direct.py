"""The short way for the commonest request: one small JSON item for an engine, with no header that asks for more.

A connection of our own server hands it to the engine and writes the answer when it is there, with no task, no messages
of ASGI and no timers in between: up to three times as many requests on a busy core (docs/decisions.md). The bytes are
those of `microbatch.web.http.predict`; whatever is unusual, be it only a body in two parts, goes the long way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from microbatch.web.codecs import CODECS
from microbatch.web.http import LARGE, read, weight
from microbatch.web.items import Form, blamed
from microbatch.web.tenants import HEADER
from microbatch.web.watch import GONE

if TYPE_CHECKING:
    from microbatch.web.application import Application

PATH = b"/predict"
NEVER: frozenset[bytes] = frozenset()
DIRECT: dict[bytes, frozenset[bytes]] = {
    b"accept": frozenset({b"*/*", b"application/json", b"application/json, text/plain, */*"}),
    b"content-encoding": frozenset({b"identity"}),
    b"content-type": frozenset(
        {b"application/json", b"application/json; charset=utf-8", b"application/json;charset=utf-8"}
    ),
    b"expect": NEVER,
    b"microbatch-deadline": NEVER,
    b"microbatch-many": frozenset({b"false"}),
    b"microbatch-priority": NEVER,
    b"transfer-encoding": NEVER,
    b"upgrade": NEVER,
    HEADER: NEVER,
}
"""Headers that may make a request unusual, and the values that do not."""
JSON = CODECS[0]

Post = Callable[[Any, Callable[[Any], None]], Callable[[], None] | None]
Headers = Iterable[tuple[bytes, bytes]]


class Lane:
    """The short way to one engine.

    Attributes:
        path: of its route.
    """

    __slots__ = ("_form", "_post", "path")

    def __init__(self, path: str, form: Form, post: Post) -> None:
        """
        Args:
            path: of its route, for the metrics.
            form: of its items.
            post: of the engine, see `DynamicBatcher.post`.
        """
        self.path, self._form, self._post = path, form, post

    def post(self, body: bytes, answered: Callable[[bytes | Exception], None]) -> Callable[[], None] | None:
        """Hand the item of a body over.

        Args:
            body: of the request.
            answered: is told the body of the answer, or what went wrong.

        Returns:
            How to withdraw it; None where the request is to go the long way.

        Raises:
            MicrobatchError: the engine does not take it.
        """
        form = self._form
        try:
            asked = read(body, JSON, form)
        except Exception:
            return None
        item = asked.items[0] if asked.items else None
        if asked.many or asked.stream or isinstance(item, Exception):
            return None

        def told(result: Any) -> None:
            try:
                large = not isinstance(result, Exception) and weight(result) >= LARGE
            except Exception as error:  # a result that is like nothing known
                answered(error)
                return
            if large:
                encoded = asyncio.get_running_loop().run_in_executor(None, _answer, result, form, item)
                encoded.add_done_callback(lambda done: answered(done.result()))
            else:
                answered(_answer(result, form, item))

        return self._post(item, told)


def _answer(result: Any, form: Form, item: Any) -> bytes | Exception:
    """The body, or what went wrong: who calls has others to answer as well."""
    try:
        result = blamed(result, form, item)
        return result if isinstance(result, Exception) else JSON.encode({"result": result})
    except Exception as error:
        return error


class Quiet:
    """In the place of the event that a task of uvicorn waits for: here nobody waits."""

    def set(self) -> None:
        """Nothing to do."""


class Cycle:
    """One request on the short way, with what uvicorn asks of a request under way.

    Attributes:
        lane: that it takes.
        body: all of it.
        keep_alive: whether the connection stays open afterwards.
        listens: reading goes on although further requests wait behind it, or its client could not be seen to go.
        response_complete: it has been answered.
        disconnected: its client has gone.
        scope: only who is to be told that the client has gone.
    """

    __slots__ = ("body", "disconnected", "keep_alive", "lane", "listens", "more_body", "response_complete", "scope")

    message_event = Quiet()

    def __init__(self, lane: Lane) -> None:
        self.lane, self.body, self.keep_alive = lane, b"", True
        self.more_body = True
        self.listens = self.response_complete = self.disconnected = False
        self.scope: dict[str, dict[str, list[Callable[[], None]]]] = {"extensions": {GONE: []}}


def lanes_of(application: Application) -> dict[bytes, Lane]:
    """The lanes of an application, by the path of a request; none where each request is looked at for more."""
    if application.keyed or application.deadline is not None or application.body_limit < LARGE:
        return {}
    able = {name: post for name, engine in application.engines.items() if (post := getattr(engine, "post", None))}
    lanes = {b"%s/%s" % (PATH, name.encode()): Lane("/predict/{name}", application.forms[name], post)
             for name, post in able.items() if quote(name, safe="") == name}  # fmt: skip
    if len(application.engines) == 1:
        for name, post in able.items():
            lanes[PATH] = Lane("/predict", application.forms[name], post)
    return lanes


def is_plain(headers: Headers) -> bool:
    """Whether no header asks for anything but JSON for JSON, of a small body whose size is known."""
    small = typed = False
    for name, value in headers:
        if name == b"content-length":
            small = len(value) < _DIGITS
        elif (allowed := DIRECT.get(name)) is not None:
            if value not in allowed:
                return False
            typed = typed or name == b"content-type"
    return small and typed


_DIGITS = len(str(LARGE))
