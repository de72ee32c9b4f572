"""One request, as handlers see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from microbatch.errors import InvalidRequest
from microbatch.web.bodies import read_body
from microbatch.web.options import Options, from_headers
from microbatch.web.tenants import HEADER, tenant_of
from microbatch.web.watch import Watch

if TYPE_CHECKING:
    from microbatch.web.application import Application

Document = TypeVar("Document")


class Request:
    """What a client sent.

    Attributes:
        application: that answers it.
        scope, receive: of ASGI.
        parameters: of its path.
        tenant: whose key it came with; empty without keys.
        unread: a body is still to be read.
        watch: that looks after it.
    """

    __slots__ = ("_headers", "application", "parameters", "receive", "scope", "tenant", "unread", "watch")

    def __init__(
        self,
        application: Application,
        scope: Mapping[str, Any],
        receive: Any,
        parameters: Mapping[str, str],
        tenant: str = "",
    ) -> None:
        self.application, self.scope, self.receive = application, scope, receive
        self.parameters, self.tenant = parameters, tenant
        self.unread = scope["method"] == "POST"
        self.watch: Watch | None = None
        self._headers: dict[bytes, bytes] = dict(scope["headers"])

    def header(self, name: bytes) -> bytes:
        """The value of a header, by its name in lower case; empty when it is not there."""
        return self._headers.get(name, b"")

    @property
    def query(self) -> dict[str, str]:
        """What follows the question mark."""
        return dict(parse_qsl(self.scope.get("query_string", b"").decode("latin-1")))

    @property
    def options(self) -> Options:
        """Deadline, priority and tenant from the headers and the key.

        Raises:
            InvalidRequest: they are no numbers, or no name.
        """
        return from_headers(
            self._headers.get(b"microbatch-deadline"), self._headers.get(b"microbatch-priority"),
            self.application.deadline, tenant_of(self.tenant, self._headers.get(HEADER, b"")),
        )  # fmt: skip

    def flag(self, name: bytes) -> bool:
        """A header that is true or false; false when it is not there.

        Raises:
            InvalidRequest: it is something else.
        """
        value = self._headers.get(name)
        if value not in (None, b"true", b"false"):
            shown = f"{name.decode()} is {value.decode('latin-1')[:40]!r}"
            raise InvalidRequest(f"{shown}.", "Send true or false.")
        return value == b"true"

    def engine(self, name: str | None = None) -> tuple[str, Any]:
        """The engine of a name, or the only one there is, with its name.

        Raises:
            InvalidRequest: there is no such engine, or several and no name (404).
        """
        engines = self.application.engines
        if name is None and len(engines) == 1:
            return next(iter(engines.items()))
        if name is None or name not in engines:
            asked = "Several are served here" if name is None else f"{name[:200]!r} is not served here"
            raise InvalidRequest(f"{asked}.", f"Name one of {', '.join(engines)}.", status=404)
        return name, engines[name]

    async def body(self) -> bytes:
        """All of the body; may be asked for once.

        Raises:
            InvalidRequest: too large (413) or compressed (415).
        """
        coding = self._headers.get(b"content-encoding", b"identity")
        if coding.lower() != b"identity":
            raise InvalidRequest(
                f"The body is compressed ({coding.decode('latin-1')[:40]}).", "Send it as it is.", status=415
            )
        body = await read_body(self.receive, self._headers.get(b"content-length", b""), self.application.body_limit)
        self.unread = False
        if self.watch is not None:
            self.watch.body_has_come()
        return body

    async def json(self, form: type[Document] | Any = Any) -> Document | Any:
        """The body, decoded from JSON into a type that msgspec knows.

        Raises:
            InvalidRequest: another type of content (415), no JSON, or not of that form (400).
        """
        if self.content_type != b"application/json":
            raise InvalidRequest(
                f"The content type is {self.content_type.decode('latin-1')[:80]!r}.",
                "Send application/json.",
                status=415,
            )
        try:
            return msgspec.json.decode(await self.body(), type=form)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise InvalidRequest(f"The body is not as expected: {error}.", "Correct it.") from None

    @property
    def content_type(self) -> bytes:
        """Without its parameters."""
        return media_type(self.header(b"content-type"))

    async def pause(self, seconds: float) -> bool:
        """Wait; False when the server is about to stop, and streams are to end."""
        return not await self.application.stops_within(seconds)


def media_type(header: bytes) -> bytes:
    """``application/json`` of ``application/json; charset=utf-8``."""
    return header.partition(b";")[0].strip().lower()
