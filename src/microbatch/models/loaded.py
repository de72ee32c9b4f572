"""A model ready to be measured, with an example of its input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

Example = tuple[tuple[object, ...], dict[str, object]]
"""Positional and keyword inputs."""

MODES = ("inference", "training", "prefill", "decode")
"""What a model can be asked to do; language models offer all four, see `microbatch.models.modes.in_mode`."""

Weights = Literal["load", "random", "meta"]
"""Where weights come from: the files where there are any, a random start, or nowhere (shapes without memory)."""

EXAMPLE_BATCH = 2
"""Items in an example: two, so that the batch dimension can be told apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """What every MODEL form becomes.

    Attributes:
        name: the MODEL as the user wrote it.
        model: in eval mode when microbatch built it, else as its maker left it.
        args: positional example input, of some batch size of 2 or more so that the batch dimension can be told apart.
        kwargs: keyword example input.
        unit: what one item of the batch is called: rows, images, sequences, tokens.
        loss: ``loss(output, batch) -> (sum, weight)`` for training; None to sum the outputs.
        example_at: ``example_at(batch, sequence) -> (args, kwargs)``, on the model's device; sequence None means
            `default_sequence`. None: the example says how to make another batch, and there is no sequence to choose.
        default_sequence: tokens of each item in the example; in decode mode, tokens that the cache already holds.
            None: the model has no sequence.
        modes: which of `MODES` the model offers.
        build_mode: what another mode runs, for `in_mode`; None: the same model with the same example in every mode.
        notes: what a reader of the results must know, one sentence each: weights that are random, settings left out.
    """

    name: str
    model: nn.Module
    args: tuple[object, ...] = ()
    kwargs: dict[str, object] = field(default_factory=dict)
    unit: str = "rows"
    loss: Callable[..., object] | None = None
    example_at: Callable[[int, int | None], Example] | None = None
    default_sequence: int | None = None
    modes: tuple[str, ...] = ("inference", "training")
    build_mode: Callable[[str, int | None], Loaded] | None = None
    notes: tuple[str, ...] = ()
