"""A server that answers as a test tells it: on time, late, wrong, or by hanging up. Real sockets, in a thread."""

from __future__ import annotations

import asyncio
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field


def reply(status: int = 200, body: bytes = b"{}", headers: str = "") -> bytes:
    """A whole answer of HTTP."""
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


@dataclass
class Scripted:
    """A running server.

    Attributes:
        url: where it answers.
        requests: each as it came, head and body.
        connections: that were opened.
        most: requests that it carried at once.
    """

    url: str = ""
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0
    running: int = 0
    most: int = 0


Answer = Callable[[int, bytes], tuple[float, bytes | None]]
"""(number of the request from 0, the request) → (seconds to wait, what to write; None hangs up)."""


@contextmanager
def scripted(answer: Answer, *, serial: bool = False, tls: ssl.SSLContext | None = None) -> Iterator[Scripted]:
    """A server in a thread; `serial`: it works on one request at a time, in the order in which they came."""
    server = Scripted()
    ready = threading.Event()
    end: list[Callable[[], object]] = []

    async def main() -> None:
        turn = asyncio.Lock()
        stop = asyncio.Event()

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            server.connections += 1
            try:
                with suppress(ConnectionError, asyncio.IncompleteReadError):
                    while (request := await _request(reader)) and await _answered(request, writer):
                        pass
            finally:
                writer.close()

        async def _answered(request: bytes, writer: asyncio.StreamWriter) -> bool:
            server.requests.append(request)
            server.running += 1
            server.most = max(server.most, server.running)
            seconds, written = answer(len(server.requests) - 1, request)
            if serial:
                async with turn:
                    await asyncio.sleep(seconds)
            else:
                await asyncio.sleep(seconds)
            server.running -= 1
            if written is None:
                return False
            writer.write(written)
            await writer.drain()
            return b"connection: close" not in written.lower()

        listening = await asyncio.start_server(talk, "127.0.0.1", 0, backlog=512, ssl=tls)
        scheme = "https" if tls else "http"
        server.url = f"{scheme}://127.0.0.1:{listening.sockets[0].getsockname()[1]}/predict"
        loop = asyncio.get_running_loop()
        end.append(lambda: loop.call_soon_threadsafe(stop.set))
        ready.set()
        await stop.wait()
        listening.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(30)
    try:
        yield server
    finally:
        end[0]()
        thread.join(30)


async def _request(reader: asyncio.StreamReader) -> bytes:
    """Head and body; empty at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    return head + (await reader.readexactly(int(length[1])) if length else b"")
