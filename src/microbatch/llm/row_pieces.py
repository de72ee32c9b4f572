"""The rows of a step, and how they are put together for attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from microbatch.llm.attention import GROUP_BYTES, PADDING, Piece, causal_mask
from microbatch.llm.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Row:
    """The next tokens of one sequence.

    Attributes:
        ids: the new tokens.
        start: position of the first; those before are in the cache.
        table: the sequence's blocks, for all positions up to the last new one.
        all_logits: of every new token.
        wants_logits: of the last one.
    """

    ids: Sequence[int]
    start: int
    table: Sequence[int]
    all_logits: bool = False
    wants_logits: bool = True

    @property
    def end(self) -> int:
        """Tokens after the step."""
        return self.start + len(self.ids)


def pieces_of(
    rows: Sequence[Row], block_size: int, window: int | None, decoder: Decoder, invariant: bool
) -> list[Piece]:
    """How the rows attend, in their order.

    Args:
        rows: those with one token first, by their length.
    """
    singles = 0 if invariant else next((i for i, row in enumerate(rows) if len(row.ids) > 1), len(rows))
    row_bytes = decoder.kv_heads * decoder.head_dim * block_size * decoder.arithmetic.itemsize
    pieces = [
        _decode_piece(rows[first:last], first, block_size, window, decoder)
        for first, last in _groups([_seen(row, block_size, window) for row in rows[:singles]], row_bytes)
    ]
    first = singles
    for row in rows[singles:]:
        if invariant:
            pieces += _tiles(row, first, block_size, window, decoder)
        else:
            pieces.append(_prefill_piece(row, first, block_size, window, decoder))
        first += len(row.ids)
    return pieces


def _seen(row: Row, block_size: int, window: int | None) -> range:
    """Places in its table of the blocks that a row's new tokens see."""
    first = 0 if window is None else max(0, row.start + 1 - window)
    return range(first // block_size, -(-row.end // block_size))


def _groups(seen: Sequence[range], block_bytes: int) -> Iterator[tuple[int, int]]:
    """Cuts of decode rows, from and up to, whose gathered keys are few enough and not too much padding."""
    first, blocks = 0, 0
    for index, places in enumerate(seen):
        longest, count = len(places), index - first + 1  # rows come by length
        padded = longest * count
        if count > 1 and (padded * block_bytes > GROUP_BYTES or padded - blocks - longest > PADDING * padded):
            yield first, index
            first, blocks = index, 0
        blocks += len(places)
    if len(seen):
        yield first, len(seen)


def _decode_piece(rows: Sequence[Row], first: int, block_size: int, window: int | None, decoder: Decoder) -> Piece:
    seen = [_seen(row, block_size, window) for row in rows]
    longest = max(len(places) for places in seen)
    blocks: list[int] = []
    lengths, hidden = [], []
    for row, places in zip(rows, seen):
        own = [row.table[place] for place in places]
        blocks += own + own[-1:] * (longest - len(own))
        before = places.start * block_size
        lengths.append(row.end - before)
        hidden.append(0 if window is None else max(0, row.end - window - before))
    mask = None
    if min(lengths) < longest * block_size or any(hidden):
        slots = torch.arange(longest * block_size, device=decoder.device)[None, None]
        ends, starts = (torch.tensor(edge, device=decoder.device)[:, None, None] for edge in (lengths, hidden))
        mask = _minus_infinity((slots >= ends) | (slots < starts), decoder)
    return Piece(first, first + len(rows), _tensor(blocks, decoder), mask, len(rows))


def _prefill_piece(row: Row, first: int, block_size: int, window: int | None, decoder: Decoder) -> Piece:
    count = len(row.ids)
    if row.start == 0 and (window is None or count <= window):
        return Piece(first, first + count, None, None, 1)
    seen = _seen(row, block_size, window)
    before = seen.start * block_size
    keys = len(seen) * block_size
    mask = causal_mask(count, row.start - before, window, decoder.arithmetic, decoder.device, keys)
    blocks = _tensor([row.table[place] for place in seen], decoder)
    return Piece(first, first + count, blocks, mask[None], 1)


def _tiles(row: Row, first: int, block_size: int, window: int | None, decoder: Decoder) -> Iterator[Piece]:
    """The row's tokens cut at its blocks; the keys of a tile follow from its place in the sequence alone."""
    for start in range(row.start - row.start % block_size, row.end, block_size):
        own = range(max(start, row.start), min(start + block_size, row.end))
        seen = range(0 if window is None else max(0, start + 1 - window) // block_size, start // block_size + 1)
        before = seen.start * block_size
        keys = len(seen) * block_size
        mask = causal_mask(block_size, start - before, window, decoder.arithmetic, decoder.device, keys)
        blocks = _tensor([row.table[place] for place in seen], decoder)
        last = first + len(own)
        yield Piece(first, last, blocks, mask[None], 1, (own.start - start, block_size))
        first = last


def _tensor(values: Sequence[int], decoder: Decoder) -> Tensor:
    return torch.tensor(values, dtype=torch.long, device=decoder.device)


def _minus_infinity(hidden: Tensor, decoder: Decoder) -> Tensor:
    zeros = torch.zeros(hidden.shape, dtype=decoder.arithmetic, device=decoder.device)
    return zeros.masked_fill_(hidden, float("-inf"))
