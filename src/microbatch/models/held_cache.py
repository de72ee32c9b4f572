"""A KV cache that stays as it is: every decode step sees the same context, however often it is timed.

`transformers` appends to its `DynamicCache` by copying the whole of it, and the next call would see a longer one.
Engines that serve (and its `StaticCache`) write the new token's keys and values into memory that waits for them. So do
these layers: they hold room for the context and one more token, and each step writes into that last place. Nothing
grows, and a step moves the cache once, by reading it. The state of linear attention has a fixed size anyway.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from microbatch.errors import InvalidModel

NO_DECODE = "Use --mode prefill or inference."

GROWING = ("keys", "values", "indexer_keys")
STATES = ("conv_states", "recurrent_states")
"""What layers keep, by attribute: one row for each token, or states by number."""

LayerTensors = tuple[Tensor, ...]
"""What one layer keeps, each (batch, ...): keys, values, then states of linear attention, as far as it has them."""


class _Held:
    """`context` tokens and the one that each step adds: keys and values of (batch, heads, held + 1, width).

    `held` is `context`, or one less than the window where the layer sees only a window.
    """

    keys: Tensor
    values: Tensor
    indexer_keys: Tensor
    context: int

    def _write(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Writes the new token into the last place; returns all keys and all values."""
        self.keys[..., -1:, :] = key_states
        self.values[..., -1:, :] = value_states
        return self.keys, self.values

    update = _write  # what else models tell their cache concerns layers that grow

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """The same for the keys of a sparse attention's indexer: (batch, context + 1, width)."""
        self.indexer_keys[:, -1:] = indexer_key_states
        return self.indexer_keys

    def get_seq_length(self) -> int:
        """Tokens before the new one, those that left the window included."""
        return self.context

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys there are, and the position of the first."""
        keys = self.keys.shape[-2]
        return keys, self.context + query_length - keys


HELD: dict[type, type] = {
    **{
        kind: type(f"Held{kind.__name__}", (_Held, kind), {})
        for kind in (
            DynamicLayer,
            DynamicSlidingWindowLayer,
            DynamicIndexedLayer,
            LinearAttentionAndFullAttentionLayer,
            LinearAttentionAndSlidingWindowAttentionLayer,
        )
    },
    LinearAttentionLayer: LinearAttentionLayer,
    DummyLayer: DummyLayer,
}
"""What stands for each kind of layer of a `DynamicCache`; states and empty layers do not grow as they are."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of a layer.

    Attributes:
        kind: one of `GROWING` or `STATES`.
        index: which of several states.
        shape: without the batch; the tokens of what grows are those of the cache it was learnt from.
        dtype: its own.
    """

    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What one layer keeps, learnt from a real cache; `prototype` is that cache's layer without its tensors."""

    prototype: Any
    slots: tuple[Slot, ...]
    window: int | None

    def shapes(self, batch: int, context: int) -> Iterator[tuple[int, ...]]:
        """Of each slot at that batch and context."""
        held = context if self.window is None else min(context, self.window - 1)
        for slot in self.slots:
            *before, _, width = slot.shape
            yield (batch, *before, held + 1, width) if slot.kind in GROWING else (batch, *slot.shape)


def plan_layers(cache: object) -> tuple[LayerPlan, ...]:
    """What each layer of a model's own cache keeps.

    Args:
        cache: as the model returned it for a batch of 1.

    Raises:
        InvalidModel: a kind of cache or layer that grows in a way of its own.
    """
    if type(cache) is not DynamicCache:
        raise InvalidModel(
            f"This model keeps its context in a {type(cache).__name__}, which decode mode does not know.",
            NO_DECODE,
        )
    return tuple(_plan(layer) for layer in cache.layers)


def _plan(layer: Any) -> LayerPlan:
    kind = HELD.get(type(layer))
    if kind is None:
        raise InvalidModel(
            f"This model has a cache layer of the kind {type(layer).__name__}, which decode mode does not know.",
            NO_DECODE,
        )
    slots = tuple(_slots(layer))
    prototype: Any = object.__new__(kind)
    vars(prototype).update(vars(layer))
    for slot in slots:
        if slot.kind in STATES:
            setattr(prototype, slot.kind, dict.fromkeys(getattr(prototype, slot.kind)))
        else:
            setattr(prototype, slot.kind, None)
    return LayerPlan(prototype, slots, getattr(layer, "sliding_window", None))


def _slots(layer: Any) -> Iterator[Slot]:
    for kind in GROWING:
        tensor = getattr(layer, kind, None)
        if tensor is not None:
            yield Slot(kind, 0, tuple(tensor.shape[1:]), tensor.dtype)
    for kind in STATES:
        for index, tensor in getattr(layer, kind, {}).items():
            if tensor is not None:
                yield Slot(kind, index, tuple(tensor.shape[1:]), tensor.dtype)


def make_cache(plans: Sequence[LayerPlan], tensors: Sequence[LayerTensors], context: int) -> Cache:
    """A cache over `tensors`, as the model's forward takes it; cheap, so that each step can have its own.

    Args:
        tensors: for each layer those of `LayerPlan.shapes`, in that order.
        context: tokens before the new one.
    """
    return Cache(layers=[_layer(plan, own, context) for plan, own in zip(plans, tensors, strict=True)])


def _layer(plan: LayerPlan, tensors: LayerTensors, context: int) -> Any:
    layer = copy.copy(plan.prototype)
    layer.context = layer.cumulative_length = context
    for kind in STATES:
        if hasattr(layer, kind):
            setattr(layer, kind, dict(getattr(layer, kind)))
    for slot, tensor in zip(plan.slots, tensors, strict=True):
        if slot.kind in GROWING:
            setattr(layer, slot.kind, tensor)
        else:
            getattr(layer, slot.kind)[slot.index] = tensor
    return layer
