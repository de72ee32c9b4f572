"""The choice of a step's tokens, in which nobody's failure is another's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from microbatch.llm.sampling import Choosing, Chosen, choose


def choose_each(logits: torch.Tensor, rows: Sequence[Choosing]) -> list[Chosen | Exception]:
    """The choice of each row. Where the choice fails for all, halves of them are tried until who fails is alone."""
    if not rows:
        return []
    try:
        return choose(logits, rows)
    except Exception as error:
        if len(rows) == 1:
            return [error]
    half = len(rows) // 2
    return [*choose_each(logits[:half], rows[:half]), *choose_each(logits[half:], rows[half:])]
