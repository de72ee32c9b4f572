"""Clients that no server likes, on bare sockets: slow, vanishing, greedy, half-closed."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

LONG = 60.0
"""Seconds within which what must happen has happened, on a loaded machine too."""


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=LONG)


def request(item: Any, *, path: str = "/predict", length: int | None = None, headers: str = "") -> bytes:
    """A whole request; `length` lies about its body."""
    body = json.dumps(item).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


def read_answer(stream: Any) -> tuple[int, Any]:
    """Status and document of the next answer on a connection; (0, None) at its end, be it a reset."""
    try:
        status = stream.readline()
    except ConnectionError:
        status = b""
    if not status:
        return 0, None
    length = 0
    while (line := stream.readline()) not in (b"\r\n", b""):
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    body = stream.read(length)
    return int(status.split()[1]), json.loads(body) if body else None


def ask(url: str, item: Any) -> tuple[int, Any]:
    """One request on a connection of its own."""
    with connect(url) as connection:
        connection.sendall(request(item))
        return read_answer(connection.makefile("rb"))


def vanish(connection: socket.socket, *, rudely: bool) -> None:
    """Close; `rudely`: with a reset, as a machine that lost its network does."""
    if rudely:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


class FastClient:
    """A client that keeps its connection and knows how long each answer took."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._connection = HTTPConnection(parts.hostname or "", parts.port, timeout=LONG)
        self.seconds: list[float] = []

    def ask(self, item: Any) -> Any:
        began = time.monotonic()
        self._connection.request("POST", "/predict", json.dumps(item), {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        document = json.loads(response.read())
        assert response.status == 200, document
        self.seconds.append(time.monotonic() - began)
        return document["result"]

    def close(self) -> None:
        self._connection.close()


@contextmanager
def dripping(connections: Sequence[socket.socket], drop: bytes, *, every: float = 0.2) -> Iterator[None]:
    """While the block runs each connection sends a drop now and then."""
    over = threading.Event()

    def drip() -> None:
        while not over.wait(every):
            for connection in connections:
                with suppress(OSError):
                    connection.send(drop)

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LONG)
