"""What a misspelt name was meant to be. Loads nothing."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence with the names closest to `name`, or all of them."""
    names = list(known)
    close = get_close_matches(name, names, n=3)
    return f"Did you mean {' or '.join(close)}?" if close else f"Known: {', '.join(names)}."
