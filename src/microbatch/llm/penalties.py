"""The logits that count: the model's, after bias, penalties, custom processors and `min_tokens`.

Only the entries of tokens that were seen are touched; nothing walks the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from microbatch.errors import InvalidOutput
from microbatch.llm.sampling_params import check_token_ids

if TYPE_CHECKING:
    from torch import Tensor

    from microbatch.llm.sampling_params import LogitsProcessor, SamplingParams


class Seen:
    """How often each token of a growing sequence stands in its output, and which ones stand in its prompt.

    It counts only what has come since it was last asked, so a step costs as much as its new tokens.
    """

    __slots__ = ("_counted", "_counts", "_ids", "_places")

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._ids = np.empty(16, np.int64)
        self._counts = np.zeros(16, np.float32)
        self._counted: int | None = None

    def update(
        self, prompt: Sequence[int], output: Sequence[int]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Each token of `prompt` and `output` once, and its number in `output`.

        Args:
            prompt: the same at every call.
            output: what it was at the last call, and more.
        """
        if self._counted is None:
            for token_id in prompt:
                self._add(token_id, 0)
            self._counted = 0
        for token_id in output[self._counted :]:
            self._add(token_id, 1)
        self._counted = len(output)
        used = len(self._places)
        return self._ids[:used], self._counts[:used]

    def _add(self, token_id: int, times: int) -> None:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids, self._counts = np.resize(self._ids, 2 * place), np.resize(self._counts, 2 * place)
            self._counts[place:] = 0
        self._ids[place] = token_id
        self._counts[place] += times


def edit(
    logits: Tensor,
    params: SamplingParams,
    seen: Seen,
    prompt: Sequence[int],
    output: Sequence[int],
    banned: Sequence[int],
) -> Tensor:
    """A row of logits as `params` want it, in memory of its own.

    Args:
        logits: ``[vocabulary]``.
        seen: of this sequence.
        banned: token ids that may not be chosen here: the ends before `min_tokens`.

    Raises:
        InvalidRequest: a bias or a stop token is outside the vocabulary.
        InvalidOutput: a processor gave something else than logits.
        Exception: whatever a processor raises.
    """
    row = logits.clone()
    if params.logit_bias:
        _add_bias(row, params)
    if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
        ids, counts = seen.update(prompt if params.repetition_penalty != 1 else (), output)
        _penalise(row, params, torch.from_numpy(ids), torch.from_numpy(counts))
    for processor in params.logits_processors:
        row = _processed(row, processor, [*prompt, *output])
    if banned:
        check_token_ids(banned, len(row), "stop_token_ids")
        row[list(banned)] = -torch.inf
    return row


def _add_bias(row: Tensor, params: SamplingParams) -> None:
    check_token_ids(params.logit_bias, len(row), "logit_bias")
    row[list(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype)


def _penalise(row: Tensor, params: SamplingParams, ids: Tensor, counts: Tensor) -> None:
    """Repetition first, then OpenAI's ``logit − counts × frequency − (counts > 0) × presence``."""
    values = row[ids]
    if params.repetition_penalty != 1:
        penalty = params.repetition_penalty
        values = torch.where(values > 0, values / penalty, values * penalty)
    if params.frequency_penalty:
        values -= counts * params.frequency_penalty
    if params.presence_penalty:
        values -= (counts > 0) * params.presence_penalty
    row[ids] = values


def _processed(row: Tensor, processor: LogitsProcessor, ids: list[int]) -> Tensor:
    found = processor(ids, row)
    name = getattr(processor, "__qualname__", type(processor).__name__)
    if not isinstance(found, torch.Tensor) or found.shape != row.shape:
        what = f"a tensor of {list(found.shape)}" if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
        raise InvalidOutput(
            f"The logits processor {name} gave {what} for {list(row.shape)} logits.", "Return the logits, edited."
        )
    return found.detach().to(row, copy=True)
