"""Example inputs of a transformers model, made from its config: token ids, images, sound.

To support a further kind of input, write a function from a `Question` to a tensor, and its row in `MAKERS`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from microbatch.errors import InvalidModel, InvalidSettings

DEFAULT_SEQUENCE = 512
"""Tokens of an example, where the model holds as many."""
DEFAULT_IMAGE = 224
SOUND_SAMPLES = 16_000
"""One second at the rate that speech models are made for."""
DEFAULT_FRAMES = 16


@dataclass(frozen=True, slots=True)
class Question:
    """What an example tensor depends on.

    Attributes:
        config: of the whole model.
        folder: where a preprocessor's settings may lie.
        batch: items.
        sequence: tokens, for text.
        dtype: of the model's weights.
    """

    config: Any
    folder: Path
    batch: int
    sequence: int
    dtype: torch.dtype


def text_config(config: Any, *, decoder: bool = False) -> Any:
    """The part of a config that describes the text model; the config itself where there is but one."""
    found = config.get_text_config(decoder=decoder)
    # Two encoders side by side, as in CLIP, are no text model with something added.
    return getattr(config, "text_config", found) if found is config else found


def max_positions(config: Any) -> int | None:
    """Tokens that the model has positions for; None where nothing limits them."""
    text = text_config(config)
    for name in (
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "max_sequence_length",
        "max_target_positions",
    ):
        found = getattr(text, name, None)
        if isinstance(found, int) and found > 0:
            # RoBERTa and its kin start to count behind the padding token.
            return found - 2 if text.model_type in _COUNT_FROM_PADDING else found
    return None


def check_sequence(config: Any, sequence: int, *, needed: int) -> None:
    """Refuses a sequence that the model has no positions for.

    Raises:
        InvalidSettings: `needed` positions for `sequence` tokens are more than there are.
    """
    most = max_positions(config)
    if most is not None and needed > most:
        raise InvalidSettings(
            f"A sequence of {sequence} tokens needs {needed} positions; this model has {most}.",
            f"Give at most {most - (needed - sequence)}.",
        )


def default_sequence(config: Any) -> int:
    """512 tokens, or as many as the model holds with one to spare for the next token."""
    most = max_positions(config)
    return DEFAULT_SEQUENCE if most is None else max(1, min(DEFAULT_SEQUENCE, most - 1))


def input_names(model: Any) -> tuple[str, ...]:
    """The inputs that one forward of the model needs, the main one first.

    Raises:
        InvalidModel: one of a kind that cannot be made up.
    """
    names = [str(model.main_input_name)]
    parameters = inspect.signature(model.forward).parameters
    if model.config.is_encoder_decoder and "decoder_input_ids" in parameters:
        names.append("decoder_input_ids")
    if not model.can_generate() and hasattr(model.config, "vision_config") and hasattr(model.config, "text_config"):
        names += [name for name in ("input_ids", "pixel_values") if name in parameters and name not in names]
    for name in names:
        if name not in MAKERS:
            raise InvalidModel(
                f"{type(model).__name__} takes {name}, which no example is known for.",
                "Write a function that returns the model and an example, and name it as file.py:callable.",
            )
    return tuple(names)


def has_tokens(names: tuple[str, ...]) -> bool:
    """Whether a sequence of tokens is among the inputs."""
    return "input_ids" in names or "decoder_input_ids" in names


def make_inputs(names: tuple[str, ...], question: Question, device: torch.device) -> dict[str, object]:
    """An example of each input, on that device; the same values at every call."""
    if device.type == "meta":
        with torch.device("meta"):
            return {name: MAKERS[name](question) for name in names}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {name: MAKERS[name](question).to(device) for name in names}


def _tokens(question: Question, *, decoder: bool = False) -> Tensor:
    """(batch, sequence) ids, none of them the padding token where it is 0 or 1."""
    vocabulary = text_config(question.config, decoder=decoder).vocab_size
    first = 2 if vocabulary > _FEW else 0
    return torch.randint(first, vocabulary, (question.batch, question.sequence))


def _images(question: Question) -> Tensor:
    """(batch, channels, height, width); video models take (batch, frames, channels, height, width)."""
    config = getattr(question.config, "vision_config", question.config)
    height, width = _image_size(config, question.folder)
    channels = getattr(config, "num_channels", None) or getattr(config, "in_channels", None) or 3
    frames = getattr(config, "num_frames", None)
    shape = (channels, height, width) if frames is None else (frames, channels, height, width)
    return torch.randn(question.batch, *shape).to(question.dtype)


def _image_size(config: Any, folder: Path) -> tuple[int, int]:
    """Of the config, else of the image processor's settings beside it, else 224."""
    found: Any = getattr(config, "image_size", None) or _processor_size(folder) or DEFAULT_IMAGE
    if isinstance(found, dict):
        found = (found.get("height") or found.get("shortest_edge"), found.get("width") or found.get("shortest_edge"))
    height, width = (found, found) if isinstance(found, int) else tuple(found)
    return int(height), int(width)


def _processor_size(folder: Path) -> Any:
    file = folder / "preprocessor_config.json"
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return settings.get("crop_size") or settings.get("size") if isinstance(settings, dict) else None


def _sound(question: Question) -> Tensor:
    """(batch, samples) of sound."""
    return torch.randn(question.batch, SOUND_SAMPLES).to(question.dtype)


def _spectrum(question: Question) -> Tensor:
    """(batch, mel bins, frames), as Whisper takes it, whose first convolutions halve the frames."""
    bins = getattr(question.config, "num_mel_bins", 80)
    frames = 2 * int(getattr(question.config, "max_source_positions", 1500))
    return torch.randn(question.batch, bins, frames).to(question.dtype)


def _decoder_tokens(question: Question) -> Tensor:
    return _tokens(question, decoder=True)


MAKERS: dict[str, Callable[[Question], Tensor]] = {
    "input_ids": _tokens,
    "decoder_input_ids": _decoder_tokens,
    "pixel_values": _images,
    "pixel_values_videos": _images,
    "input_values": _sound,
    "input_features": _spectrum,
}
"""How an example of each input is made."""

_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "max_target_positions")
_FEW = 8
_COUNT_FROM_PADDING = frozenset({"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "longformer", "mpnet"})
