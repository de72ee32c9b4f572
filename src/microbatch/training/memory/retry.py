"""A step that runs out of memory is done again from its start, in smaller pieces.

The next try starts after the ``except`` block has ended and the exception's frames are emptied: until then they hold
the tensors of the failed try. On real failures, retrying inside the block failed 4 times of 4.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from microbatch.batch.oom import drop_frames, out_of_memory_rule, release
from microbatch.batch.size_limit import Ladder
from microbatch.errors import DoesNotFit, MicrobatchError, RankOutOfMemory
from microbatch.training.phase import OPTIMIZER, phase_of
from microbatch.training.result import Attempt

logger = logging.getLogger(__name__)

T = TypeVar("T")

OUT_OF_MEMORY = "out of memory"
DONE = "done"


@dataclass(frozen=True, slots=True)
class _Failure:
    """What is kept of an out-of-memory error: texts only, no frames."""

    phase: str
    rule: str
    text: str


def run_with_retry(
    attempt: Callable[[int], T],
    size: int,
    *,
    ladder: Ladder,
    undo: Callable[[], None],
    device: torch.device,
    alone: bool = True,
    contents: Callable[[], str] = str,
) -> tuple[T, tuple[Attempt, ...]]:
    """The result of the first try that fits, and every try.

    Args:
        attempt: the whole step at a micro-batch size.
        size: to start with.
        ladder: the sizes that are left after it.
        undo: puts everything that a try changes back to the start of the step; called after each that failed.
        device: whose memory is given back.
        alone: no other rank waits for this one. Otherwise what ran out after the gradients were exchanged is not done
            again: the others would not take part.
        contents: says what fills the memory, for the error.

    Raises:
        DoesNotFit: pieces cannot be smaller, or smaller pieces cannot help.
        Exception: whatever else `attempt` raises.
    """
    tries: list[Attempt] = []
    while True:
        done, failure = _tried(attempt, size)
        if failure is None:
            assert done is not None
            return done[0], (*tries, Attempt(micro_batch_size=size, outcome=DONE))
        undo()
        release(device)
        tries.append(_noted(size, failure))
        following = _next_size(ladder, tries, alone=alone)
        if following is None:
            raise DoesNotFit(f"{_what_failed(ladder, tries, failure)} {contents()}".strip(), _remedy(tries))
        logger.warning(
            "Out of memory in %s at %s (%s: %s); the step is done again at %d.",
            failure.phase, ladder.said(size), failure.rule, failure.text, following,
        )  # fmt: skip
        size = following


def grown_back(size: str) -> None:
    """Log that a larger size is tried again."""
    logger.info("No out-of-memory for a while: the next step tries %s.", size)


def first_line(error: Exception) -> str:
    """What an error says, in short."""
    return str(error).strip().split("\n")[0][:200] or type(error).__name__


def _tried(attempt: Callable[[int], T], size: int) -> tuple[tuple[T] | None, _Failure | None]:
    try:
        return (attempt(size),), None
    except Exception as error:
        rule = out_of_memory_rule(error)
        said = isinstance(error, MicrobatchError) and not isinstance(error, RankOutOfMemory)
        if rule is None or said:  # said in full already, by us or by another rank
            raise
        failure = _Failure(phase_of(error), rule, first_line(error))
        drop_frames(error)
    return None, failure


def _noted(size: int, failure: _Failure) -> Attempt:
    reason = f"{failure.rule}: {failure.text}"
    return Attempt(micro_batch_size=size, outcome=OUT_OF_MEMORY, phase=failure.phase, reason=reason)


def _next_size(ladder: Ladder, tries: list[Attempt], *, alone: bool) -> int | None:
    """None where another try is of no use: the optimizer's memory does not depend on the size of the pieces."""
    last = tries[-1]
    in_optimizer = [t for t in tries if t.phase == OPTIMIZER]
    if last.phase in ("reduction", OPTIMIZER) and not alone:
        return None
    if last.phase == OPTIMIZER and len(in_optimizer) > 1:
        return None
    following = ladder.following(last.micro_batch_size)
    if following is None and last.phase == OPTIMIZER:
        return last.micro_batch_size  # once more: what was cached has been given back
    return following


def _what_failed(ladder: Ladder, tries: list[Attempt], failure: _Failure) -> str:
    last = tries[-1]
    sizes = ", ".join(str(t.micro_batch_size) for t in tries)
    return (
        f"Out of memory in {failure.phase} with {ladder.said(last.micro_batch_size)} "
        f"(tried {sizes}; {failure.rule}: {failure.text})."
    )


def _remedy(tries: list[Attempt]) -> str:
    if tries[-1].phase == OPTIMIZER:
        return "Use an optimizer with less state (SGD, Adafactor), train fewer parameters, or find more memory."
    return "Use activation checkpointing, a narrower dtype, shorter samples, or a device with more memory."
