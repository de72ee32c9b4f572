"""One ASGI application over any number of engines: finds the route, runs its handler, answers errors.

It needs no server in particular; `microbatch.web.server` runs it under the one that was measured to be the best.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from microbatch.errors import Draining, InvalidSettings
from microbatch.serving.engine.gate import share_cpu as take_turns
from microbatch.web.bodies import ClientGone, too_slow
from microbatch.web.direct import lanes_of
from microbatch.web.items import form_of
from microbatch.web.keys import Keys
from microbatch.web.request import Request
from microbatch.web.response import Response, close, json_response, send_response
from microbatch.web.routes import Route, Router
from microbatch.web.statuses import answer_to, note, own_form
from microbatch.web.text_engine import AnyEngine, generates_text
from microbatch.web.watch import Watch

LAST_WORD = 1.0
"""Seconds for engines to end when nobody waits for them any more."""
BODY_LIMIT = 16 * 2**20
BODY_TIMEOUT = 30.0
ROOMS = (
    "http", "health", "openapi", "metrics", "live", "openai_embeddings", "openai_completions", "openai_chat",
    "openai_models",
)  # fmt: skip
"""Modules of this package that have ``ROUTES``."""

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
_STOPPING = Draining("The server is about to stop.", "Send the request to another server.")


class Application:
    """An ASGI application.

    Attributes:
        engines: by the names under which they are served.
        forms: of the items of each engine that takes items; one that generates text does not.
        routes: all rows.
        body_limit: bytes of a request's body.
        body_timeout: seconds for it to come.
        deadline: seconds, for requests that name none; None for no limit.
        keyed: whether requests need a key.
        title: of the server, in its documents and pages.
        stopping: about to stop; streams are to end.
        lanes: the short way of the commonest requests, by their path.
        answers: responses by the path of their route, empty where there is none, and by their status.
    """

    def __init__(
        self,
        engines: Mapping[str, AnyEngine],
        routes: Iterable[Route],
        *,
        keys: Iterable[str] | Mapping[str, str] = (),
        body_limit: int = BODY_LIMIT,
        body_timeout: float = BODY_TIMEOUT,
        deadline: float | None = None,
        title: str = "microbatch",
    ) -> None:
        self.engines: dict[str, Any] = dict(engines)
        self.forms = {name: form_of(engine) for name, engine in self.engines.items() if not generates_text(engine)}
        self.routes = tuple(routes)
        self.body_limit, self.body_timeout, self.deadline, self.title = body_limit, body_timeout, deadline, title
        self.stopping = False
        self.answers: Counter[tuple[str, int]] = Counter()
        self._stop = asyncio.Event()
        self._keys = Keys(keys)
        self._router = Router(self.routes)
        self.lanes = lanes_of(self)

    @property
    def keyed(self) -> bool:
        """Whether requests need a key."""
        return bool(self._keys)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        kind = scope["type"]
        if kind == "http":
            await self._answer(scope, receive, send)
        elif kind == "lifespan":
            await self._live(receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    def start(self) -> None:
        """Start every engine, in this thread.

        Raises:
            MicrobatchError: what the first engine raises that cannot start.
        """
        for engine in self.engines.values():
            engine.start()

    def stop(self) -> None:
        """Say that the end is near: `Request.pause` wakes up, and readiness ends."""
        self.stopping = True
        self._stop.set()

    async def drain(self, timeout: float | None = None) -> None:
        """Answer what waits in every engine, and stop them.

        Args:
            timeout: seconds after which what still waits is answered with `Draining`.
        """
        await asyncio.gather(*(engine.drain(timeout) for engine in self.engines.values()))

    async def stops_within(self, seconds: float) -> bool:
        """Wait so long, or until the end is near; whether it is."""
        try:
            await asyncio.wait_for(self._stop.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def _answer(self, scope: Scope, receive: Any, send: Any) -> None:
        row: Route | None = None
        watch: Watch | None = None
        try:
            row, parameters = self._router.find(scope["method"], scope["path"])
            request = self._request(row, scope, receive, parameters)
            with Watch(request) as watch:
                request.watch = watch
                response = await row.handler(request)
                if not isinstance(response.body, bytes):
                    self.answers[row.path, response.status] += 1
                    await self._stream(response, scope, send)
                    return
        except asyncio.CancelledError:
            if watch is not None and watch.gone:
                return
            if watch is not None and watch.slow:
                response = self._refusal(too_slow(self.body_timeout), row, _named(scope))
            elif self.stopping:
                response = self._refusal(_STOPPING, row, _named(scope))
            else:
                raise
        except ClientGone:
            return
        except Exception as error:
            response = self._refusal(error, row or self._row_at(scope["path"]), _named(scope))
        self.answers[row.path if row else "", response.status] += 1
        await send_response(response, send)

    def answered(self, path: str, answer: bytes | Exception) -> Response:
        """The response to a request on the short way.

        Args:
            path: of its route.
            answer: the body, or what went wrong.
        """
        if isinstance(answer, Exception):
            response = self._refusal(answer, None, f"POST {path}")
        else:
            response = Response(200, answer)
        self.answers[path, response.status] += 1
        return response

    async def _stream(self, response: Response, scope: Scope, send: Any) -> None:
        """Parts as they come. What fails in between can only end the connection, which is what returning does."""
        if scope["method"] == "HEAD":
            await close(response.body)
            await send_response(response._replace(body=b""), send)
            return
        try:
            await send_response(response, send)
        except asyncio.CancelledError:
            if not self.stopping:
                raise
        except TimeoutError:
            logger.info("%s: the client does not read", scope["path"])
        except Exception as error:
            note(error, scope["path"])

    def _request(self, row: Route, scope: Scope, receive: Any, parameters: Mapping[str, str]) -> Request:
        request = Request(self, scope, receive, parameters)
        if self._keys and not row.open:
            request.tenant = self._keys.tenant(request.header(b"authorization"), request.header(b"x-api-key"))
        return request

    def _refusal(self, error: Exception, row: Route | None, what: str) -> Response:
        note(error, what)
        answer = answer_to(error)
        document = (row.error_body if row else own_form)(answer)
        return json_response(document, answer.status, answer.headers)

    def _row_at(self, path: str) -> Route | None:
        """A row whose form of errors a refused method of its path is told in."""
        return next(iter(self._router.at(path)), None)

    async def _live(self, receive: Any, send: Any) -> None:
        """Start and end with the server, as ASGI's lifespan has it."""
        await receive()
        try:
            await asyncio.to_thread(self.start)
        except Exception as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self.stop()
        await self.drain(LAST_WORD)
        await send({"type": "lifespan.shutdown.complete"})


