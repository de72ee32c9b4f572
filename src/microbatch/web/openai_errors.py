"""How OpenAI's API tells an error: the one owner of that form for all of its routes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from microbatch.errors import InvalidRequest, RequestTooLarge
from microbatch.web.statuses import Answer

CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}
"""OpenAI's words for some statuses; others have none."""
TOO_LONG = "context_length_exceeded"
"""OpenAI's word for a prompt that the model has no room for."""

ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"error": {"type": "object", "required": ["message", "type", "param", "code"]}},
    "required": ["error"],
}


class InvalidMember(InvalidRequest):
    """A member of a body that cannot be read, or that is not offered.

    Attributes:
        param: its name, with a path where it is inside of another.
        code: OpenAI's word for what is wrong, where it has one.
    """

    def __init__(self, param: str | None, message: str, remedy: str = "", code: str | None = None) -> None:
        super().__init__(message, remedy)
        self.param, self.code = param, code


@contextmanager
def too_large_is_a_mistake_in(member: str) -> Iterator[None]:
    """What an engine has no room for is 400 in this API, which tells it from a body that is too large.

    Args:
        member: of the body, that the prompt came in.

    Raises:
        InvalidMember: in the place of a `RequestTooLarge`.
    """
    try:
        yield
    except RequestTooLarge as error:
        raise InvalidMember(member, error.message, error.remedy, TOO_LONG) from error


def openai_form(answer: Answer) -> dict[str, dict[str, Any]]:
    """The document of an error, as OpenAI's clients read it."""
    kind = "invalid_request_error" if answer.status < 500 and answer.status != 429 else "server_error"
    message = f"{answer.message} {answer.remedy}".strip()
    if answer.status == 429:
        kind = "requests"
    code = answer.code or CODES.get(answer.status)
    return {"error": {"message": message, "type": kind, "param": answer.param, "code": code}}
