"""A batch whose rows all differ, made from an example: rows that are alike would hide that they are mixed."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from microbatch.batch.example import Args, Dimension, Kwargs, find_batch_size, map_tensors, with_batch_size
from microbatch.batch.packed import packed_size
from microbatch.batch.padding import is_open_mask, packed_sequences
from microbatch.models.loaded import Loaded

FEWEST, MOST = 4, 64
"""Rows that are enough for any cut, and rows beyond which nothing more is seen."""


def example_batch(loaded: Loaded, batch_size: int | None = None, *, dimension: Dimension = None) -> tuple[Args, Kwargs]:
    """An example of a model with different rows, and for a transformers model rows of different length.

    Args:
        batch_size: rows; by default as many as the example has, at least `FEWEST` and at most `MOST`.
        dimension: where the batch is.

    Raises:
        InvalidModel: an example without one clear batch.
    """
    if packed_size(loaded.kwargs) is not None or packed_sequences(loaded.kwargs):
        return loaded.args, loaded.kwargs  # its rows lie end to end: it is a batch already
    own = find_batch_size(loaded.args, loaded.kwargs, dimension=dimension)
    size = batch_size or min(max(own, FEWEST), MOST)
    if loaded.example_at is not None:
        args, kwargs = loaded.example_at(size, loaded.default_sequence)
    else:
        args, kwargs = with_batch_size(loaded.args, loaded.kwargs, size, dimension=dimension)
    generator = torch.Generator().manual_seed(0)
    args, kwargs = map_tensors(args, kwargs, lambda _, t: _varied(t, min(own, size), generator))
    return args, _masked(loaded, kwargs)


def _varied(tensor: Tensor, own: int, generator: torch.Generator) -> Tensor:
    """The first `own` rows as they are; numbers of the others get noise, whole numbers another order within the row."""
    if tensor.dim() == 0 or _is_mask(tensor) or not (tensor.is_floating_point() or tensor.dim() > 1):
        return tensor
    result = tensor.detach().clone()
    if tensor.is_floating_point():
        spread = float(tensor.float().std()) if tensor.numel() > 1 else 1.0
        noise = torch.randn(result.shape, generator=generator) * spread
        result[own:] += noise[own:].to(result)
        return result
    for row in result[own:]:
        flat = row.reshape(-1)
        row.copy_(flat[torch.randperm(len(flat), generator=generator)].reshape(row.shape))
    return result


def _is_mask(tensor: Tensor) -> bool:
    return bool(((tensor == 0) | (tensor == 1) | (tensor == -torch.inf)).all())


def _masked(loaded: Loaded, kwargs: Kwargs) -> Kwargs:
    """With a mask that ends every other row early: one that is there but hides nothing, else one that the model takes.

    A mask that hides nothing would let padding that leaks go unseen.
    """
    ids = kwargs.get("input_ids")
    takes = "attention_mask" in inspect.signature(loaded.model.forward).parameters
    alone = sum(isinstance(value, Tensor) for value in kwargs.values()) == 1
    if takes and alone and isinstance(ids, Tensor) and ids.dim() == 2:
        return kwargs | {"attention_mask": _ended(torch.ones_like(ids))}
    open_masks = {n: _ended(v) for n, v in kwargs.items() if isinstance(v, Tensor) and is_open_mask(n, v)}
    return kwargs | open_masks


def _ended(mask: Tensor) -> Tensor:
    """Every other row hides its last token or its last third."""
    result, tokens = mask.clone(), mask.shape[1]
    for row in range(1, len(mask), 2):
        hidden = 1 if row % 4 == 1 else max(1, tokens // 3)
        if tokens > hidden:
            result[row, -hidden:] = 1 - result[row, -hidden:].long()
    return result
