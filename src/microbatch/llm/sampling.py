"""Tokens from logits: many rows with parameters of their own, each as if it were alone.

Rows that take the likeliest token cost one argmax together. Others are worked on one by one, by `candidates`; a row's
random number is a function of its seed and of how many tokens it has, so neither its place nor its mates matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from microbatch.errors import InvalidRequest, ModelFailed
from microbatch.llm.candidates import draw
from microbatch.llm.logprobs import Chosen, logprobs_of, scored
from microbatch.llm.penalties import Seen, edit
from microbatch.llm.random_numbers import answer_seed, uniforms
from microbatch.llm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Choosing", "Chosen", "answer_seed", "choose", "logprobs_of"]


@dataclass(frozen=True, slots=True)
class Choosing:
    """What the next token of one sequence depends on, besides its logits. Made once: the lists may grow.

    Attributes:
        params: of its request.
        prompt_ids: the prompt.
        output_ids: chosen so far.
        seed: of this sequence; see `answer_seed` where a request has several.
        allowed_eos: ids that end it, which `min_tokens` holds back.
        seen: counts for penalties, kept from step to step.
    """

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    seed: int
    allowed_eos: tuple[int, ...] = ()
    seen: Seen = field(default_factory=Seen, repr=False, compare=False)

    @property
    def banned(self) -> tuple[int, ...]:
        """Ids that may not come next."""
        return self.allowed_eos if len(self.output_ids) < self.params.min_tokens else ()

    @property
    def plain(self) -> bool:
        """Whether the largest of the model's own logits is all that is asked for."""
        params = self.params
        return params.greedy and params.logprobs is None and not params.edits_logits and not self.banned


def choose(logits: Tensor, rows: Sequence[Choosing]) -> list[Chosen | Exception]:
    """The next token of every row.

    Args:
        logits: ``[rows, vocabulary]``; they are not changed.
        rows: what each row's choice depends on.

    Returns:
        One for each row, in order: its token, or the exception that this row alone ends with.
    """
    if len(logits) != len(rows):
        raise ValueError(f"{len(logits)} rows of logits for {len(rows)} sequences")
    found: list[Chosen | Exception | None] = [None] * len(rows)
    plain = [place for place, row in enumerate(rows) if row.plain]
    for place, choice in zip(plain, _likeliest(logits if len(plain) == len(rows) else logits[plain])):
        found[place] = choice
    others = [place for place, row in enumerate(rows) if not row.plain]
    numbers = uniforms([rows[place].seed for place in others], [len(rows[place].output_ids) for place in others])
    for place, number in zip(others, numbers.tolist()):
        found[place] = _attempt(logits[place], rows[place], number)
    return [choice for choice in found if choice is not None]


def _likeliest(logits: Tensor) -> list[Chosen | Exception]:
    """numpy's argmax is five times as fast as torch's on a CPU; both take the first of those that tie."""
    if not len(logits):
        return []
    if logits.device.type == "cpu" and logits.is_contiguous():
        values: npt.NDArray[np.float32] = logits.float().numpy()
        ids = values.argmax(-1)
        best = values[np.arange(len(ids)), ids]
    else:
        at = logits.argmax(-1, keepdim=True)
        ids, best = at[:, 0].cpu().numpy(), logits.gather(-1, at)[:, 0].float().cpu().numpy()
    return [Chosen(i) if ok else _not_finite() for i, ok in zip(ids.tolist(), np.isfinite(best).tolist())]


def _attempt(logits: Tensor, row: Choosing, number: float) -> Chosen | Exception:
    """One row; its own mistake is its own result."""
    try:
        return _chosen(logits.float().cpu().contiguous(), row, number)
    except Exception as error:
        return error


def _chosen(logits: Tensor, row: Choosing, number: float) -> Chosen:
    params, banned = row.params, row.banned
    wanted = logits
    if params.edits_logits or banned:
        wanted = edit(logits, params, row.seen, row.prompt_ids, row.output_ids, banned)
    best = float(wanted.numpy().max())
    if not np.isfinite(best):
        raise _none_left() if best == -np.inf else _not_finite()
    token_id = int(wanted.numpy().argmax()) if params.greedy else draw(wanted, params, number)
    return Chosen(token_id) if params.logprobs is None else scored(logits, token_id, params.logprobs)


def _not_finite() -> ModelFailed:
    return ModelFailed(
        "The logits are not finite.", "fp16 may overflow: use bf16 or fp32; else look for NaN in the weights."
    )


def _none_left() -> InvalidRequest:
    return InvalidRequest(
        "Bias, min_tokens and logits processors together left no token to choose.", "Let at least one keep its logit."
    )
