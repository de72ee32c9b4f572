"""What a client may ask for besides its items, in headers, which every form of body can have beside it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from microbatch.errors import InvalidRequest

LONGEST_DEADLINE = 86_400.0
"""Seconds. Who would wait for longer than a day has made a mistake of units."""
MOST_PRIORITY = 10
"""Each step is worth `microbatch.serving.decisions.queue.HEAD_START` seconds; more steps would only starve others."""
PRIORITY_PATTERN = r"^-?([0-9]|10)$"
"""How it is written: as text, since a tester takes each header that is to be a number for one that may be wrong."""


@dataclass(frozen=True, slots=True)
class Options:
    """Of one request.

    Attributes:
        deadline: seconds from now until the answer is worth nothing; None for no limit.
        priority: larger goes first.
        tenant: whose request it is, by its key; empty without keys.
    """

    deadline: float | None = None
    priority: int = 0
    tenant: str = ""


NO_OPTIONS = Options()


def checked_deadline(value: Any) -> float:
    """A deadline as a client gave it.

    Raises:
        InvalidRequest: it is no number of seconds above zero.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LONGEST_DEADLINE:
        raise InvalidRequest(
            f"The deadline is {_shown(value)}.",
            f"Give seconds from now, above 0 and at most {LONGEST_DEADLINE:.0f}, such as 0.5.",
        )
    return float(value)


def checked_priority(value: bytes) -> int:
    """A priority as a client gave it.

    Raises:
        InvalidRequest: it is no small whole number.
    """
    text = value.decode("latin-1")
    if not re.fullmatch(PRIORITY_PATTERN, text):
        raise InvalidRequest(
            f"The priority is {_shown(text)}.", f"Give a whole number from -{MOST_PRIORITY} to {MOST_PRIORITY}."
        )
    return int(text)


def from_headers(deadline: bytes | None, priority: bytes | None, default: float | None, tenant: str) -> Options:
    """Options as the headers have them; None where there is none.

    Args:
        deadline: of the header; seconds.
        priority: of the header.
        default: the server's own deadline, in seconds.
        tenant: whose request it is.

    Raises:
        InvalidRequest: a header that is no number of its kind.
    """
    if deadline is None and priority is None and default is None and not tenant:
        return NO_OPTIONS
    return Options(
        checked_deadline(_number(deadline)) if deadline is not None else default,
        checked_priority(priority) if priority is not None else 0,
        tenant,
    )


def _number(text: bytes) -> Any:
    """A header's number; the text itself where it is none, for the error."""
    shown = text.decode("latin-1")
    try:
        value = float(shown)
    except ValueError:
        return shown
    return int(value) if math.isfinite(value) and value.is_integer() else value


def _shown(value: Any) -> str:
    return repr(value)[:40] if isinstance(value, int | float | str) else f"a {type(value).__name__}"
