"""Rows that are shorter than their batch, and sequences that lie end to end: the same rows without the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from microbatch.batch.example import map_tensors
from microbatch.batch.rows import Rows

MOST_PADDED = 3
"""Rows for each side: one alone might hold the same tokens in its padding as before it."""

Padded = tuple[Any, Any, Rows]
"""A row with its padding, the same without, and which part of the first the second is."""


def padded_rows(batch: Any) -> Iterator[Padded]:
    """A few rows for each side on which a batch is padded, as its mask says; nothing for other batches.

    A mask is a tensor of (batch, tokens) with "mask" in its name that holds zeros and ones, ones for tokens; where
    its name holds "padding_mask", ones for padding.
    """
    sides = {True: 0, False: 0}
    for row, kept in enumerate(_kept(batch)):
        tokens = int(kept.sum())
        at_end = bool(kept[:tokens].all())
        at_start = bool(kept[len(kept) - tokens :].all())
        if tokens in (0, len(kept)) or not (at_end or at_start) or sides[at_end] == MOST_PADDED:
            continue
        sides[at_end] += 1
        rows = Rows(len(kept), 0, tokens) if at_end else Rows(len(kept), len(kept) - tokens, len(kept))
        alone = _row(batch, row)
        yield alone, _narrowed(alone, rows), rows


def packed_sequences(batch: Any) -> list[Padded]:
    """The batch, each of its packed sequences alone, and its tokens; nothing for batches that are not packed.

    One row is packed where its `position_ids` start again, or where `seq_idx`, `document_ids` or `sequence_ids`
    change.
    """
    starts = _starts(batch)
    if len(starts) < 2:
        return []
    tokens = starts.pop()
    borders = [Rows(tokens, start, stop) for start, stop in zip(starts, [*starts[1:], tokens])]
    return [(batch, _narrowed(batch, rows), rows) for rows in borders] if len(borders) > 1 else []


def token_rows(batch: Any, sizes: list[int]) -> list[Rows] | None:
    """Which tokens each piece has in a batch with cumulative lengths; None for other batches."""
    found = [t for path, t in _named(batch) if _last(path).startswith(("cu_seq", "cu_len")) and t.dim() == 1]
    if not found:
        return None
    offsets, place, rows = found[0].tolist(), 0, []
    for size in sizes:
        rows.append(Rows(offsets[-1], offsets[place], offsets[place + size]))
        place += size
    return rows


def is_open_mask(name: str, mask: Tensor) -> bool:
    """Whether a tensor is such a mask and hides nothing."""
    return _is_mask(name, mask) and bool(_tokens(name, mask).all())


def _is_mask(name: str, tensor: Tensor) -> bool:
    return "mask" in name and tensor.dim() == 2 and len(tensor) > 0 and bool(((tensor == 0) | (tensor == 1)).all())


def _tokens(name: str, mask: Tensor) -> Tensor:
    """True where there is a token."""
    return mask == (0 if "padding_mask" in name or "pad_mask" in name else 1)


def _kept(batch: Any) -> list[Tensor]:
    """For each row, which of its tokens are no padding."""
    for path, tensor in _named(batch):
        if _is_mask(_last(path), tensor):
            return list(_tokens(_last(path), tensor).unbind())
    return []


def _starts(batch: Any) -> list[int]:
    """Where sequences begin in a single row, and how many tokens it has at last."""
    for path, tensor in _named(batch):
        name, flat = _last(path), tensor.flatten()
        if tensor.shape[:-1].numel() != 1 or tensor.dim() == 0 or len(flat) < 2 or tensor.is_floating_point():
            continue
        if name == "position_ids":
            begins = flat[1:] == 0
        elif name in ("seq_idx", "document_ids", "sequence_ids", "segment_ids"):
            begins = flat[1:] != flat[:-1]
        else:
            continue
        return [0, *(begins.nonzero().flatten() + 1).tolist(), len(flat)]
    return []


def _named(batch: Any) -> list[tuple[str, Tensor]]:
    found: list[tuple[str, Tensor]] = []

    def note(path: str, tensor: Tensor) -> Tensor:
        found.append((path, tensor))
        return tensor

    map_tensors((batch,), {}, note)
    return found


def _last(path: str) -> str:
    """``args[0]['attention_mask']`` → ``attention_mask``."""
    return path.replace("'", "").replace("]", "").replace("[", ".").rpartition(".")[2]


def _row(batch: Any, row: int) -> Any:
    whole = max(len(tensor) for _, tensor in _named(batch) if tensor.dim())

    def cut(_: str, tensor: Tensor) -> Tensor:
        return tensor[row : row + 1] if tensor.dim() and len(tensor) == whole else tensor

    return map_tensors((batch,), {}, cut)[0][0]


def _narrowed(batch: Any, rows: Rows) -> Any:
    """The first dimension with an entry for each token is cut to the piece's; in a mask every such dimension."""

    def cut(path: str, tensor: Tensor) -> Tensor:
        axes = [axis for axis in range(tensor.dim()) if tensor.shape[axis] == rows.whole]
        for axis in axes if "mask" in _last(path) else axes[:1]:
            tensor = tensor.narrow(axis, rows.start, rows.count)
        return tensor

    return map_tensors((batch,), {}, cut)[0][0]
