"""Runs an application in the foreground, under uvicorn. The one place that knows which server that is, and how to end.

Bare ASGI under uvicorn with uvloop and httptools was the fastest of the fronts that were measured
(benchmarks/web_front.py, docs/decisions.md).
"""

from __future__ import annotations

import errno
import importlib.util
import ipaddress
import logging
import math
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from microbatch.errors import InvalidSettings
from microbatch.web.tls import check_pair

if TYPE_CHECKING:
    from microbatch.web.application import Application

logger = logging.getLogger(__name__)

HOST, PORT = "127.0.0.1", 8000
DRAIN_TIMEOUT = 30.0
"""Seconds that those who wait are given after SIGTERM."""
KEEP_ALIVE = 75
"""Seconds that a connection may be idle between two requests; more than the 60 of common load balancers."""
BACKLOG = 2048
"""Connections that the system holds while the event loop is busy."""
MOST_CONNECTIONS = 10_000
KEPT_FREE = 128
"""Open files that are not for connections."""


def serve(
    app: Application,
    *,
    host: str = HOST,
    port: int = PORT,
    drain_timeout: float = DRAIN_TIMEOUT,
    certificate: str | Path | None = None,
    private_key: str | Path | None = None,
    max_connections: int | None = None,
    started: Callable[[str], None] | None = None,
) -> None:
    """Start the engines, then serve until SIGTERM or SIGINT; then answer what waits, and return.

    Args:
        app: from `microbatch.web.application.application`.
        host: address to listen at; by default only this machine can reach it.
        port: 0 for any that is free.
        drain_timeout: seconds after which those who still wait are told that there will be no answer.
        certificate, private_key: files, for TLS.
        max_connections: at once; whoever comes then is told so (503). As many as open files allow, if left out.
        started: called with the URL once requests are welcome.

    Raises:
        InvalidSettings: the port is in use, there is no such host, or a package or file is missing.
        MicrobatchError: what an engine raises that cannot start.
    """
    _check(drain_timeout, certificate, private_key, max_connections)
    listener = bind(host, port)
    with listener:
        app.start()
        _warn_of_strangers(app, host)
        most = min(_more_files(), max_connections or MOST_CONNECTIONS)
        told = _told(started, listener, certificate) if started else None
        server = uvicorn_server(app, drain_timeout, certificate, private_key, told, most)
        with _ends_in_peace():
            try:
                server.run(sockets=[listener])
            except OSError as error:  # somebody else bound it and was faster to listen
                raise _cannot_bind(host, port, error) from None


def bind(host: str, port: int) -> socket.socket:
    """A socket that has the port, but does not listen yet: nobody can be connected before the engines are warm.

    Raises:
        InvalidSettings: it cannot be had.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        found = socket.socket(family, socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError, OverflowError) as error:
        raise InvalidSettings(f"There is no address {host!r}, port {port} ({error}).", "Try 127.0.0.1.") from None
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
    except (OSError, OverflowError) as error:
        found.close()
        raise _cannot_bind(host, port, error) from None
    return found


def url_of(listener: socket.socket, *, secure: bool = False) -> str:
    """Where a client on this machine finds a server that listens there."""
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "127.0.0.1" if ":" not in host else "::1"
    return f"{'https' if secure else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def uvicorn_server(
    app: Application,
    drain_timeout: float,
    certificate: str | Path | None,
    private_key: str | Path | None,
    started: Callable[[], None] | None,
    max_connections: int = MOST_CONNECTIONS,
) -> Any:
    """uvicorn, with our connections and our end."""
    import uvicorn

    from microbatch.web.connections import Connection

    class Bounded(Connection):
        """One of them."""

        most = max_connections

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if started is not None:
                started()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            app.stop()
            await super().shutdown(sockets)  # cancels those who wait too long, who then get their error

    settings = uvicorn.Config(
        app, http=Bounded, ws="none", lifespan="on", log_config=None, log_level="error", access_log=False,
        proxy_headers=False, server_header=False, backlog=BACKLOG, timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=math.ceil(drain_timeout),
        ssl_certfile=certificate, ssl_keyfile=private_key and str(private_key),
    )  # fmt: skip
    return Server(settings)


@contextmanager
def _ends_in_peace() -> Iterator[None]:
    """uvicorn raises the signal that ended it once more, when it is done; here that means nothing any more."""
    if threading.current_thread() is not threading.main_thread():  # where no signal comes
        yield
        return

    def done(number: int, _: FrameType | None) -> None:
        logger.info("stopped by signal %d", number)

    before = {number: signal.signal(number, done) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _told(started: Callable[[str], None], listener: socket.socket, certificate: object) -> Callable[[], None]:
    return lambda: started(url_of(listener, secure=certificate is not None))


def _cannot_bind(host: str, port: int, error: OSError | OverflowError) -> InvalidSettings:
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return InvalidSettings(f"Port {port} of {host} is in use.", "Take another with --port, or 0 for any.")
    if number == errno.EACCES:
        return InvalidSettings(f"Port {port} may not be used by this user.", "Take one above 1023.")
    return InvalidSettings(f"Nothing can listen at {host}, port {port}: {error}.", "Try 127.0.0.1 and port 8000.")


def _check(
    drain_timeout: float,
    certificate: str | Path | None,
    private_key: str | Path | None,
    max_connections: int | None = None,
) -> None:
    missing = [name for name in ("uvicorn", "httptools") if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidSettings(f"{' and '.join(missing)} is not installed.", "Run: pip install 'microbatch[serve]'")
    if drain_timeout < 0:
        raise InvalidSettings(f"drain_timeout={drain_timeout} is below zero.", "Give seconds.")
    if max_connections is not None and max_connections < 1:
        raise InvalidSettings(f"max_connections={max_connections} lets nobody in.", "Give at least 1.")
    check_pair(certificate, private_key)


def _warn_of_strangers(app: Application, host: str) -> None:
    if not app.keyed and host not in ("localhost", "::1") and not host.startswith("127."):
        logger.warning("Whoever reaches %s can use this server: it asks for no key.", host)


def _more_files() -> int:
    """Connections that there can be: each takes a file descriptor, and slow clients soon take the usual 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_CONNECTIONS if allowed == resource.RLIM_INFINITY else max(allowed - KEPT_FREE, 1)
