"""The body of a request, read within bounds of size and time."""

from __future__ import annotations

from typing import Any

from microbatch.errors import InvalidRequest
from microbatch.units import format_bytes, format_seconds


class ClientGone(Exception):
    """The connection was closed before the whole request had come; there is nobody to answer."""


async def read_body(receive: Any, declared: bytes, limit: int) -> bytes:
    """The whole body. Its time is bounded by `microbatch.web.watch.Watch`, which needs a timer anyway.

    Args:
        receive: of ASGI.
        declared: the length that the headers announce; empty for none.
        limit: bytes.

    Raises:
        InvalidRequest: too large (413), said before it is read where the length is declared.
        ClientGone: half of it came.
    """
    if declared and declared.isdigit() and int(declared) > limit:
        raise _too_large(int(declared), limit)
    parts, size = list[bytes](), 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(size, limit)
        if not message.get("more_body", False):
            return b"".join([*parts, part]) if parts else part
        parts.append(part)


def too_slow(timeout: float) -> InvalidRequest:
    """The error of a body that does not come (408)."""
    return InvalidRequest(
        f"The body did not come within {format_seconds(timeout)}.", "Send it faster, or in smaller parts.", status=408
    )


def _too_large(size: int, limit: int) -> InvalidRequest:
    return InvalidRequest(
        f"The body has {format_bytes(size)} or more; at most {format_bytes(limit)} are taken.",
        "Send fewer items at a time, or start the server with a larger limit for bodies.", status=413,
    )  # fmt: skip
