"""What a transformers model runs in each mode: its forward, a prefill, or one decode step over a held cache."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from microbatch.errors import InvalidModel
from microbatch.models.example_inputs import (
    Question,
    check_sequence,
    default_sequence,
    has_tokens,
    input_names,
    make_inputs,
)
from microbatch.models.first_of_kind import first_of_each_kind
from microbatch.models.held_cache import NO_DECODE, LayerPlan, LayerTensors, make_cache, plan_layers
from microbatch.models.loaded import EXAMPLE_BATCH, MODES, Example, Loaded

UNITS = {"input_ids": "sequences", "pixel_values": "images", "pixel_values_videos": "clips"}
"""What one item is called, by the main input; else clips, as of sound."""


class DecodeStep(nn.Module):
    """One new token for every sequence, over a cache that holds the same context before and after.

    Attributes:
        model: a causal language model of transformers.
        plans: what each of its layers keeps.
    """

    def __init__(self, model: Any, plans: Sequence[LayerPlan]) -> None:
        super().__init__()
        self.model, self.plans = model, tuple(plans)
        self._cache_name = _cache_name(model)
        self._keywords: dict[str, object] = {"use_cache": True, **last_token_only(model)}

    def forward(self, input_ids: Tensor, layers: Sequence[LayerTensors], context: int) -> Tensor:
        """input_ids: (batch, 1); layers, context: see `make_cache`; returns (batch, 1, vocabulary)."""
        cache = make_cache(self.plans, layers, context)
        output = self.model(input_ids=input_ids, **{self._cache_name: cache}, **self._keywords)
        logits: Tensor = output.logits
        return logits


def describe(text: str, model: Any, folder: Path, notes: tuple[str, ...]) -> Loaded:
    """A built model with examples of its inputs, and its modes."""
    names = input_names(model)
    sequence = default_sequence(model.config) if has_tokens(names) else None
    example_at = partial(_forward_inputs, model, folder, names, sequence)
    args, kwargs = example_at(EXAMPLE_BATCH, None)
    is_language = is_causal(model)
    loaded = Loaded(
        name=text,
        model=model,
        args=args,
        kwargs=kwargs,
        unit=UNITS.get(names[0], "clips"),
        loss=next_token_loss if is_language else None,
        example_at=example_at,
        default_sequence=sequence,
        modes=MODES if is_language else MODES[:2],
        notes=notes,
    )
    return dataclasses.replace(loaded, build_mode=partial(_in_mode, loaded)) if is_language else loaded


def is_causal(model: Any) -> bool:
    """Whether the model generates text from text, one token after the other."""
    return bool(model.can_generate()) and model.main_input_name == "input_ids" and not model.config.is_encoder_decoder


def last_token_only(model: Any) -> dict[str, object]:
    """The keyword that asks for the logits of the last token alone, where the model has it."""
    return {"logits_to_keep": 1} if "logits_to_keep" in _parameters(model) else {}


def next_token_loss(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each token given those before it: its sum, and the number of predicted tokens."""
    targets = batch["input_ids"][:, 1:].flatten()
    logits = output.logits[:, :-1].flatten(0, 1)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(logits, targets, reduction="sum"), torch.tensor(targets.numel())


def _parameters(model: Any) -> Any:
    return inspect.signature(model.forward).parameters


def _forward_inputs(
    model: Any, folder: Path, names: tuple[str, ...], default: int | None, batch: int, sequence: int | None
) -> Example:
    length = sequence or default or 1
    if default is not None:
        check_sequence(model.config, length, needed=length)
    question = Question(model.config, folder, batch, length, model.dtype)
    # As the plain call does, whatever was saved in the config: without a cache, transformers looks into the positions
    # for packed sequences, which reads values back from the device and cannot be captured.
    keywords = {"use_cache": True} if "use_cache" in _parameters(model) and model.can_generate() else {}
    return (), {**make_inputs(names, question, model.device), **keywords}


def _in_mode(loaded: Loaded, mode: str, sequence: int | None) -> Loaded:
    length = sequence or loaded.default_sequence or 1
    model, example_at = _MODES.get(mode, _forward)(loaded)
    args, kwargs = example_at(EXAMPLE_BATCH, length)
    return dataclasses.replace(
        loaded,
        model=model,
        args=args,
        kwargs=kwargs,
        example_at=lambda batch, other: example_at(batch, other or length),
        default_sequence=length,
    )


