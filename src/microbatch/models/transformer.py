"""A transformer in plain modules: an encoder over sequences, and one decode step with or without a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from microbatch.errors import InvalidSettings
from microbatch.models.loaded import EXAMPLE_BATCH, MODES, Example, Loaded

Cache = tuple[Tensor, Tensor]
"""Keys and values of one layer: (batch, kv_heads, context, head width) each."""


def transformer(*, depth: int = 2, width: int = 128, heads: int = 4, sequence: int = 32, seed: int = 0) -> Loaded:
    """An encoder; items are sequences of `sequence` embedded tokens: (batch, sequence, width)."""
    _check_heads(width, heads, heads)
    model = nn.Sequential(*(Block(width, heads, heads) for _ in range(depth)), nn.LayerNorm(width))

    def example_at(batch: int, tokens: int | None) -> Example:
        shape = (batch, sequence if tokens is None else tokens, width)
        return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)),), {}

    args, _ = example_at(EXAMPLE_BATCH, None)
    return Loaded(
        name="transformer",
        model=model,
        args=args,
        unit="sequences",
        example_at=example_at,
        default_sequence=sequence,
    )


def decoder(
    *,
    depth: int = 8,
    width: int = 256,
    heads: int = 8,
    kv_heads: int = 2,
    vocabulary: int = 2048,
    context: int = 256,
    cache: bool = True,
    seed: int = 0,
) -> Loaded:
    """The next token of a decoder-only language model, for sequences that hold `context` tokens already.

    With `cache`, the keys and values of those tokens are inputs, and one new token per sequence is computed. Without,
    all ``context + 1`` tokens are computed again. Both give the same logits.
    """
    _check_heads(width, heads, kv_heads)
    settings = {name: value for name, value in locals().items() if name != "settings"}
    model = Decoder(depth, width, heads, kv_heads, vocabulary, positions=context + 1)
    example_at = partial(_decoder_inputs, settings)
    args, _ = example_at(EXAMPLE_BATCH, None)
    return Loaded(
        name="decoder",
        model=model,
        args=args,
        unit="sequences",
        example_at=example_at,
        default_sequence=context,
        modes=MODES,
        build_mode=partial(_decoder_in_mode, settings),
    )


def _decoder_inputs(settings: dict[str, Any], batch: int, context: int | None) -> Example:
    """The last token and the cache of those before it, or all tokens; at most as many as the model was built for."""
    most = settings["context"]
    held = most if context is None else context
    if held > most:
        raise InvalidSettings(f"This decoder holds {most} tokens, not {held}.", f"Write decoder:context={held}.")
    generator = torch.Generator().manual_seed(settings["seed"])
    tokens = torch.randint(settings["vocabulary"], (batch, held + 1), generator=generator)
    if not settings["cache"]:
        return (tokens,), {}
    shape = (batch, settings["kv_heads"], held, settings["width"] // settings["heads"])
    pairs = range(settings["depth"])
    layers = [(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)) for _ in pairs]
    return (tokens[:, -1:].contiguous(), layers), {}


def _decoder_in_mode(settings: dict[str, Any], mode: str, sequence: int | None) -> Loaded:
    """Prefill computes `sequence` tokens; decode one more than `sequence`, as does whatever the settings say."""
    length = settings["context"] if sequence is None else sequence
    if mode != "prefill":
        return decoder(**{**settings, "context": length, "cache": settings["cache"] or mode == "decode"})
    shorter = decoder(**{**settings, "context": length - 1, "cache": False})

    def example_at(batch: int, tokens: int | None) -> Example:
        assert shorter.example_at is not None
        return shorter.example_at(batch, None if tokens is None else tokens - 1)

    return replace(shorter, example_at=example_at, default_sequence=length)


class Attention(nn.Module):
    """Attention whose `heads` query heads share `kv_heads` key and value heads (Ainslie et al., arXiv 2305.13245)."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, kv_heads * self.head_width)
        self.value = nn.Linear(width, kv_heads * self.head_width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor, *, causal: bool) -> Tensor:
        """(batch, sequence, width) to the same; `causal` hides later tokens."""
        mixed = functional.scaled_dot_product_attention(
            self._split(self.query(x)),
            self._split(self.key(x)),
            self._split(self.value(x)),
            is_causal=causal,
            enable_gqa=self.heads != self.kv_heads,
        )
        joined: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return joined

    def step(self, x: Tensor, cache: Cache) -> Tensor:
        """One new token, (batch, 1, width), over the cache and itself.

        The cache is read once and not copied: its scores and the new token's are joined, not the keys.
        The query heads of one key head become the rows of one product.
        """
        keys, values = cache
        query = self.query(x).view(len(x), self.kv_heads, -1, self.head_width) * self.head_width**-0.5
        key = self.key(x).view(len(x), self.kv_heads, 1, self.head_width)
        value = self.value(x).view(len(x), self.kv_heads, 1, self.head_width)
        scores = torch.cat([query @ keys.transpose(-1, -2), query @ key.transpose(-1, -2)], dim=-1).softmax(-1)
        mixed = scores[..., :-1] @ values + scores[..., -1:] * value
        joined: Tensor = self.output(mixed.reshape(len(x), 1, -1))
        return joined

    def _split(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.head_width))
        return heads.transpose(1, 2)


class Block(nn.Module):
    """Attention and a feed-forward layer of four times the width, each after a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, kv_heads)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        return self._feed_forward(x + self.attention(self.attention_norm(x), causal=causal))

    def step(self, x: Tensor, cache: Cache) -> Tensor:
        return self._feed_forward(x + self.attention.step(self.attention_norm(x), cache))

    def _feed_forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.down(functional.gelu(self.up(self.feed_forward_norm(x))))
        return added


class Decoder(nn.Module):
    """A decoder-only language model with learned positions; it answers with the logits of the next token."""

    def __init__(self, depth: int, width: int, heads: int, kv_heads: int, vocabulary: int, *, positions: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, cache: Sequence[Cache] | None = None) -> Tensor:
        """tokens: (batch, sequence) without cache, (batch, 1) with; returns (batch, vocabulary)."""
        past = 0 if cache is None else cache[0][0].shape[2]
        x = self.token(tokens) + self.position.weight[past : past + tokens.shape[1]]
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            x = block(x, causal=True) if cache is None else block.step(x, cache[layer])
        answer: Tensor = self.logits(self.norm(x[:, -1]))
        return answer


def _check_heads(width: int, heads: int, kv_heads: int) -> None:
    if width % heads:
        raise InvalidSettings(f"A width of {width} cannot be cut into {heads} heads.", "Use heads that divide it.")
    if heads % kv_heads:
        raise InvalidSettings(
            f"{heads} query heads cannot share {kv_heads} key and value heads.", "Use kv_heads that divide heads."
        )
