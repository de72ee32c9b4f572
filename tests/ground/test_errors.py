"""The tree of errors: drawn once, true, and each error says what to do."""

from __future__ import annotations

import re

import pytest

from microbatch import errors
from microbatch.errors import MicrobatchError, NoAnswer, TooNoisy, UserError

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, MicrobatchError) and value.__module__ == errors.__name__
}


def drawn_tree() -> dict[str, str | None]:
    """Each error of the drawing and the one that it hangs from; depth is told by the column of its name."""
    assert errors.__doc__ is not None
    parents: dict[str, str | None] = {}
    path: list[tuple[int, str]] = []
    for line in errors.__doc__.splitlines():
        match = re.match(r"^( {4}[│├└─ ]*)([A-Z]\w+)  ", line)
        if match is None:
            continue
        column, name = len(match[1]), match[2]
        path = [(c, n) for c, n in path if c < column]
        parents[name] = path[-1][1] if path else None
        path.append((column, name))
    return parents


def test_the_drawing_agrees_with_the_classes() -> None:
    bases = {name: value.__bases__[0].__name__ for name, value in CLASSES.items()}
    bases["MicrobatchError"] = ""
    assert {name: parent or "" for name, parent in drawn_tree().items()} == bases


def test_each_error_is_one_branch() -> None:
    assert issubclass(TooNoisy, NoAnswer)
    assert not issubclass(NoAnswer, UserError)
    assert all(len(value.__bases__) == 1 for value in CLASSES.values())


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_error_says_what_and_what_to_do(name: str) -> None:
    error = CLASSES[name]("130 = 8 x 16 + 2.", "Take 13 or 26.")
    assert str(error) == "130 = 8 x 16 + 2. Take 13 or 26."
    assert error.to_json() == {"error": {"type": name, "message": "130 = 8 x 16 + 2.", "remedy": "Take 13 or 26."}}
    assert CLASSES[name].__doc__


def test_without_a_remedy_the_message_stands_alone() -> None:
    assert str(UserError("No.")) == "No."
