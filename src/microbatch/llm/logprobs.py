"""Log-probabilities in OpenAI's form: of the model's own distribution, before temperature, penalties and filters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from microbatch.llm.candidates import largest

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Chosen:
    """A token, and how likely it was.

    Attributes:
        token_id: the token.
        logprob: natural logarithm of the model's probability of it; None where none was asked for.
        top: the likeliest tokens and their logprobs, likeliest first; those that tie by rising id.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def logprobs_of(logits: Tensor, token_ids: Sequence[int], top: int) -> list[Chosen]:
    """How likely the model found given tokens: one token for each row.

    Args:
        logits: ``[rows, vocabulary]``.
        top: how many of the likeliest to tell beside each.
    """
    if len(logits) != len(token_ids):
        raise ValueError(f"{len(logits)} rows of logits for {len(token_ids)} tokens")
    return [scored(row.float().cpu(), token_id, top) for row, token_id in zip(logits, token_ids)]


def scored(row: Tensor, token_id: int, top: int) -> Chosen:
    """One token beside the `top` likeliest; each row by itself, so that no other changes a bit of it."""
    logprobs = torch.log_softmax(row, -1).numpy()
    if not top:
        return Chosen(token_id, float(logprobs[token_id]))
    ids = largest(row, min(top, len(row)))
    likeliest = ids[np.lexsort((ids, -logprobs[ids]))][:top]
    return Chosen(token_id, float(logprobs[token_id]), tuple(zip(likeliest.tolist(), logprobs[likeliest].tolist())))
