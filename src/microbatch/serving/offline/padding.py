"""What padding does to outputs, seen on an item with it and without: which dimensions follow it, and do values too?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from microbatch.batch.exactness import FLOOR, TOLERANCE
from microbatch.serving.offline.joining import Axes, columns_at, tensors_of
from microbatch.serving.offline.placing import Runner
from microbatch.serving.offline.sources import Made

_NAMES = {torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True)
class Padding:
    """What is known about padding.

    Attributes:
        axes: dimensions of the outputs with an entry per token.
        matters: whether an item's outputs are others where it is padded.
    """

    axes: Axes
    matters: bool


def compare(runner: Runner, padded: Made, alone: Made) -> Padding:
    """One item with padding and without, run both ways."""
    wide, narrow = (tensors_of(runner.run(made.batch, eager=True)) for made in (padded, alone))
    axes = {path: _axes(leaf, narrow[path], padded, alone) for path, leaf in wide.items() if path in narrow}
    matters = any(
        not _same(leaf, narrow[path], axes[path], padded, alone) for path, leaf in wide.items() if path in axes
    )
    return Padding(axes, matters)


def _axes(wide: Tensor, narrow: Tensor, padded: Made, alone: Made) -> tuple[int, ...]:
    widths = (padded.width, alone.width)
    return tuple(axis for axis, sizes in enumerate(zip(wide.shape, narrow.shape)) if axis and sizes == widths)


def _same(wide: Tensor, narrow: Tensor, axes: tuple[int, ...], padded: Made, alone: Made) -> bool:
    """Whether the item's own entries are the same but for rounding."""
    one, other = (_own(leaf, made, axes) for leaf, made in ((wide, padded), (narrow, alone)))
    if one.shape != other.shape:
        return False
    if not one.is_floating_point() or not one.numel():
        return bool((one == other).all())
    tolerance = TOLERANCE[_NAMES.get(one.dtype, "fp32")]
    scale = max(float(one.abs().max()), float(other.abs().max()), FLOOR)
    return float((one - other).abs().max()) <= tolerance * scale


def _own(leaf: Tensor, made: Made, axes: tuple[int, ...]) -> Any:
    assert made.spans is not None
    return leaf[0][columns_at(made.spans[0], axes, leaf.ndim)]
