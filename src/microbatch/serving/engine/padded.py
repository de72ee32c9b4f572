"""Token sequences of different lengths in one batch: padded, masked, and their padding taken out of results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from microbatch.errors import InvalidBatch

Collate = Callable[[list[Any]], Any]
"""``collate(items) -> batch``, as a module takes it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Padded:
    """A collate for sequences of different lengths: ``{"input_ids": (n, longest), "attention_mask": (n, longest)}``.

    An item is a one-dimensional tensor or list of whole numbers, or a dict with one as ``input_ids``.

    Attributes:
        value: what padding holds.
        per_token: the model gives a row for each token: those of padding are taken out of the results.
    """

    value: int = 0
    per_token: bool = False

    def __call__(self, items: list[Any]) -> dict[str, Tensor]:
        rows = [_tokens(item) for item in items]
        return {
            "input_ids": pad_sequence(rows, batch_first=True, padding_value=self.value),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        }

    def length(self, item: Any) -> int:
        """Tokens of an item."""
        return len(_tokens(item))


def _tokens(item: Any) -> Tensor:
    values = torch.as_tensor(item["input_ids"] if isinstance(item, Mapping) else item)
    if values.dim() != 1 or not len(values):
        raise InvalidBatch(f"An item has shape {tuple(values.shape)}, not (tokens,).", "Give one sequence an item.")
    return values.long()


def without_padding(row: Any, longest: int, length: int) -> Any:
    """A result without the rows that belong to padding: what has `longest` entries keeps its first `length`."""
    if isinstance(row, Tensor):
        return row[:length] if row.dim() and row.shape[0] == longest and length < longest else row
    if isinstance(row, Mapping):
        return {key: without_padding(value, longest, length) for key, value in row.items()}
    if isinstance(row, tuple):
        return tuple(without_padding(value, longest, length) for value in row)
    return row
