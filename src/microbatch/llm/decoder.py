"""A decoder-only language model as plain weights and one forward pass over rows of tokens with a paged cache.

Its classes know no transformers: `microbatch.llm.models` reads the weights out of their classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

from microbatch.llm.attention import Asked, KVCache, Piece, Scores
from microbatch.llm.packed import Linear

Activation = Callable[[Tensor], Tensor]
ROPE_TABLE = 1024
"""Positions by which the tables of rotary positions grow."""


class Norm(Protocol):
    """A norm over the last dimension."""

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """x ÷ sqrt(mean(x²) + eps) × weight.

    Attributes:
        weight: [features]; in fp32 where the product comes before rounding to 16 bits (Gemma), else in x's dtype.
    """

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype == torch.float32:
            return rms_norm(x, self.weight.shape, self.weight, self.eps)
        normed = rms_norm(x.float(), self.weight.shape, None, self.eps)  # in fp64 as well: transformers does
        return (normed.to(self.weight.dtype) * self.weight).to(x.dtype)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """(x − mean) ÷ sqrt(variance + eps) × weight + bias."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class MLP(Protocol):
    """What follows attention in a layer: rows [tokens, hidden] to rows of the same form."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def linears(self) -> Sequence[tuple[Linear, int]]:
        """Its linear layers and the features that go into each."""
        ...


@dataclass(frozen=True, slots=True)
class PlainMLP:
    """down(activation(up(x)))."""

    up: Linear
    down: Linear
    activation: Activation
    hidden: int

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))

    def linears(self) -> Sequence[tuple[Linear, int]]:
        return [(self.up, self.hidden), (self.down, self.up.features)]


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(activation(gate(x)) × up(x)), with gate and up in one product."""

    gate_up: Linear
    down: Linear
    activation: Activation
    hidden: int

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate).mul_(up))

    def linears(self) -> Sequence[tuple[Linear, int]]:
        return [(self.gate_up, self.hidden), (self.down, self.gate_up.features // 2)]


@dataclass(frozen=True, slots=True)
class Experts:
    """The weighted sum of the `top_k` experts that a router chooses for each token.

    Attributes:
        normalised: the weights of a token's experts are scaled to the sum 1.
        rounded: they are rounded to the dtype of the tokens before they are used.
    """

    router: Linear
    experts: tuple[GatedMLP, ...]
    top_k: int
    normalised: bool
    rounded: bool

    def __call__(self, x: Tensor) -> Tensor:
        shares = torch.softmax(self.router(x), dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(shares, self.top_k, dim=-1)
        if self.normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        if self.rounded:
            weights = weights.to(x.dtype)
        output = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            tokens, places = torch.where(chosen == number)
            found = self.experts[number](x[tokens]) * weights[tokens, places, None]
            output.index_add_(0, tokens, found.to(x.dtype))
        return output

    def linears(self) -> Sequence[tuple[Linear, int]]:
        router = (self.router, self.experts[0].hidden)
        return [router, *(linear for expert in self.experts for linear in expert.linears())]


class Rope:
    """Rotary positions, in tables that grow with the longest sequence: a position has the same bits in every step."""

    __slots__ = ("_cos", "_frequencies", "_scaling", "_sin")

    def __init__(self, inverse_frequencies: Tensor, scaling: float, dtype: torch.dtype) -> None:
        """
        Args:
            inverse_frequencies: [half of the dimensions that turn]; scaled as the model wants it.
            scaling: of cosine and sine (yarn).
            dtype: of the tables.
        """
        self._frequencies, self._scaling = inverse_frequencies.float(), scaling
        self._cos = self._sin = torch.empty(
            0, 1, inverse_frequencies.numel(), dtype=dtype, device=inverse_frequencies.device
        )

    def turns(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine [tokens, 1, half] of positions that lie before `end`."""
        while end > self._cos.shape[0]:
            self._grow()
        return self._cos[positions], self._sin[positions]

    def _grow(self) -> None:
        first = self._cos.shape[0]
        places = torch.arange(first, first + ROPE_TABLE, device=self._frequencies.device)
        angles = places[:, None, None].float() * self._frequencies
        self._cos, self._sin = (
            torch.cat([known, (new * self._scaling).to(known.dtype)])
            for known, new in ((self._cos, angles.cos()), (self._sin, angles.sin()))
        )


def turn_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turns x [tokens, heads, head dim] in place: its first half and the second make pairs, the rest stays."""
    half = cos.shape[-1]
    left, right = x[..., :half], x[..., half : 2 * half]
    turned = left * cos
    turned.addcmul_(right, sin, value=-1)
    right.mul_(cos).addcmul_(left, sin)
    left.copy_(turned)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. Norms that a family has not are None.

    Attributes:
        qkv: queries, keys and values side by side.
        heads, kv_heads, head_dim: of the attention.
        window: keys that a query sees, its own included; None for all.
        rope: which of the decoder's; None for models without rotary positions.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scores: Scores
    window: int | None
    rope: int | None
    qkv: Linear
    output: Linear
    mlp: MLP
    norm: Norm
    mlp_norm: Norm
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    output_norm: Norm | None = None
    mlp_output_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """All rows of one step, one after the other.

    Attributes:
        ids, positions, slots: [tokens].
        wanted: tokens whose logits are asked for.
        unfilled: blocks that the step begins and does not fill; None where there are none.
        end: all positions lie before it.
        pieces: how they attend, for each window.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    wanted: Tensor
    unfilled: Tensor | None
    end: int
    pieces: Mapping[int | None, Sequence[Piece]]


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """A language model, frozen.

    Attributes:
        name: the class that it was made of.
        vocab_size, context: tokens that there are, and positions that a sequence may have.
        dtype: of the weights' values.
        arithmetic: dtype of weights, cache and results here: fp32 where a CPU has no fast products in `dtype`.
        embedding: [vocab_size, hidden], times `embedding_scale`.
        positions: learnt ones [context, hidden]; None where there are none.
        softcap: of the logits; None without.
    """

    name: str
    vocab_size: int
    context: int
    dtype: torch.dtype
    arithmetic: torch.dtype
    device: torch.device
    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear
    ropes: tuple[Rope, ...] = ()
    positions: Tensor | None = None
    embedding_scale: float = 1.0
    softcap: float | None = None

    @property
    def num_layers(self) -> int:
        """How many layers."""
        return len(self.layers)

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values in a layer."""
        return self.layers[0].kv_heads

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.layers[0].head_dim

    @property
    def window(self) -> tuple[int | None, ...]:
        """Keys that a query sees, for each layer."""
        return tuple(layer.window for layer in self.layers)

    @property
    def kv_bytes_per_token(self) -> int:
        """Of keys and values in all layers."""
        return sum(2 * layer.kv_heads * layer.head_dim for layer in self.layers) * self.arithmetic.itemsize

    def linears(self) -> list[tuple[Linear, int]]:
        """Every linear layer, and the features that go into it."""
        hidden = self.embedding.shape[1]
        found = [(self.head, hidden)]
        for layer in self.layers:
            found += [(layer.qkv, hidden), (layer.output, layer.heads * layer.head_dim), *layer.mlp.linears()]
        return found

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """[tokens, hidden] of the ids [tokens] at their positions."""
        x = self.embedding[ids].to(self.arithmetic)
        if self.embedding_scale != 1.0:
            x.mul_(self.embedding_scale)
        if self.positions is not None:
            x += self.positions[positions].to(self.arithmetic)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab_size] in fp32 (fp64 for such a model) of what `hidden_states` returns."""
        if not len(hidden):
            return hidden.new_empty(0, self.vocab_size, dtype=torch.float32)
        found = self.head(self.norm(hidden))
        found = found.float() if found.dtype.itemsize == 2 else found
        return found if self.softcap is None else torch.tanh(found / self.softcap) * self.softcap

    def hidden_states(self, step: Step, cache: KVCache) -> Tensor:
        """[wanted tokens, hidden] after the last layer. Keys and values of all tokens are in the cache after it."""
        x = self.embed(step.ids, step.positions)
        if step.unfilled is not None:
            cache.clear(step.unfilled)
        turns = [rope.turns(step.positions, step.end) for rope in self.ropes]
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            attended = self._attend(layer, index, layer.norm(x), turns, step, cache)
            if index == last:  # nothing reads the other tokens after their keys and values are written
                x, attended = x[step.wanted], attended[step.wanted]
                if not len(x):
                    return x
            x = _added(x, layer.output(attended), layer.output_norm)
            x = _added(x, layer.mlp(layer.mlp_norm(x)), layer.mlp_output_norm)
        return x

    def _attend(
        self, layer: Layer, index: int, x: Tensor, turns: Sequence[tuple[Tensor, Tensor]], step: Step, cache: KVCache
    ) -> Tensor:
        heads, kv_heads = layer.heads, layer.kv_heads
        qkv = layer.qkv(x).view(x.shape[0], heads + 2 * kv_heads, layer.head_dim)
        queries, keys, values = qkv.split((heads, kv_heads, kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            queries.copy_(layer.q_norm(queries))
            keys.copy_(layer.k_norm(keys))
        if layer.rope is not None:
            turn_(qkv[:, : heads + kv_heads], *turns[layer.rope])
        cache.write(index, step.slots, keys, values)
        asked = Asked(queries, keys, values, index, layer.scores)
        output = x.new_empty(x.shape[0], heads, layer.head_dim)
        for piece in step.pieces[layer.window]:
            piece.attend(asked, cache, output)
        return output.view(x.shape[0], heads * layer.head_dim)


def _added(x: Tensor, update: Tensor, norm: Norm | None) -> Tensor:
    return update.add_(x) if norm is None else x + norm(update)