def _forward(loaded: Loaded) -> Runs:
    assert loaded.example_at is not None
    return loaded.model, loaded.example_at


def _prefill(loaded: Loaded) -> Runs:
    model: Any = loaded.model

    def example_at(batch: int, sequence: int | None) -> Example:
        assert loaded.example_at is not None
        args, kwargs = loaded.example_at(batch, sequence)
        return args, {**kwargs, **last_token_only(model)}

    return model, example_at


def _decode(loaded: Loaded) -> Runs:
    model: Any = loaded.model
    plans = _plans(model)

    def example_at(batch: int, sequence: int | None) -> Example:
        context = sequence or loaded.default_sequence or 1
        check_sequence(model.config, context, needed=context + 1)
        return _decode_inputs(model, plans, batch, context), {}

    return DecodeStep(model, plans), example_at


def _plans(model: Any) -> tuple[LayerPlan, ...]:
    """What each layer keeps: of equal layers the first is asked, and only if that fails all of them."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    with first_of_each_kind(model, count) as stands_for, suppress(Exception):
        if stands_for is not None:
            layers = plan_layers(_own_cache(model))
            return tuple(layers[number] for number in stands_for)
    return plan_layers(_own_cache(model))


def _own_cache(model: Any) -> object:
    """The cache that the model itself fills for two tokens, in shapes only.

    Raises:
        InvalidModel: the model fills none, or one that cannot be held; or it cannot run two tokens.
    """
    try:
        with torch.no_grad(), without_experts(model):
            output = _two_tokens(model)
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InvalidModel(f"{type(model).__name__} cannot be asked for its cache: {reason[0]}", NO_DECODE) from error
    cache = dict(output).get(_cache_name(model))
    if cache is None:
        raise InvalidModel(f"{type(model).__name__} keeps no cache, as its config stands.", NO_DECODE)
    return cache


def _two_tokens(model: Any) -> Any:
    """The model's output; where it looks at values, which weights on meta do not have, again on fake tensors.

    On those transformers knows that it must not look. They are too slow to begin with.
    """

    def run() -> Any:
        tokens = torch.zeros(1, 2, dtype=torch.long, device=model.device)
        return model(input_ids=tokens, use_cache=True, **last_token_only(model))

    try:
        return run()
    except RuntimeError:
        if model.device.type != "meta":
            raise
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)  # torch logs what it raises as well
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return run()
    finally:
        logging.disable(before)


@contextmanager
def without_experts(model: Any) -> Iterator[None]:
    """Inside, mixtures of experts return nothing in particular: what they read depends on values, which meta lacks."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    before = getattr(model.config, "_experts_implementation", None)
    if before is None:
        yield
        return
    ALL_EXPERTS_FUNCTIONS.register(_NO_EXPERTS, lambda _, hidden, *__: torch.zeros_like(hidden))
    model.set_experts_implementation(_NO_EXPERTS)
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def _decode_inputs(model: Any, plans: Sequence[LayerPlan], batch: int, context: int) -> tuple[object, ...]:
    """One token each, normal noise as the context's keys, values and states, and the number of its tokens."""
    generator = None if model.device.type == "meta" else torch.Generator().manual_seed(0)

    def noise(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if generator is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        one = torch.randn(1, *shape[1:], generator=generator).to(device=model.device, dtype=dtype)
        return one.expand(shape).clone()  # the same context for every sequence: a large cache takes its time to draw

    layers = tuple(
        tuple(noise(shape, slot.dtype) for shape, slot in zip(plan.shapes(batch, context), plan.slots))
        for plan in plans
    )
    question = Question(model.config, Path(), batch, 1, model.dtype)
    return make_inputs(("input_ids",), question, model.device)["input_ids"], layers, context


def _cache_name(model: Any) -> str:
    """Of the cache, as an input and as an output; transformers renamed it."""
    return "cache" if "cache" in _parameters(model) else "past_key_values"


_NO_EXPERTS = "microbatch_no_experts"

Runs = tuple[nn.Module, Callable[[int, int | None], Example]]
"""A module, and its inputs at a batch and a sequence."""

_MODES: dict[str, Callable[[Loaded], Runs]] = {"prefill": _prefill, "decode": _decode}
