"""Items made one batch: stacked, and padded only where the items say themselves that padding is hidden."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

MASK = "attention_mask"
"""The member by which items of different lengths may share a batch: padded with 0 it hides the padding."""

_IGNORED = {"labels": -100}
"""What pads a member; 0 for all others."""


def collated(items: Sequence[Any], name: str = "") -> Any:
    """A batch of items: members by members, tensors, arrays and numbers as one tensor, texts as a list.

    Args:
        items: of one form; of different lengths only where they have a mask.
        name: of the member that they are.
    """
    first = items[0]
    if isinstance(first, Mapping):
        return {key: collated([item[key] for item in items], str(key)) for key in first}
    if isinstance(first, tuple):
        columns = [collated(column) for column in zip(*items, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    if not is_numeric(first):
        return list(items)
    tensors = [as_tensor(item) for item in items]
    if len({tensor.shape for tensor in tensors}) == 1:
        return torch.stack(tensors)
    return pad_sequence(tensors, batch_first=True, padding_value=_IGNORED.get(name, 0))


def kind_of(item: Any) -> Hashable:
    """What items must have in common to share a batch: shapes, or nothing where they have a mask."""
    if isinstance(item, Mapping) and MASK in item:
        return None
    return _shape(item)


def is_numeric(value: Any) -> bool:
    """Whether a value becomes a tensor."""
    if isinstance(value, (Tensor, np.ndarray, np.generic, int, float, complex)):
        return not (isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "OUS")
    return isinstance(value, list) and bool(value) and all(is_numeric(item) for item in value)


def as_tensor(value: Any) -> Tensor:
    """A number, a list of numbers or an array as a tensor; an array is copied, since it may be read-only."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        return torch.from_numpy(np.array(value))
    if isinstance(value, list) and any(isinstance(item, Tensor) for item in value):
        return torch.stack([as_tensor(item) for item in value])
    return torch.tensor(value)


def _shape(value: Any) -> Hashable:
    if isinstance(value, Mapping):
        return tuple((key, _shape(item)) for key, item in value.items())
    if isinstance(value, tuple):
        return tuple(_shape(item) for item in value)
    if isinstance(value, (Tensor, np.ndarray)):
        return tuple(value.shape)
    if isinstance(value, list) and is_numeric(value):
        return (len(value), _shape(value[0]))
    return None
