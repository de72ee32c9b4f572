"""The one owner of how an error is answered over HTTP: its status, its headers and its document."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

from microbatch.errors import (
    DeadlineExceeded,
    Draining,
    InvalidOutput,
    InvalidRequest,
    MicrobatchError,
    NotServed,
    Overloaded,
    RequestTooLarge,
    UserError,
    WorkerDied,
)

logger = logging.getLogger(__name__)

Headers = tuple[tuple[bytes, bytes], ...]

STATUSES: tuple[tuple[type[BaseException], int], ...] = (
    (RequestTooLarge, 413),
    (Overloaded, 429),
    (DeadlineExceeded, 504),
    (Draining, 503),
    (WorkerDied, 503),
    (NotServed, 503),
    (InvalidOutput, 500),
    (UserError, 400),
)
"""Status by kind of error, the first that fits; `InvalidRequest` has its own. Everything else is 500."""

DEFECT = 500
LONGEST_TEXT = 300
IN_LOG = "The server's log says where it happened."


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client is told of an error.

    Attributes:
        status: of HTTP.
        type: of the error, a name of `microbatch.errors` or of the exception of the user's function.
        message: what happened.
        remedy: what to do; empty when nothing is known.
        headers: besides the usual ones.
        param: the member of the body that is at fault, where one is known.
        code: a word of another API for this error, where it has one of its own.
    """

    status: int
    type: str
    message: str
    remedy: str = ""
    headers: Headers = ()
    param: str | None = None
    code: str | None = None


def answer_to(error: BaseException) -> Answer:
    """How an error is answered. What goes wrong in the user's function is told in one line, never as a traceback."""
    status = status_of(error)
    if isinstance(error, MicrobatchError):
        return Answer(
            status, type(error).__name__, _clean(error.message), _clean(error.remedy), _headers(error),
            getattr(error, "param", None), getattr(error, "code", None),
        )  # fmt: skip
    return Answer(status, type(error).__name__, _one_line(error), IN_LOG)


def status_of(error: BaseException) -> int:
    """The status of HTTP for an error."""
    if isinstance(error, InvalidRequest):
        return error.status
    return next((status for kind, status in STATUSES if isinstance(error, kind)), DEFECT)


def note(error: BaseException, what: str) -> None:
    """Write what is the server's own fault into its log, with the traceback that the client does not get."""
    if status_of(error) == DEFECT:
        logger.error("%s failed: %s", what, type(error).__name__, exc_info=error)


def own_form(answer: Answer) -> dict[str, dict[str, str]]:
    """The document of an error, as the command line prints it too."""
    return {"error": {"type": answer.type, "message": answer.message, "remedy": answer.remedy}}


def item_error(index: int, answer: Answer) -> dict[str, Any]:
    """The document of the failure of one item among several."""
    return {"index": index, "status": answer.status, **own_form(answer)}


def _headers(error: MicrobatchError) -> Headers:
    if isinstance(error, InvalidRequest):
        return error.headers
    if isinstance(error, Overloaded):
        return ((b"retry-after", str(retry_after(error)).encode()),)
    return ()


def retry_after(error: Overloaded) -> int:
    """The nearest whole seconds, at least one: rounded up, a queue of two seconds would be told as three."""
    return max(1, round(error.retry_after)) if math.isfinite(error.retry_after) else 1


def _clean(text: str) -> str:
    """What UTF-8 can hold: a text that quotes half of a character would end its own error."""
    return text.encode("utf-8", "replace").decode()


def _one_line(error: BaseException) -> str:
    """The first line of an exception's text; further ones may be a traceback of another process."""
    lines = str(error).strip().splitlines() or [""]
    text = lines[0] if not lines[0].startswith("Traceback") else ""
    return _clean(text[:LONGEST_TEXT]) or f"The function raised {type(error).__name__}."
