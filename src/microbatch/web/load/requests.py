"""The bytes that go over the wire, made once before the clock starts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from microbatch.errors import InvalidSettings
from microbatch.web.load.target import Target

JSON = "application/json"

CONTENT_TYPES = {
    ".json": JSON,
    ".msgpack": "application/msgpack",
    ".npy": "application/x-npy",
    ".safetensors": "application/safetensors",
    ".txt": "text/plain",
}
"""Of a body from a file, by its suffix; ``--header Content-Type:...`` for any other."""

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
DEADLINE = "Microbatch-Deadline"
"""Seconds from now, as the server reads them."""

_OURS = ("host", "content-length", "transfer-encoding", "connection")


@dataclass(frozen=True, slots=True)
class Body:
    """What one request carries."""

    content: bytes
    content_type: str = JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is the same for all requests.

    Attributes:
        target: server and path.
        method: of HTTP.
        headers: further ones, by name; they win over those made here.
        bodies: sent in turn, again from the first after the last.
    """

    target: Target
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    bodies: Sequence[Body] = (Body(b""),)

    def wire(self) -> list[bytes]:
        """Each request as it is written to a connection."""
        return [self._request(body) for body in self.bodies]

    def headers_of(self, body: Body) -> dict[str, str]:
        """Headers of one request, Host and Content-Length included."""
        made = {"Host": self.target.authority, "User-Agent": "microbatch-load", "Accept": "*/*"}
        if body.content:
            made |= {"Content-Type": body.content_type}
        given = {name.lower() for name in self.headers}
        kept = {name: value for name, value in made.items() if name.lower() not in given}
        length = {"Content-Length": str(len(body.content))} if body.content or self.method != "GET" else {}
        return kept | dict(self.headers) | length

    def _request(self, body: Body) -> bytes:
        lines = [f"{self.method} {self.target.path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in self.headers_of(body).items()]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body.content


def headers_from(lines: Sequence[str], api_key: str = "") -> dict[str, str]:
    """``["X-Tenant: blue"]`` as names and values, and the key as ``Authorization: Bearer``.

    Raises:
        InvalidSettings: no ``Name: value``, or a header that load sets itself.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not _NAME.fullmatch(name) or not _VALUE.fullmatch(value.strip()):
            raise InvalidSettings(f"{line!r} is no header.", "Write it as in 'X-Tenant: blue'.")
        if name.lower() in _OURS:
            raise InvalidSettings(f"The header {name} belongs to the connection.", "Leave it out.")
        headers[name] = value.strip()
    return headers


def api_key_from(path: Path) -> str:
    """The key in a file, so that it stands in no list of processes.

    Raises:
        InvalidSettings: no such file, or not one word in it.
    """
    try:
        words = path.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"The key file {path} cannot be read: {error}.", "Give a file with the key.") from None
    if not words:
        raise InvalidSettings(f"The key file {path} is empty.", "Put one key into it.")
    return words[0]


def body_of_text(text: str) -> Body:
    """A body as it is typed: JSON where it is, else text."""
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        return Body(text.encode(), "text/plain; charset=utf-8")
    return Body(text.encode())


def body_from(path: Path) -> Body:
    """A file as the body of every request.

    Raises:
        InvalidSettings: no such file.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidSettings(f"The body {path} cannot be read: {error.strerror}.", "Give a file.") from None
    return Body(content, CONTENT_TYPES.get(path.suffix.lower(), "application/octet-stream"))


def items_from(path: Path) -> list[Any]:
    """Items from a file of JSON lines; empty lines are skipped.

    Raises:
        InvalidSettings: no such file, a line that is no JSON, or no item.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidSettings(f"The items {path} cannot be read: {error.strerror}.", "Give JSON lines.") from None
    items = [_item(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise InvalidSettings(f"{path} holds no item.", "Put one JSON value on each line.")
    return items


def _item(line: bytes, path: Path, number: int) -> Any:
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidSettings(
            f"Line {number} of {path} is no JSON: {error}.", 'Put one JSON value on each line, as in "a text".'
        ) from None