def _named(scope: Scope) -> str:
    return f"{scope['method']} {scope['path']}"


def application(
    engines: Mapping[str, AnyEngine],
    *,
    keys: Iterable[str] | Mapping[str, str] = (),
    body_limit: int = BODY_LIMIT,
    body_timeout: float = BODY_TIMEOUT,
    deadline: float | None = None,
    title: str = "microbatch",
    share_cpu: bool = True,
) -> Application:
    """The application with all routes there are.

    Args:
        engines: by the names under which they are served; names go into paths.
        keys: that clients must have, or from each key to the name of whose it is; none lets everybody in.
        body_limit: bytes of a request's body.
        body_timeout: seconds for it to come.
        deadline: seconds, for requests that name none.
        title: of the server, in its documents and pages.
        share_cpu: several engines on the CPU take turns, see `microbatch.serving.engine.gate`.

    Raises:
        InvalidSettings: no engine, or settings out of their range, all in one error.
    """
    _check(engines, body_limit, body_timeout, deadline)
    if share_cpu:
        take_turns(engines.values())
    return Application(
        engines, all_routes(), keys=keys, body_limit=body_limit, body_timeout=body_timeout, deadline=deadline,
        title=title,
    )  # fmt: skip


def all_routes() -> tuple[Route, ...]:
    """The rows of every module that has some."""
    modules = (importlib.import_module(f"microbatch.web.{room}") for room in ROOMS)
    return tuple(row for module in modules for row in module.ROUTES)


def _check(engines: Mapping[str, AnyEngine], body_limit: int, body_timeout: float, deadline: float | None) -> None:
    wrong = []
    if not engines:
        wrong.append("There is no engine to serve.")
    wrong += [f"An engine cannot be called {name!r}." for name in engines if not name or name.strip("/") != name]
    if body_limit < 1:
        wrong.append(f"body_limit={body_limit} lets no body in.")
    if body_timeout <= 0:
        wrong.append(f"body_timeout={body_timeout} gives no time.")
    if deadline is not None and deadline <= 0:
        wrong.append(f"deadline={deadline} has passed already.")
    if wrong:
        raise InvalidSettings(" ".join(wrong), "Give engines by name, and limits above zero.")
