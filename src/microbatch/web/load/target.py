"""Where the load goes: a URL taken apart, and whether it is this machine."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from microbatch.errors import InvalidSettings

PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Target:
    """A server and a path on it.

    Attributes:
        scheme: http or https.
        host: a name or an address, without brackets.
        port: of TCP.
        path: with its query; empty where the URL named none.
    """

    scheme: str
    host: str
    port: int
    path: str

    @property
    def origin(self) -> str:
        """``http://127.0.0.1:8000``"""
        return f"{self.scheme}://{self.authority}"

    @property
    def authority(self) -> str:
        """``127.0.0.1:8000``, as the Host header has it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The whole."""
        return f"{self.origin}{self.path}"

    def at(self, path: str) -> Target:
        """Another path of the same server."""
        return replace(self, path=path)


def target_of(url: str, *, allow_remote: bool = False) -> Target:
    """``"127.0.0.1:8000"`` or ``"http://localhost:8000/predict"`` taken apart.

    Raises:
        InvalidSettings: no URL of HTTP, or another machine that was not allowed.
    """
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise _no_url(url, str(error)) from None
    if parts.scheme not in PORTS or not parts.hostname or not text.isascii() or not text.isprintable() or " " in text:
        raise _no_url(url, "")
    if parts.username is not None:
        raise InvalidSettings("A URL with a user and a password is not sent.", "Give --header or --api-key-file.")
    path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path
    target = Target(parts.scheme, parts.hostname, PORTS[parts.scheme] if port is None else port, path)
    if not (allow_remote or is_this_machine(target.host)):
        raise InvalidSettings(
            f"{target.host} may be another machine, and load can put a server out of service.",
            "Give --allow-remote if it is yours to test.",
        )
    return target


def is_this_machine(host: str) -> bool:
    """Whether a name or an address can only be this machine; no name is looked up."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host.split("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def address_of(target: Target) -> str:
    """The numeric address that connections go to: the first that takes one, so that no name is looked up under load.

    Raises:
        InvalidSettings: an unknown host.
    """
    try:
        found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise InvalidSettings(f"The host {target.host} is unknown: {error}.", "Check its name.") from None
    first, *others = [str(row[4][0]) for row in found]
    if not others:
        return first
    return next((address for address in (first, *others) if _takes(address, target.port)), first)


def _takes(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError:
        return False
    return True


def _no_url(url: str, why: str) -> InvalidSettings:
    reason = f": {why}" if why else ""
    return InvalidSettings(f"{url!r} is no URL of HTTP{reason}.", "Write it as in http://127.0.0.1:8000/predict.")
