"""The paged cache of keys and values, and attention over it.

A layer's pool is [kv heads, slots, head dim]: gathered by block it is what the products want, with nothing copied
inside of them. Rows that add one token (decode) run together, grouped by length; longer ones (prefill) one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

GROUP_BYTES = 2 << 20
"""Keys of one group of decode rows that are gathered at a time: they stay in the cache until they are read."""
PADDING = 0.25
"""Share of a group's gathered blocks that may be padding."""


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

    def gather(self, layer: int, blocks: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values [kv heads, rows, tokens, head dim] of the blocks [rows × blocks of each]."""
        return self._gather(self.keys[layer], blocks, rows), self._gather(self.values[layer], blocks, rows)

    def _gather(self, pool: Tensor, blocks: Tensor, rows: int) -> Tensor:
        heads, _, width = pool.shape
        by_block = pool.view(heads, self.num_blocks, self.block_size * width)
        return by_block.index_select(1, blocks).view(heads, rows, -1, width)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Blocks (from, to), all read before any is written."""
        if not pairs:
            return
        source, target = (torch.tensor(side, device=self.keys[0].device) for side in zip(*pairs, strict=True))
        for pool in (*self.keys, *self.values):
            by_block = pool.view(pool.shape[0], self.num_blocks, -1)
            by_block.index_copy_(1, target, by_block.index_select(1, source))

    def clean(self, blocks: Iterable[int]) -> None:
        """Values that are no numbers become zero: whoever reuses the blocks must not meet them."""
        places = torch.tensor(sorted(set(blocks)), device=self.keys[0].device)
        for pool in (*self.keys, *self.values):
            by_block = pool.view(pool.shape[0], self.num_blocks, -1)
            by_block.index_copy_(1, places, by_block.index_select(1, places).nan_to_num_(0.0, 0.0, 0.0))


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows that attend together: some decode rows, or one row's new tokens.

    Attributes:
        first, last: their tokens are those from `first` up to before `last`.
        blocks: cached blocks of each row, one after the other; None where the new tokens have nothing before them.
        mask: added to the scores, [rows, queries, keys]; None where all keys are seen, or where the keys are
            the new tokens themselves, in order.
        rows: sequences.
        tile: (place of the first query, queries in all) of a tile whose other queries nobody asked for; the products
            then have one form for each position of a sequence, whatever is computed beside it.
    """

    first: int
    last: int
    blocks: Tensor | None
    mask: Tensor | None
    rows: int
    tile: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer makes scores.

    Attributes:
        scale: of query times key.
        softcap: c of c tanh(score / c); None without.
    """

    scale: float
    softcap: float | None = None


def attend(
    cache: KVCache, layer: int, pieces: Sequence[Piece], queries: Tensor, keys: Tensor, values: Tensor, scores: Scores
) -> Tensor:
    """Attention of all tokens [tokens, heads, head dim], whose keys and values are in the cache already.

    Args:
        keys, values: of the new tokens [tokens, kv heads, head dim].
    """
    output = torch.empty_like(queries)
    _, heads, width = queries.shape
    kv_heads = keys.shape[1]
    for piece in pieces:
        here = slice(piece.first, piece.last)
        count = (piece.last - piece.first) // piece.rows
        # [kv heads, rows, heads of a group × queries, head dim]: heads that share keys are more queries of them
        q = queries[here].view(piece.rows, count, kv_heads, heads // kv_heads, width).permute(2, 0, 3, 1, 4)
        if piece.blocks is None:
            k, v = (new[here].transpose(0, 1)[:, None] for new in (keys, values))
        else:
            k, v = cache.gather(layer, piece.blocks, piece.rows)
        if piece.tile is not None:
            place, size = piece.tile
            padded = pad(q, (0, 0, place, size - count - place))
            found = _plain(padded, k, v, piece.mask, False, scores)[..., place : place + count, :]
        else:
            found = _attention(q, k, v, piece.mask, piece.blocks is None, scores)
        output[here] = found.permute(1, 3, 0, 2, 4).reshape(-1, heads, width)
    return output


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scores: Scores) -> Tensor:
    """
    Args:
        q: [kv heads, rows, group, queries, head dim].
        k, v: [kv heads, rows, keys, head dim].
        mask: [rows, queries, keys].
    """
    heads, rows, group, count, width = q.shape
    if scores.softcap is not None or (count == 1 and q.dtype in (torch.bfloat16, torch.float16)):
        return _plain(q, k, v, mask, causal, scores)
    if count == 1:
        seen = None if mask is None else mask[None]
        return scaled_dot_product_attention(q.squeeze(3), k, v, attn_mask=seen, scale=scores.scale).unsqueeze(3)
    flat = q.reshape(heads * rows, group, count, width)
    k, v = (x.reshape(heads * rows, 1, -1, width).expand(-1, group, -1, -1) for x in (k, v))
    found = scaled_dot_product_attention(
        flat, k, v, attn_mask=None if mask is None else mask[0], is_causal=causal and mask is None, scale=scores.scale
    )
    return found.view(heads, rows, group, count, width)


def _plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scores: Scores) -> Tensor:
    """The definition, in matrix products; the softmax in fp32 where the dtype has 16 bits."""
    heads, rows, group, count, width = q.shape
    products = torch.matmul(q.reshape(heads, rows, group * count, width), k.transpose(-1, -2))
    products = products.view(heads, rows, group, count, -1) * scores.scale
    if scores.softcap is not None:
        products = torch.tanh(products / scores.softcap) * scores.softcap
    if mask is not None:
        products = products + mask.unsqueeze(-3)
    elif causal:
        products = products + causal_mask(count, 0, None, products.dtype, products.device)
    dtype = torch.float32 if q.dtype.itemsize == 2 else q.dtype
    weights = torch.softmax(products, dim=-1, dtype=dtype).to(q.dtype)
    return torch.matmul(weights.view(heads, rows, group * count, -1), v).view(heads, rows, group, count, width)


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
