"""A model ready to be measured, with an example of its input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """What every MODEL form becomes.

    Attributes:
        name: the MODEL as the user wrote it.
        model: in eval mode when it is built in, else as its maker left it.
        args: positional example input, of some batch size of 2 or more so that the batch dimension can be told apart.
        kwargs: keyword example input.
        unit: what one item of the batch is called: rows, images, sequences, tokens.
        loss: ``loss(output, batch) -> (sum, weight)`` for training; None to sum the outputs.
    """

    name: str
    model: nn.Module
    args: tuple[object, ...] = ()
    kwargs: dict[str, object] = field(default_factory=dict)
    unit: str = "rows"
    loss: Callable[..., object] | None = None
