"""What OpenAI's API takes as text: a text, several, token ids, or several lists of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from microbatch.web.openai_errors import InvalidMember

SHAPES: tuple[dict[str, Any], ...] = ({"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1})
"""JSON Schemas of a text and of several."""


def values_of(given: str | Sequence[Any], member: str) -> list[Any]:
    """One value for each text: a text, or a list of token ids that are still to be checked.

    Args:
        given: as it came.
        member: of the body that it came in.

    Raises:
        InvalidMember: it is none of the four.
    """
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidMember(member, f"The {member} is an empty list.", "Send a text, or several.")
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in given):
        return [given]
    if all(isinstance(value, str) for value in given) or all(isinstance(value, list) for value in given):
        return list(given)
    raise InvalidMember(
        member,
        f"The {member} is neither a text, nor texts, nor token ids, nor lists of token ids.",
        "Send one of them, unmixed.",
    )


def schema_of(ids: dict[str, Any]) -> dict[str, Any]:
    """All four forms in JSON Schema, from that of a list of token ids."""
    return {"oneOf": [*SHAPES, ids, {"type": "array", "items": ids, "minItems": 1}]}
