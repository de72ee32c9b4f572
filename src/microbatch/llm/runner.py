"""One step of a decoder over rows of several sequences: prompts, pieces of prompts and single tokens mixed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from microbatch.errors import InvalidSettings
from microbatch.llm.attention import KVCache
from microbatch.llm.decoder import Decoder, Step
from microbatch.llm.placement import Placement
from microbatch.llm.row_pieces import Row as Row
from microbatch.llm.row_pieces import pieces_of
from microbatch.measure.memory import MARGIN, measure_peak_bytes, memory_budget
from microbatch.units import format_bytes

LARGEST_STEP = 512
"""Tokens of a step whose memory is measured, unless the caller knows better."""
LOGITS_COPIES = 4
"""Copies of a step's logits in fp32 that sampling may hold at a time."""


@dataclass(frozen=True, slots=True)
class StepLogits:
    """Logits of one step, in fp32.

    Attributes:
        last: [rows that wanted logits, vocab_size], of their last tokens.
        rows: which rows these are, in their order.
        every: for rows that wanted all, by row: [tokens, vocab_size].
    """

    last: Tensor
    rows: tuple[int, ...]
    every: dict[int, Tensor]


class Runner:
    """A decoder with its cache. Not for several threads at a time."""

    def __init__(self, decoder: Decoder, num_blocks: int, block_size: int = 16, *, invariant: bool = False) -> None:
        """
        Args:
            invariant: a row's logits have the same bits whatever other rows are in the step, and however its prompt
                is cut: linear layers in tiles of one size, attention in tiles at fixed positions. The decoder's layers
                stay tiled: give it to no other runner.
        """
        self.decoder = decoder
        self.num_blocks, self.block_size = num_blocks, block_size
        self.invariant = invariant
        shapes = [(layer.kv_heads, layer.head_dim) for layer in decoder.layers]
        self.cache = KVCache(shapes, num_blocks, block_size, decoder.arithmetic, decoder.device)
        self._placement = Placement(num_blocks)
        if invariant:
            for linear, features in decoder.linears():
                linear.use_tiles(decoder.arithmetic, features, decoder.device)

    @property
    def bytes_per_block(self) -> int:
        """Of keys and values of all layers."""
        return self.decoder.kv_bytes_per_token * self.block_size

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Block copies (from, to), all read before any is written."""
        for _, target in pairs:
            self._placement.begin(target, None, set())
        places = self._placement.places
        self.cache.copy([(places([source], 1)[0], places([target], 1)[0]) for source, target in pairs])

    @torch.inference_mode()
    def step(self, rows: Sequence[Row]) -> StepLogits:
        """Computes the new tokens of every row, writes their keys and values, and returns the logits asked for."""
        order = sorted(range(len(rows)), key=lambda index: (len(rows[index].ids) > 1, rows[index].end))
        placed = self._placed([rows[index] for index in order])
        firsts = dict(zip(order, accumulate((len(row.ids) for row in placed), initial=0)))
        wanting = tuple(index for index, row in enumerate(rows) if row.wants_logits)
        wanted = [firsts[index] + len(rows[index].ids) - 1 for index in wanting]
        everything = [index for index, row in enumerate(rows) if row.all_logits]
        for index in everything:
            wanted += range(firsts[index], firsts[index] + len(rows[index].ids))
        logits = self.decoder.logits(self.decoder.hidden_states(self._step(placed, wanted), self.cache))
        last, *every = logits.split([len(wanting), *(len(rows[index].ids) for index in everything)])
        return StepLogits(last, wanting, dict(zip(everything, every)))

    def _placed(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with tables of places, after blocks that begin were put behind those before them."""
        size = self.block_size
        busy: set[int] = set()
        for row in rows:
            begun = range(-(-row.start // size), -(-row.end // size))
            if begun and not busy:
                busy = {block for other in rows for block in other.table}
            for index in begun:
                move = self._placement.begin(row.table[index], row.table[index - 1] if index else None, busy)
                if move is not None:
                    self.cache.copy([move])
        return [replace(row, table=self._placement.places(row.table, -(-row.end // size))) for row in rows]

    def _step(self, rows: Sequence[Row], wanted: Sequence[int]) -> Step:
        """The rows side by side."""
        size = self.block_size
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        unfilled: list[int] = []
        for row in rows:
            ids += row.ids
            own = range(row.start, row.end)
            positions += own
            slots += [row.table[place // size] * size + place % size for place in own]
            if row.end % size and row.end - row.end % size >= row.start:
                unfilled.append(row.table[row.end // size])
        return Step(
            ids=self._tensor(ids),
            positions=self._tensor(positions),
            slots=self._tensor(slots),
            wanted=self._tensor(wanted),
            unfilled=self._tensor(unfilled) if unfilled else None,
            end=max(row.end for row in rows),
            pieces={
                window: pieces_of(rows, size, window, self.decoder, self.invariant)
                for window in set(self.decoder.window)
            },
        )

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.decoder.device)

    @contextmanager
    def every_block_written(self) -> Iterator[None]:
        """For measurements: blocks may be read that nobody wrote. Afterwards none counts as written."""
        self._placement.in_order()
        try:
            yield
        finally:
            self._placement = Placement(self.num_blocks)

    def warm_up(self) -> None:
        """One small step of each kind, so that the first request does not pay for what is made once."""
        zeros = (0,) * min(4, self.decoder.context)
        table = tuple(range(-(-len(zeros) // self.block_size)))
        self.step([Row(zeros, 0, table)])
        self.step([Row(zeros[-1:], len(zeros) - 1, table)])


def blocks_for(
    decoder: Decoder,
    block_size: int,
    memory_limit: int | None = None,
    *,
    num_sequences: int,
    max_num_tokens: int = LARGEST_STEP,
) -> tuple[int, str]:
    """Blocks of the cache, and why so many.

    The budget (see `microbatch.measure.budget.memory_budget`) less the measured peak of the largest step and a margin,
    and never more than all sequences need to reach the end of the context.

    Args:
        num_sequences: that run at a time at most.
        max_num_tokens: of a step at most.

    Raises:
        InvalidSettings: not one sequence of the context's length fits in a limit that the user set, or one block in
            what there is.
    """
    block = block_size * decoder.kv_bytes_per_token
    wanted = num_sequences * -(-decoder.context // block_size)
    budget, source = memory_budget(memory_limit, decoder.device)
    step = step_bytes(decoder, block_size, num_sequences, max_num_tokens)
    room = int((1 - MARGIN) * budget) - step
    if room < block:
        raise InvalidSettings(
            f"The cache has no room: {format_bytes(budget)} ({source}) less {format_bytes(step)} for the largest step "
            f"leave less than a block of {format_bytes(block)}.",
            "Give more memory, or lower max_num_sequences= or max_num_tokens=.",
        )
    if wanted * block <= room:
        return wanted, f"{num_sequences} sequences of {decoder.context:,} tokens can need no more"
    left = f"{format_bytes(budget)} ({source}) less {format_bytes(step)} for the largest step and {MARGIN:.0%} margin"
    return room // block, f"memory: {left}"


def step_bytes(decoder: Decoder, block_size: int, num_sequences: int, max_num_tokens: int) -> int:
    """Most bytes that a step may have alive beside weights and cache: a prompt's measured, and the rows' logits."""
    tokens = min(max_num_tokens, decoder.context)
    table = tuple(range(-(-tokens // block_size)))
    runner = Runner(decoder, len(table), block_size)
    row = Row((0,) * tokens, 0, table)
    runner.step([row])
    logits = LOGITS_COPIES * num_sequences * decoder.vocab_size * 4
    return measure_peak_bytes(lambda: runner.step([row]), decoder.device) + logits
