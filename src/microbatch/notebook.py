"""How a result looks in a notebook: results ask here, the reporting room answers, and no import goes up."""

from __future__ import annotations

from functools import singledispatch


@singledispatch
def notebook_form(result: object) -> str | None:  # noqa: ARG001 (what is dispatched on)
    """HTML for a notebook's cell; None where the reporting room has registered no form for the type."""
    return None
