"""One request before the clock starts, so that what would go wrong with each goes wrong once, in one clear line."""

from __future__ import annotations

import http.client
import ssl
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from microbatch.errors import InvalidSettings
from microbatch.web.load.published import OPENAPI, PREDICT, body_of_item, example_of, path_of
from microbatch.web.load.requests import Body, Question
from microbatch.web.load.target import Target

PATIENCE = 30.0
"""Seconds for one answer."""
MOST_READ = 4 * 2**20
"""Bytes of a document that are read at most."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back: a status, and the beginning of the body."""

    status: int
    content: bytes

    @property
    def text(self) -> str:
        """The error's message where the body is one of ours, else its beginning, in one line."""
        return said(self.content)


def said(content: bytes) -> str:
    """What an answer says, in one line fit for a terminal."""
    try:
        error = msgspec.json.decode(content)["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, IndexError):
        text = content.decode("utf-8", "replace")
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in str(text)).split())
    return line if len(line) <= 160 else f"{line[:157]}..."


def ask(question: Question, body: Body | None = None, *, patience: float = PATIENCE) -> Reply:
    """One request on a connection of its own.

    Raises:
        InvalidSettings: nobody answers there, or not in HTTP.
    """
    target = question.target
    first = question.bodies[0] if body is None else body
    try:
        connection = _connection(target, patience)
        try:
            connection.request(
                question.method, target.path, body=first.content or None, headers=question.headers_of(first)
            )
            response = connection.getresponse()
            return Reply(response.status, response.read(MOST_READ))
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise no_answer(target, error) from None


def no_answer(target: Target, error: Exception) -> InvalidSettings:
    """What it means that asking ended in `error`."""
    for kinds, message, remedy in _MEANINGS:
        if isinstance(error, kinds):
            return InvalidSettings(f"{message.format(target.authority)}.", remedy)
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return InvalidSettings(f"{target.authority} cannot be reached: {why}.", "Check the address, and the way there.")


_START = "Start the server first, as in microbatch serve MODEL --port 8000."
_MEANINGS: tuple[tuple[tuple[type[Exception], ...], str, str], ...] = (
    ((ConnectionRefusedError,), "Nobody listens at {}: the connection was refused", _START),
    ((TimeoutError,), "{} does not answer", "Check the address, and that a server of HTTP is ready there."),
    (
        (ssl.SSLCertVerificationError,),
        "The certificate of {} is not trusted",
        "Name yours: SSL_CERT_FILE=certificate.pem.",
    ),
    ((ssl.SSLError,), "{} does not speak TLS", "Write http instead of https in the URL."),
    ((ConnectionError,), "{} closes the connection without an answer", "Check that it is a server of HTTP."),
    ((http.client.HTTPException, ValueError), "What listens at {} does not speak HTTP", "Check the port in the URL."),
)


def _connection(target: Target, patience: float) -> http.client.HTTPConnection:
    if target.scheme == "https":
        return http.client.HTTPSConnection(target.host, target.port, timeout=patience)
    return http.client.HTTPConnection(target.host, target.port, timeout=patience)


def document_of(question: Question) -> Any:
    """What the server publishes about itself; None where it publishes nothing that can be read.

    Raises:
        InvalidSettings: nobody answers there, or not in HTTP.
    """
    reply = ask(replace(question, target=question.target.at(OPENAPI), method="GET"), Body(b""))
    try:
        return msgspec.json.decode(reply.content) if reply.status == 200 else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def completed(question: Question, *, bodies: tuple[Body, ...] = (), items: tuple[Any, ...] = ()) -> Question:
    """A question whose path and bodies are known: as given, around `items`, or from what the server publishes.

    Raises:
        InvalidSettings: neither given nor published, or nobody answers.
    """
    known = bool(bodies) or question.method == "GET"
    document = None if known and question.target.path else document_of(question)
    path = question.target.path or ("/" if question.method == "GET" else path_of(document) or PREDICT)
    question = replace(question, target=question.target.at(path))
    if known:
        return replace(question, bodies=bodies or (Body(b""),))
    example = example_of(document, path)
    if not items and example is None:
        raise InvalidSettings(
            f"{question.target.origin} publishes no example of what POST {path} takes.",
            "Give --body, --body-file or --items-file.",
        )
    documents = [body_of_item(item, path, example) for item in items] or [example]
    return replace(question, bodies=tuple(Body(msgspec.json.encode(each)) for each in documents))


def check(question: Question, *, patience: float = PATIENCE) -> None:
    """Refuse a load of which every request would be turned away for the same reason.

    Raises:
        InvalidSettings: nobody answers in HTTP, a key is missing, or the path takes no such request.
    """
    reply = ask(question, patience=patience)
    remedy = _TURNED_AWAY.get(reply.status)
    if remedy is not None:
        raise InvalidSettings(
            f"{question.method} {question.target.url} is answered with {reply.status}: {reply.text.rstrip('.')}.",
            remedy,
        )


_TURNED_AWAY = {
    401: "Give --api-key-file.",
    403: "Give --api-key-file, or another --header.",
    404: "Name a path that there is, as in http://127.0.0.1:8000/predict.",
    405: "Name a path that takes it, or another --method.",
    415: "Give --header Content-Type:...",
}
