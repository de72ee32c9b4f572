"""A batch that its loader has cut already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Pieces(NamedTuple):
    """Micro-batches as they are, each with masks and lengths of its own: ``step(Pieces([first, second]))``.

    Attributes:
        pieces: batches in the form that the model and the loss take; they need not be of one size or length.
    """

    pieces: Sequence[Any]
