"""The rows of a step, and how they are put together for attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from microbatch.llm.attention import Gathered, Piece, Prompt, Singles, Tile, causal_mask
from microbatch.llm.decoder import Decoder

GROUP_BYTES = 2 << 20
"""Keys of decode rows that are gathered at a time: they stay in the processor's cache until they are read."""
PADDING = 0.25
"""Share of a group's gathered blocks that may be padding."""


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
    places = _Places(block_size, window, decoder)
    singles = 0 if invariant else next((i for i, row in enumerate(rows) if len(row.ids) > 1), len(rows))
    pieces = list(places.singles(rows[:singles]))
    first = singles
    for row in rows[singles:]:
        pieces += places.tiles(row, first) if invariant else [places.prompt(row, first)]
        first += len(row.ids)
    return pieces


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the rows of a step find the keys that a layer with this window sees."""

    block_size: int
    window: int | None
    decoder: Decoder

    def singles(self, rows: Sequence[Row]) -> Iterator[Piece]:
        """Stretches of rows that are read in place, and groups of those between that are gathered."""
        runs = [self._run(row) for row in rows]
        first = 0
        while first < len(rows):
            in_place = runs[first] is not None
            last = next((i for i in range(first, len(rows)) if (runs[i] is not None) != in_place), len(rows))
            if in_place:
                yield Singles(first, tuple((run.start, run.stop) for run in runs[first:last] if run is not None))
            else:
                yield from self._groups(rows[first:last], first)
            first = last

    def prompt(self, row: Row, first: int) -> Prompt:
        """A row with several new tokens."""
        count = len(row.ids)
        if row.start == 0 and (self.window is None or count <= self.window):
            return Prompt(first, first + count, None, None)
        run = self._run(row)
        seen = self._seen(row)
        before = row.end - (run.stop - run.start) if run is not None else seen.start * self.block_size
        keys = run.stop - run.start if run is not None else len(seen) * self.block_size
        mask = self._mask(count, row.start - before, keys)
        where = run if run is not None else self._tensor([row.table[place] for place in seen])
        return Prompt(first, first + count, where, mask)

    def tiles(self, row: Row, first: int) -> Iterator[Tile]:
        """The row's tokens cut at its blocks; the keys of a tile follow from its place in the sequence alone."""
        size = self.block_size
        for start in range(row.start - row.start % size, row.end, size):
            own = range(max(start, row.start), min(start + size, row.end))
            seen = range(self._first(start) // size, start // size + 1)
            mask = self._mask(size, start - seen.start * size, len(seen) * size)
            blocks = self._tensor([row.table[place] for place in seen])
            last = first + len(own)
            yield Tile(first, last, own.start - start, blocks, mask)
            first = last

    def _first(self, position: int) -> int:
        """The first position that a token sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window)

    def _seen(self, row: Row) -> range:
        """Places in its table of the blocks that a row's new tokens see."""
        return range(self._first(row.start) // self.block_size, -(-row.end // self.block_size))

    def _run(self, row: Row) -> slice | None:
        """Slots of the keys that a row's new tokens see, where they are neighbours."""
        seen = self._seen(row)
        blocks = row.table[seen.start : seen.stop]
        lowest = blocks[0]
        if any(block != lowest + place for place, block in enumerate(blocks)):
            return None
        offset = (lowest - seen.start) * self.block_size
        return slice(offset + self._first(row.start), offset + row.end)

    def _groups(self, rows: Sequence[Row], first: int) -> Iterator[Gathered]:
        """Groups whose keys are few enough to stay in the processor's cache, and not too much padding."""
        heads, width, bits = self.decoder.kv_heads, self.decoder.head_dim, self.decoder.arithmetic.itemsize
        most = GROUP_BYTES // (heads * width * bits * self.block_size)
        begin, blocks = 0, 0
        for index, row in enumerate(rows):
            longest, count = len(self._seen(row)), index - begin + 1  # rows come by length
            padded = longest * count
            if count > 1 and (padded > most or padded - blocks - longest > PADDING * padded):
                yield self._gathered(rows[begin:index], first + begin)
                begin, blocks = index, 0
            blocks += longest
        yield self._gathered(rows[begin:], first + begin)

    def _gathered(self, rows: Sequence[Row], first: int) -> Gathered:
        seen = [self._seen(row) for row in rows]
        longest = max(len(places) for places in seen)
        blocks: list[int] = []
        for row, places in zip(rows, seen):
            own = [row.table[place] for place in places]
            blocks += own + own[-1:] * (longest - len(own))
        before = [places.start * self.block_size for places in seen]
        ends = [row.end - skipped for row, skipped in zip(rows, before)]
        starts = [self._first(row.start) - skipped for row, skipped in zip(rows, before)]
        mask = None
        if min(ends) < longest * self.block_size or any(starts):
            slots = torch.arange(longest * self.block_size, device=self.decoder.device)
            low, high = (self._tensor(edge)[:, None] for edge in (starts, ends))
            hidden = (slots < low) | (slots >= high)
            zeros = torch.zeros(hidden.shape, dtype=self.decoder.arithmetic, device=self.decoder.device)
            mask = zeros.masked_fill_(hidden, float("-inf"))[None, :, None]
        return Gathered(first, first + len(rows), self._tensor(blocks), mask)

    def _mask(self, count: int, before: int, keys: int) -> Tensor:
        return causal_mask(count, before, self.window, self.decoder.arithmetic, self.decoder.device, keys)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.decoder.device)
