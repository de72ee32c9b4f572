"""Tensors of every rank on every rank, whatever their shapes, numbers and dtypes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from microbatch.training.ranks.meeting import Meeting

_ALIGNED = 16
"""Bytes: a tensor of any dtype may begin at a multiple of this."""

Gathered = list[tuple[Any, list[Tensor]]]
"""Note and tensors of each rank, in the order of ranks."""


def gather(meeting: Meeting, note: Any, tensors: Sequence[Tensor]) -> Gathered:
    """What every rank gives: one meeting for the notes and shapes, one all-gather for all bytes.

    Args:
        meeting: the ranks.
        note: what JSON can hold.
        tensors: this rank's, without a graph; not the same number on every rank.

    Raises:
        RankFailed: a rank said that it failed.
    """
    forms = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    said = meeting.hold({"note": note, "forms": forms})
    lengths = [sum(_room(form) for form in one["forms"]) for one in said]
    room = max(lengths)
    if not room:
        return [(one["note"], [_empty(form, meeting.device) for form in one["forms"]]) for one in said]
    rows = meeting.all_gather(_packed(tensors, room, meeting.device))
    return [(one["note"], _unpacked(row, one["forms"])) for one, row in zip(said, rows)]


def _room(form: Any) -> int:
    count: int = math.prod(form[1]) * _dtype(form).itemsize
    return -(-count // _ALIGNED) * _ALIGNED


def _dtype(form: Any) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, form[0])
    return dtype


def _empty(form: Any, device: torch.device) -> Tensor:
    return torch.empty(form[1], dtype=_dtype(form), device=device)


def _packed(tensors: Sequence[Tensor], room: int, device: torch.device) -> Tensor:
    packed, start = torch.zeros(room, dtype=torch.uint8, device=device), 0
    for tensor in tensors:
        count = tensor.numel() * tensor.element_size()
        place = packed[start : start + count].view(tensor.dtype)
        place.copy_(tensor.detach().reshape(-1))
        start += -(-count // _ALIGNED) * _ALIGNED
    return packed


def _unpacked(row: Tensor, forms: Sequence[Any]) -> list[Tensor]:
    tensors, start = [], 0
    for form in forms:
        count = math.prod(form[1]) * _dtype(form).itemsize
        tensors.append(row[start : start + count].view(_dtype(form)).view(form[1]))
        start += _room(form)
    return tensors
