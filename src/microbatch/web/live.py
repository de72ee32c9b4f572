"""The live page at `/` and its events: what `live_view` says of every model, once per second while somebody looks.

One look is shared by all viewers. Nothing runs for it in between: who looks first after a second pays for all.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import msgspec
from jinja2 import Environment, StrictUndefined

from microbatch import __version__
from microbatch.palette import PALETTES
from microbatch.serving.decisions.metrics import Metrics
from microbatch.web.engine_metrics import metrics_of, text_metrics_of
from microbatch.web.live_text import text_look_at, text_view_of
from microbatch.web.live_view import SHOWN, WINDOW, look_at, starting, view_of
from microbatch.web.request import Request
from microbatch.web.response import Response
from microbatch.web.routes import Route
from microbatch.web.statuses import Headers
from microbatch.web.text_engine import AnyEngine

if TYPE_CHECKING:
    from microbatch.llm.metrics import LLMMetrics
    from microbatch.web.application import Application

PAUSE = 1.0
"""Seconds between two events of a viewer."""
FRESH = 0.9 * PAUSE
"""A look serves all viewers for so long."""
FIRST = 0.25
"""Seconds after which rates are told to a first viewer, who has nothing to compare with."""


class Live:
    """The looks of the last minute at some engines.

    Not for several threads: all its viewers are on one event loop.
    """

    def __init__(self, engines: Mapping[str, AnyEngine], clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            engines: by the name of the model.
            clock: in seconds.
        """
        self._engines, self._clock = engines, clock
        self._looks: dict[str, deque[Any]] = {}
        self._taken = -float("inf")
        self._alone = False
        self._event = b""

    @property
    def pause(self) -> float:
        """Seconds until the next event is worth sending."""
        return FIRST if self._alone else PAUSE

    def event(self, *, stopping: bool = False) -> bytes:
        """What all viewers are shown now, as an event of a stream.

        Args:
            stopping: the server is about to stop, whatever the engines know of it.
        """
        now = self._clock()
        if stopping or now - self._taken >= min(self.pause, FRESH):
            if now - self._taken > WINDOW:  # nobody has looked: what was then is no history of the last minute
                self._looks.clear()
            self._alone = not self._looks
            self._taken = now
            self._event = b"data: " + msgspec.json.encode({"models": self._views(stopping)}) + b"\n\n"
        return self._event

    def _views(self, stopping: bool) -> list[dict[str, Any]]:
        items, texts = metrics_of(self._engines), text_metrics_of(self._engines)
        return [
            *(starting(name) if one is None else self._view(name, one, stopping) for name, one in items.items()),
            *(starting(name) if one is None else self._text_view(name, one, stopping) for name, one in texts.items()),
        ]

    def _view(self, name: str, metrics: Metrics, stopping: bool) -> dict[str, Any]:
        metrics = replace(metrics, draining=metrics.draining or stopping)
        looks = self._looks_at(name)
        looks.append(look_at(metrics, looks[-1] if looks else None))
        return view_of(name, metrics, list(looks))

    def _text_view(self, name: str, metrics: LLMMetrics, stopping: bool) -> dict[str, Any]:
        metrics = replace(metrics, draining=metrics.draining or stopping)
        looks = self._looks_at(name)
        looks.append(text_look_at(metrics))
        return text_view_of(name, metrics, list(looks))

    def _looks_at(self, name: str) -> deque[Any]:
        return self._looks.setdefault(name, deque(maxlen=SHOWN + 1))


async def page(_: Request) -> Response:
    """The page; it holds nothing that a key would protect."""
    body, headers = rendered()
    return Response(200, body, "text/html; charset=utf-8", headers)


async def events(request: Request) -> Response:
    """What the page shows, as long as somebody looks and the server runs."""
    headers = ((b"x-accel-buffering", b"no"),)
    body = b"" if request.scope["method"] == "HEAD" else _stream(request)
    return Response(200, body, "text/event-stream", headers)


async def _stream(request: Request) -> AsyncIterator[bytes]:
    live = _live_of(request.application)
    yield live.event()
    while await request.pause(live.pause):
        yield live.event()
    yield live.event(stopping=True)


def _live_of(application: Application) -> Live:
    found = _LIVE.get(application)
    if found is None:
        found = _LIVE[application] = Live(application.engines)
    return found


_LIVE: WeakKeyDictionary[Application, Live] = WeakKeyDictionary()


@lru_cache(maxsize=1)
def rendered() -> tuple[bytes, Headers]:
    """The page with its style and script inside, and the policy that lets a browser run these two and nothing else."""
    room = files("microbatch.web")
    parts = {name: room.joinpath(f"live.{name}").read_text(encoding="utf-8") for name in ("css", "js")}
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    style = environment.from_string(parts["css"]).render(light=PALETTES["light"], dark=PALETTES["dark"])
    template = environment.from_string(room.joinpath("live.html.jinja").read_text(encoding="utf-8"))
    text = template.render(style=style, script=parts["js"], version=__version__)
    return text.encode(), _headers(style, parts["js"])


def _headers(style: str, script: str) -> Headers:
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    )
    return (
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cache-control", b"no-cache"),
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _undocumented(_: Application) -> None:
    """For people, not for programs."""


ROUTES = (
    Route("GET", "/", page, _undocumented, open=True),
    Route("GET", "/live", events, _undocumented),
)
