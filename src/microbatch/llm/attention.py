"""The paged cache of keys and values, and attention over it.

A layer's pool is [kv heads, slots, head dim]: gathered by block, or read in place where a sequence's blocks are
neighbours, it is what the products want, with nothing copied inside of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

FEW_QUERIES = 8
"""Fewer queries of a key than this run as plain products in 16 bits on a CPU."""


class KVCache:
    """Keys and values of every layer. Slots of a block are neighbours; what was never written is zero.

    Attributes:
        keys, values: one tensor [kv heads, num_blocks × block_size, head dim] for each layer.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            shapes: (kv heads, head dim) of each layer.
        """
        self.num_blocks, self.block_size = num_blocks, block_size

        def pool(heads: int, width: int) -> Tensor:
            return torch.zeros(heads, num_blocks * block_size, width, dtype=dtype, device=device)

        self.keys = [pool(*shape) for shape in shapes]
        self.values = [pool(*shape) for shape in shapes]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keys and values [tokens, kv heads, head dim] into their slots."""
        self.keys[layer].index_copy_(1, slots, keys.transpose(0, 1))
        self.values[layer].index_copy_(1, slots, values.transpose(0, 1))

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Blocks (from, to), all read before any is written."""
        if not pairs:
            return
        source, target = (torch.tensor(side, device=self.keys[0].device) for side in zip(*pairs, strict=True))
        for pool in (*self.keys, *self.values):
            blocks = self._blocks(pool)
            blocks.index_copy_(1, target, blocks.index_select(1, source))

    def clear(self, blocks: Tensor) -> None:
        """What the blocks held is gone: where they are read beyond their last token, only finite numbers may be."""
        for pool in (*self.keys, *self.values):
            self._blocks(pool).index_fill_(1, blocks, 0.0)

    def gather(self, pool: Tensor, blocks: Tensor, rows: int) -> Tensor:
        """[kv heads, rows, tokens, head dim] of the blocks [rows × blocks of each]."""
        return self._blocks(pool).index_select(1, blocks).view(pool.shape[0], rows, -1, pool.shape[2])

    def _blocks(self, pool: Tensor) -> Tensor:
        return pool.view(pool.shape[0], self.num_blocks, -1)


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer makes scores.

    Attributes:
        scale: of query times key.
        softcap: c of c tanh(score / c); None without.
    """

    scale: float
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What a layer asks about its new tokens, whose keys and values are in the cache already.

    Attributes:
        queries: [tokens, heads, head dim].
        keys, values: [tokens, kv heads, head dim].
        layer: its number in the cache.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    layer: int
    scores: Scores

    def grouped(self, first: int, last: int, rows: int) -> Tensor:
        """Queries [kv heads, rows, heads that share keys, tokens of a row, head dim] of some tokens."""
        _, heads, width = self.queries.shape
        kv_heads = self.keys.shape[1]
        queries = self.queries[first:last].view(rows, -1, kv_heads, heads // kv_heads, width)
        return queries.permute(2, 0, 3, 1, 4)


class Piece(Protocol):
    """Rows of a step that attend together."""

    def attend(self, asked: Asked, cache: KVCache, output: Tensor) -> None:
        """Fills in its tokens of the output [tokens, heads, head dim]."""
        ...


@dataclass(frozen=True, slots=True)
class Singles:
    """Rows with one new token each, whose keys lie in neighbouring slots: read in place, one row after the other.

    Attributes:
        first: token.
        spans: slots of each row's keys, from and up to.
    """

    first: int
    spans: tuple[tuple[int, int], ...]

    def attend(self, asked: Asked, cache: KVCache, output: Tensor) -> None:
        keys, values, scores = cache.keys[asked.layer], cache.values[asked.layer], asked.scores
        last = self.first + len(self.spans)
        # heads that share keys are several queries of them: [kv heads, group, head dim] of each row
        queries = asked.grouped(self.first, last, len(self.spans)).squeeze(3).unbind(1)
        found = [
            attention(q[None], keys[None, :, start:end], values[None, :, start:end], None, False, scores)
            for q, (start, end) in zip(queries, self.spans)
        ]
        output[self.first : last] = torch.cat(found).flatten(1, 2)


@dataclass(frozen=True, slots=True)
class Gathered:
    """Rows with one new token each, whose blocks are gathered.

    Attributes:
        first, last: tokens, one of each row.
        blocks: of all rows, as many of each.
        mask: added to the scores, [1, rows, 1, keys]; None where all are seen.
    """

    first: int
    last: int
    blocks: Tensor
    mask: Tensor | None

    def attend(self, asked: Asked, cache: KVCache, output: Tensor) -> None:
        rows = self.last - self.first
        keys, values = (cache.gather(pool[asked.layer], self.blocks, rows) for pool in (cache.keys, cache.values))
        queries = asked.grouped(self.first, self.last, rows).squeeze(3)
        found = attention(queries, keys, values, self.mask, False, asked.scores)
        output[self.first : self.last] = found.transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True, slots=True)
