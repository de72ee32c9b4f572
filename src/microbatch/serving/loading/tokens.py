"""A Hugging Face folder as a module: images as they are, token ids of any length where a mask hides padding."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from microbatch.batch.example import tensors_in
from microbatch.models.example_inputs import max_positions, text_config
from microbatch.models.load import load_model
from microbatch.models.loaded import Loaded
from microbatch.serving.engine.batcher import DynamicBatcher
from microbatch.serving.loading.modules import Bound, from_loaded
from microbatch.serving.loading.reading import Reading
from microbatch.serving.loading.served import Given, Served
from microbatch.serving.loading.texts import PaddedRows, TextReader, cutting_tokenizer, longest_of, padding_of

LENGTHS = (5, 12, 9)
"""Tokens of the examples."""
PROBED = (7, 11)
"""Lengths at which it is seen whether the model answers for each token."""


def from_folder(text: str, name: str, given: Given) -> Served:
    """The model of a folder; where it reads tokens and knows a mask, texts and token ids of any length share a batch.

    Raises:
        InvalidModel, InvalidSettings: see `microbatch.serving.loading.modules.from_loaded`.
    """
    loaded = load_model(text)
    per_token = _per_token(loaded)
    if per_token is None or "examples" in given:
        return from_loaded(text, name, loaded, given)
    model: Any = loaded.model
    folder = Path(text)
    longest = longest_of(folder, max_positions(model.config), None)
    tokenizer = cutting_tokenizer(folder, longest) if (folder / "tokenizer.json").is_file() else None
    reader = TextReader(tokenizer, longest, text_config(model.config).vocab_size)
    engine = DynamicBatcher(
        Bound(model, "", _constants(loaded)).eval(),
        name=name,
        collate=PaddedRows(padding_of(text_config(model.config)), per_token),
        examples=[row.numpy() for row in _examples(loaded, longest)],
        **given,
    )
    takes = f"{'a text or ' if tokenizer else ''}token ids, {longest} at most"
    return Served(
        name=name,
        text=text,
        kind="module",
        engine=Reading(engine, reader, is_long=reader.is_long, form=reader.form),
        takes=takes,
        notes=loaded.notes,
    )


def _constants(loaded: Loaded) -> dict[str, Any]:
    return {"use_cache": False} if "use_cache" in loaded.kwargs else {}


def _per_token(loaded: Loaded) -> bool | None:
    """Whether every output has a row for each token, or none has; None where rows cannot be padded."""
    inputs = {key for key, value in loaded.kwargs.items() if isinstance(value, Tensor)}
    if inputs != {"input_ids"} or "attention_mask" not in inspect.signature(loaded.model.forward).parameters:
        return None
    found = {_grows(tensor.shape[1:2], length) for length in PROBED for tensor in _outputs(loaded, length)}
    return found.pop() if len(found) == 1 else None


def _outputs(loaded: Loaded, length: int) -> list[Tensor]:
    assert loaded.example_at is not None
    _, kwargs = loaded.example_at(2, length)
    model: nn.Module = loaded.model
    with torch.no_grad():
        return tensors_in(model(**{**kwargs, **_constants(loaded)}))


def _grows(sizes: torch.Size, length: int) -> bool:
    return tuple(sizes) == (length,)


def _examples(loaded: Loaded, longest: int) -> list[Tensor]:
    assert loaded.example_at is not None
    lengths = [min(length, longest) for length in LENGTHS]
    return [tensors_in(loaded.example_at(2, length)[1])[0][0] for length in lengths]
