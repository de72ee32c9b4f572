"""One call of the model for the rows of a step, and what to do where it fails: smaller calls, until who fails is alone.

Keys and values that are written twice are the same both times, so a row may be computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from microbatch.batch.oom import drop_frames, is_out_of_memory, release
from microbatch.errors import ModelFailed
from microbatch.llm.row_pieces import Row
from microbatch.llm.runner import StepLogits


class Steps(Protocol):
    """What computes rows; `microbatch.llm.runner.Runner` is one."""

    def step(self, rows: Sequence[Row]) -> StepLogits:
        """Logits of the rows that want them."""
        ...


@dataclass(slots=True)
class Computed:
    """What came of the rows of a step.

    Attributes:
        last: logits of the last token of the rows in `sampled`, [rows, vocabulary]; None where there is none.
        sampled: places of those rows in the step.
        every: logits of all tokens, by place, where they were asked for.
        failed: the error of each row that fails alone, by place.
        out_of_memory: calls that ran out of memory.
        largest: tokens of the largest call that went through.
    """

    last: torch.Tensor | None = None
    sampled: list[int] = field(default_factory=list)
    every: dict[int, torch.Tensor] = field(default_factory=dict)
    failed: dict[int, Exception] = field(default_factory=dict)
    out_of_memory: int = 0
    largest: int = 0


Part = tuple[int, Row]
"""A row, or a part of one, and its place in the step."""


def compute(runner: Steps, rows: Sequence[Row], device: torch.device | str) -> Computed:
    """Run the rows, in one call where that goes well.

    Args:
        runner: the model with its cache.
        rows: of the step.
        device: whose memory is given back after a call that ran out of it.
    """
    found, blocks = Computed(), list[torch.Tensor]()
    waiting = [list(enumerate(rows))]
    while waiting:
        parts = [part for part in waiting.pop() if part[0] not in found.failed]
        if not parts:
            continue
        logits, error = _call(runner, parts)
        if logits is not None:
            _note(found, blocks, parts, logits)
            continue
        assert error is not None
        memory = is_out_of_memory(error)
        if memory:
            found.out_of_memory += 1
            drop_frames(error)
            release(device)
        halves = _halves(parts, cut_rows=memory)
        if halves:
            waiting += reversed(halves)  # the first is run first: later tokens of a row need those before them
        else:
            found.failed[parts[0][0]] = _failure(error, parts[0][1])
    found.last = None if not blocks else blocks[0] if len(blocks) == 1 else torch.cat(blocks)
    return found


def _call(runner: Steps, parts: list[Part]) -> tuple[StepLogits | None, Exception | None]:
    try:
        return runner.step([row for _, row in parts]), None
    except Exception as error:
        return None, error


def _note(found: Computed, blocks: list[torch.Tensor], parts: list[Part], logits: StepLogits) -> None:
    found.largest = max(found.largest, sum(len(row.ids) for _, row in parts))
    if len(logits.rows):
        blocks.append(logits.last)
        found.sampled += [parts[place][0] for place in logits.rows]
    for place, all_logits in logits.every.items():
        index = parts[place][0]
        before = found.every.get(index)
        found.every[index] = all_logits if before is None else torch.cat((before, all_logits))


def _halves(parts: list[Part], *, cut_rows: bool) -> list[list[Part]]:
    """Two smaller calls; none where there is nothing to cut."""
    if len(parts) > 1:
        half = len(parts) // 2
        return [parts[:half], parts[half:]]
    index, row = parts[0]
    half = len(row.ids) // 2
    if not cut_rows or not half:
        return []
    first = replace(row, ids=row.ids[:half], wants_logits=False)
    return [[(index, first)], [(index, replace(row, ids=row.ids[half:], start=row.start + half))]]


def _failure(error: Exception, row: Row) -> ModelFailed:
    what = "ran out of memory" if is_out_of_memory(error) else f"failed: {type(error).__name__}: {error}"
    remedy = "Lower num_blocks= or memory_limit=." if is_out_of_memory(error) else "Run the model on it by hand."
    failure = ModelFailed(f"The model {what} (token {row.start} of the request, alone in its step).", remedy)
    failure.__cause__ = error
    return failure
