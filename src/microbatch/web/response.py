"""What a handler gives back, and how it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from microbatch.web.plain import to_json
from microbatch.web.statuses import Headers

JSON = "application/json"

STALLED = 30.0
"""Seconds that a client may take nothing of a stream before it is cut off."""


class Response(NamedTuple):
    """Of one request.

    Attributes:
        status: of HTTP.
        body: all of it, or its parts as they come.
        content_type: of the body.
        headers: further ones, names in lower case.
    """

    status: int = 200
    body: bytes | AsyncIterator[bytes] = b""
    content_type: str = JSON
    headers: Headers = ()


def json_response(value: Any, status: int = 200, headers: Headers = ()) -> Response:
    """A JSON document; tensors, arrays and dataclasses are welcome."""
    return Response(status, to_json(value), JSON, headers)


async def send_response(response: Response, send: Any) -> None:
    """Send a response over ASGI.

    Raises:
        TimeoutError: the client does not read the stream.
    """
    status, body, content_type, further = response
    headers = [(b"content-type", content_type.encode("latin-1")), *further]
    if isinstance(body, bytes):
        headers.append((b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        return
    headers.append((b"cache-control", b"no-store"))
    try:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        async for part in body:
            async with asyncio.timeout(STALLED):
                await send({"type": "http.response.body", "body": part, "more_body": True})
    finally:
        await close(body)
    await send({"type": "http.response.body", "body": b""})


async def close(parts: Any) -> None:
    """A generator that is left before its end gives back what it holds."""
    if (aclose := getattr(parts, "aclose", None)) is not None:
        await aclose()
