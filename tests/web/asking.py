"""Asks an ASGI application in this process, and a real server over its socket, with the standard library alone."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

JSON_TYPE = {"content-type": "application/json"}


@dataclass(frozen=True)
class Reply:
    """What came back.

    Attributes:
        status: of HTTP.
        headers: names in lower case.
        body: all of it.
        parts: as they came.
    """

    status: int
    headers: dict[str, str]
    body: bytes
    parts: tuple[bytes, ...] = ()

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


def ask(
    app: Any, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None, *, size: int = 0
) -> Reply:
    """Ask an application in this process.

    Args:
        app: of ASGI.
        method, path, body, headers: of the request.
        size: bytes in each part of the body; all at once by default.
    """
    return asyncio.run(answered(app, method, path, body, headers, size=size))


async def answered(
    app: Any, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None, *, size: int = 0
) -> Reply:
    """The same within an event loop."""
    step = size or max(1, len(body))
    parts = [body[at : at + step] for at in range(0, len(body), step)] or [b""]
    sent: list[dict[str, Any]] = []
    finished = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if not parts:
            await finished.wait()
            return {"type": "http.disconnect"}
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    path, _, query = path.partition("?")
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": query.encode(),
        "headers": [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in (headers or {}).items()],
        "http_version": "1.1", "scheme": "http", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip
    await app(scope, receive, send)
    finished.set()
    assert sent[0]["type"] == "http.response.start"
    assert not sent[-1].get("more_body", False)
    assert [message["type"] for message in sent[1:]] == ["http.response.body"] * (len(sent) - 1)
    bodies = tuple(message.get("body", b"") for message in sent[1:])
    named = {name.decode(): value.decode("latin-1") for name, value in sent[0]["headers"]}
    return Reply(sent[0]["status"], named, b"".join(bodies), bodies)


def fetch(
    url: str,
    method: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    *,
    timeout: float = 60.0,
) -> Reply:
    """Ask a real server."""
    connection = connect(url, timeout=timeout)
    try:
        connection.request(method, path, body, dict(headers or {}))
        response = connection.getresponse()
        named = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, named, response.read())
    finally:
        connection.close()


def connect(url: str, *, timeout: float = 60.0) -> http.client.HTTPConnection:
    """A connection to a real server."""
    parts = urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)


def as_json(value: Any) -> bytes:
    """A JSON body."""
    return json.dumps(value).encode()