class Prompt:
    """New tokens of one row.

    Attributes:
        first, last: tokens.
        keys: where the keys lie: blocks, or a slice of slots where they are neighbours; None where they are the new
            tokens alone.
        mask: added to the scores, [tokens, keys]; None where they are the new tokens alone, in order.
    """

    first: int
    last: int
    keys: Tensor | slice | None
    mask: Tensor | None

    def attend(self, asked: Asked, cache: KVCache, output: Tensor) -> None:
        queries = asked.grouped(self.first, self.last, 1)[:, 0]
        here = slice(self.first, self.last)
        pairs = ((asked.keys, cache.keys), (asked.values, cache.values))
        keys, values = (self._of(new[here], pools[asked.layer], cache) for new, pools in pairs)
        group = queries.shape[1]
        keys, values = (x[:, None].expand(-1, group, -1, -1) for x in (keys, values))
        found = attention(queries, keys, values, self.mask, self.mask is None, asked.scores)
        output[here] = found.permute(2, 0, 1, 3).flatten(1, 2)

    def _of(self, new: Tensor, pool: Tensor, cache: KVCache) -> Tensor:
        if self.keys is None:
            return new.transpose(0, 1)
        return pool[:, self.keys] if isinstance(self.keys, slice) else cache.gather(pool, self.keys, 1)[:, 0]


@dataclass(frozen=True, slots=True)
class Tile:
    """New tokens of one row that lie in one block, among queries that nobody asked for: the products of a position have
    one form, whatever is computed beside it.

    Attributes:
        first, last: tokens.
        place: of the first in its block.
        blocks: that the block's tokens see, its own the last.
        mask: [block size, keys].
    """

    first: int
    last: int
    place: int
    blocks: Tensor
    mask: Tensor

    def attend(self, asked: Asked, cache: KVCache, output: Tensor) -> None:
        keys, values = (cache.gather(pool[asked.layer], self.blocks, 1) for pool in (cache.keys, cache.values))
        after = cache.block_size - self.place - (self.last - self.first)
        queries = pad(asked.grouped(self.first, self.last, 1)[:, 0], (0, 0, self.place, after))
        group = queries.shape[1]
        keys, values = (x.expand(-1, group, -1, -1) for x in (keys, values))
        found = by_definition(queries, keys, values, self.mask, False, asked.scores)
        own = found[:, :, self.place : cache.block_size - after]
        output[self.first : self.last] = own.permute(2, 0, 1, 3).flatten(1, 2)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scores: Scores) -> Tensor:
    """Attention in the form that was measured to be the fastest (benchmarks/generation_kernels.py).

    Args:
        q: [batch, batch, queries, head dim].
        k, v: [batch, batch, keys, head dim].
        mask: added to the scores, in two or four dimensions.
        causal: each query sees the keys up to its own number.
    """
    few = q.shape[2] < FEW_QUERIES and q.dtype.itemsize == 2 and q.device.type == "cpu"
    if few or scores.softcap is not None:
        return by_definition(q, k, v, mask, causal, scores)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scores.scale)


def by_definition(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scores: Scores) -> Tensor:
    """The same in matrix products; the softmax in fp32 where the dtype has 16 bits."""
    products = torch.matmul(q, k.transpose(-1, -2)) * scores.scale
    if scores.softcap is not None:
        products = torch.tanh(products / scores.softcap) * scores.softcap
    if causal:
        mask = causal_mask(q.shape[2], 0, None, q.dtype, q.device)
    if mask is not None:
        products += mask
    dtype = torch.float32 if q.dtype.itemsize == 2 else q.dtype
    return torch.matmul(torch.softmax(products, dim=-1, dtype=dtype).to(q.dtype), v)


def causal_mask(
    queries: int, before: int, window: int | None, dtype: torch.dtype, device: torch.device, keys: int | None = None
) -> Tensor:
    """What is added to the scores [queries, keys]: 0 where a query sees the key, else minus infinity.

    Args:
        before: keys before the first query's own.
        window: keys that a query sees, its own included; None for all.
        keys: in all, by default as many as the last query sees.
    """
    own = torch.arange(before, before + queries, device=device)[:, None]
    places = torch.arange(before + queries if keys is None else keys, device=device)[None, :]
    hidden = places > own
    if window is not None:
        hidden |= places <= own - window
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
