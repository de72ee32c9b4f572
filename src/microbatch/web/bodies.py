"""The body of a request, read within bounds of size and time."""

from __future__ import annotations

import asyncio
from typing import Any

from microbatch.errors import InvalidRequest
from microbatch.units import format_bytes, format_seconds


class ClientGone(Exception):
    """The connection was closed before the whole request had come; there is nobody to answer."""


async def read_body(receive: Any, declared: bytes, limit: int, timeout: float) -> bytes:
    """The whole body.

    Args:
        receive: of ASGI.
        declared: the length that the headers announce; empty for none.
        limit: bytes.
        timeout: seconds for all of it.

    Raises:
        InvalidRequest: too large (413), said before it is read where the length is declared, or too slow (408).
        ClientGone: half of it came.
    """
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(int(declared), limit)
    try:
        async with asyncio.timeout(timeout):
            return await _read(receive, limit)
    except TimeoutError:
        raise InvalidRequest(
            f"The body did not come within {format_seconds(timeout)}.", "Send it faster, or in smaller parts.",
            status=408,
        ) from None  # fmt: skip


async def _read(receive: Any, limit: int) -> bytes:
    parts, size = list[bytes](), 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(size, limit)
        parts.append(part)
        if not message.get("more_body", False):
            return part if len(parts) == 1 else b"".join(parts)


def _too_large(size: int, limit: int) -> InvalidRequest:
    return InvalidRequest(
        f"The body has {format_bytes(size)} or more; at most {format_bytes(limit)} are taken.",
        "Send fewer items at a time, or start the server with a larger limit for bodies.", status=413,
    )  # fmt: skip
