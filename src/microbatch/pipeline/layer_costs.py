"""Layers with their costs out of a profile of the whole model, measured or predicted, to be cut into stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from microbatch.curves.profile import Layer, Profile
from microbatch.errors import InvalidProfile
from microbatch.pipeline.partition import LayerCost

ADAM = 4.0
"""Bytes of weights, gradients and Adam's two moments over those of the weights, all of one dtype."""


def layer_costs(
    profile: Profile, micro_batch_size: int, *, state: float = ADAM, tied: Sequence[str] = ()
) -> list[LayerCost]:
    """What can be cut apart: numbered blocks (``layers.0``) as wholes, everything else as it stands.

    Args:
        profile: with a table of layers, as `profile` and `predict` make; mode training for steps.
        micro_batch_size: items of a micro-batch; layers are read off between the sizes that the table has.
        state: bytes of weights, gradients and optimizer over those of the weights.
        tied: names of layers that share one weight, as of embedding and head.

    Activations are what the layer reads and writes, more than its forward keeps: a limit is kept with room to spare.

    Raises:
        InvalidProfile: no table of layers, or a name in ``tied`` that is not in it.
    """
    if not profile.layers:
        raise InvalidProfile(
            f"The profile of {profile.model or 'this model'} has no table of layers.", "Measure or predict it anew."
        )
    blocks: dict[str, list[Layer]] = {}
    for layer in profile.layers:
        if layer.kind == "optimizer":  # once a step, not once a micro-batch
            continue
        blocks.setdefault(block_of(layer.name), []).append(layer)
    unknown = [name for name in tied if name not in blocks]
    if unknown:
        raise InvalidProfile(f"No layer is called {unknown[0]!r}.", f"Layers are {', '.join(list(blocks)[:12])}.")
    found = []
    for name, rows in blocks.items():
        shares = "+".join(tied) if name in tied else ""
        found += _repeated(name, rows, profile.layer_batch_sizes, micro_batch_size, state, shares)
    return found


def block_of(name: str) -> str:
    """``model.layers.3.attn.q`` → ``model.layers.3``; a name without a number stays whole."""
    parts = name.split(".")
    numbered = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbered[0] + 1]) if numbered else name


def _repeated(
    name: str, rows: list[Layer], sizes: Sequence[int], batch_size: int, state: float, shares: str
) -> list[LayerCost]:
    """The block, as often as it stands in the model: a prediction's table names the first of alike ones only."""
    repeat = max(row.repeat for row in rows)
    seconds = sum(float(np.interp(batch_size, sizes, row.seconds)) for row in rows if row.seconds)
    weights = state * sum(row.parameter_bytes for row in rows) / repeat
    kept = batch_size * sum(row.activation_bytes_per_item for row in rows) / repeat
    return [
        LayerCost(
            name=_numbered(name, index), seconds=seconds / repeat, weight_bytes=weights, activation_bytes=kept,
            shares=shares, shared_bytes=weights if shares else 0.0,
        )
        for index in range(repeat)
    ]  # fmt: skip


def _numbered(name: str, index: int) -> str:
    """The name of the block so many places further on."""
    head, _, number = name.rpartition(".")
    if number.isdigit():
        return f"{head}.{int(number) + index}" if head else str(int(number) + index)
    return name if index == 0 else f"{name}#{index + 1}"
