"""One model in the mode that is asked for, whatever MODEL form it came from."""

from __future__ import annotations

import dataclasses

from microbatch.errors import InvalidSettings
from microbatch.models.loaded import EXAMPLE_BATCH, MODES, Loaded


def in_mode(loaded: Loaded, mode: str, sequence: int | None = None) -> Loaded:
    """What runs in that mode: the model (for decode, a step around it), and examples of its inputs.

    The result serves `profile` and `capture_work` alike; both run prefill and decode as they run inference.

    Args:
        mode: ``"inference"``: one forward; ``"training"``: the same forward, for a training step; ``"prefill"``:
            prompts of `sequence` tokens, answered with the logits of the last one and a cache; ``"decode"``: one new
            token for each sequence that has `sequence` tokens in its cache, the same cache at every call.
        sequence: tokens; by default the model's own `default_sequence`.

    Raises:
        InvalidSettings: an unknown mode, one that the model does not offer, a sequence for a model without one, or
            one that the model cannot hold.
    """
    if mode not in MODES:
        raise InvalidSettings(f"There is no mode {mode!r}.", f"Use one of {', '.join(MODES)}.")
    if mode not in loaded.modes:
        raise InvalidSettings(f"{loaded.name} has no mode {mode!r}.", f"It offers {', '.join(loaded.modes)}.")
    if sequence is not None and sequence < 1:
        raise InvalidSettings(f"A sequence of {sequence} tokens holds nothing.", "Give 1 token or more.")
    if loaded.build_mode is not None:
        built = loaded.build_mode(mode, sequence)
    else:
        built = loaded if sequence is None else _with_sequence(loaded, sequence)
    return built if mode == "training" else dataclasses.replace(built, loss=None)


def _with_sequence(loaded: Loaded, sequence: int) -> Loaded:
    if loaded.example_at is None or loaded.default_sequence is None:
        raise InvalidSettings(f"{loaded.name} has no sequence whose length could be chosen.", "Leave it out.")
    args, kwargs = loaded.example_at(EXAMPLE_BATCH, sequence)
    return dataclasses.replace(loaded, args=args, kwargs=kwargs, default_sequence=sequence)
