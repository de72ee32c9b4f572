"""Batch normalisation in pieces: what may be chosen, and what is said where nothing was.

Normalised by the statistics of its piece, a model gives other gradients and other running statistics than one pass
over the whole batch, by as much as the pieces differ. ``batch_norm=`` says what is wanted:

- ``"exact"``: the statistics of the whole batch over all ranks, see `microbatch.training.joint.exact_batch_norm`;
- ``"frozen"``: the running statistics, which stay as they are, as if the layers were in evaluation mode;
- ``"micro_batch"``: those of each piece;
- None: as ``"micro_batch"``, with a warning that says by how much the pieces differed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from microbatch.errors import InvalidSettings

logger = logging.getLogger(__name__)

CHOICES = (None, "micro_batch", "frozen", "exact")


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and variance of each channel.

    Attributes:
        count: values per channel.
        mean, variance: of each channel; the variance divides by the count.
    """

    count: int
    mean: Tensor
    variance: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Moments:
        """Over all dimensions but the channels, dimension 1; at least in fp32."""
        wide = values.detach().to(torch.promote_types(values.dtype, torch.float32))
        variance, mean = torch.var_mean(wide, [0, *range(2, wide.dim())], correction=0)
        return cls(wide.numel() // wide.shape[1], mean, variance)

    @classmethod
    def together(cls, parts: list[Moments]) -> Moments:
        """Of all parts as one (Chan, Golub and LeVeque 1983)."""
        parts = [part for part in parts if part.count]
        count = sum(part.count for part in parts)
        mean = torch.stack([part.mean * (part.count / count) for part in parts]).sum(0)
        spread = [(part.variance + (part.mean - mean).square()) * (part.count / count) for part in parts]
        return cls(count, mean, torch.stack(spread).sum(0))


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """The layers that normalise by the statistics of what they are given, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
    }


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Batch norms use their running statistics, and leave them as they are.

    Raises:
        InvalidSettings: one keeps none.
    """
    layers = batch_norms(model)
    without = [name for name, layer in layers.items() if layer.running_mean is None]
    if without:
        raise InvalidSettings(
            f"{without[0]} keeps no running statistics that could be frozen.",
            'Use batch_norm="exact", or make it with track_running_stats=True.',
        )
    try:
        for layer in layers.values():
            layer.training = False
        yield
    finally:
        for layer in layers.values():
            layer.training = True


@dataclass
class Spread:
    """How far apart the statistics of the pieces are, layer by layer."""

    _seen: dict[str, list[Moments]] = field(default_factory=dict)

    @contextmanager
    def watching(self, layers: dict[str, _BatchNorm]) -> Iterator[None]:
        """Note what each layer is given."""
        handles = [layer.register_forward_pre_hook(partial(self._note, name)) for name, layer in layers.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, name: str, _layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._seen.setdefault(name, []).append(Moments.of(inputs[0]))

    def largest(self) -> tuple[str, float] | None:
        """The layer whose pieces' means lie furthest from the whole's, and how many standard deviations."""
        apart = {name: _apart(parts) for name, parts in self._seen.items() if len(parts) > 1}
        return max(apart.items(), key=lambda item: item[1]) if apart else None


def _apart(parts: list[Moments]) -> float:
    whole = Moments.together(parts)
    deviation = whole.variance.sqrt().clamp(min=torch.finfo(whole.variance.dtype).tiny)
    return max(float(((part.mean - whole.mean).abs() / deviation).max()) for part in parts)


def warn(layers: dict[str, _BatchNorm], number: int, items: int, spread: Spread) -> None:
    """Say that the pieces are normalised apart, by how much, and what can be chosen."""
    furthest = spread.largest()
    how_far = "" if furthest is None else (
        f" Here the mean of a piece was up to {furthest[1]:.2g} standard deviations from that of the batch "
        f"(in {furthest[0] or 'the model'})."
    )  # fmt: skip
    logger.warning(
        "%d batch norm layer%s (%s%s) normalise%s each of %d pieces by its own statistics: gradients and running "
        "statistics are not those of one pass over %d items.%s "
        'Choose batch_norm="exact" (costs about half a forward pass more per piece), "frozen" (running statistics), or '
        '"micro_batch" (as it is, without this warning).',
        len(layers), "" if len(layers) == 1 else "s", next(iter(layers)) or "the model",
        "" if len(layers) == 1 else ", ...", "s" if len(layers) == 1 else "", number, items, how_far,
    )  # fmt: skip
