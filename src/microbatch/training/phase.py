"""Which part of a step an error came from, noted on the error as it passes: no state outside of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_NOTE = "_microbatch_phase"

FORWARD, BACKWARD, REDUCTION, OPTIMIZER = "forward", "backward", "reduction", "optimizer"


@contextmanager
def during(phase: str) -> Iterator[None]:
    """Notes the phase on an error that passes and has none yet."""
    try:
        yield
    except Exception as error:
        if not hasattr(error, _NOTE):
            setattr(error, _NOTE, phase)
        raise


def phase_of(error: BaseException) -> str:
    """The phase noted on an error; forward where none is, since moving a piece to its device comes before it."""
    return str(getattr(error, _NOTE, FORWARD))
