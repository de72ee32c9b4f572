"""Prefill and decode of language models against the plain forward of transformers, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from microbatch.errors import InvalidModel, InvalidSettings
from microbatch.models.folder_modes import DecodeStep
from microbatch.models.load import load_model
from microbatch.models.loaded import MODES, Loaded
from microbatch.models.modes import in_mode
from tests.models.tiny import CAUSAL, OTHERS, Tiny, write_folder

CONTEXT = 20
STATES_KEEP_FP32 = {"linear attention", "state space"}
"""Architectures that hold their state in fp32 whatever the model's dtype."""


def load(folder: Path, tiny: Tiny, **more: Any) -> Loaded:
    loaded = load_model(write_folder(folder / "model", tiny), dtype="fp64", **more)
    if hasattr(loaded.model.config, "_experts_implementation"):
        loaded.model.set_experts_implementation("eager")  # type: ignore[operator]  # grouped_mm knows no fp64
    return loaded


def held(step: DecodeStep, cache: Any, batch: int) -> tuple[tuple[Tensor, ...], ...]:
    """The cache that transformers filled, laid out as the step takes it: the new token's place holds no number."""

    def tensor(slot: Any, shape: tuple[int, ...], layer: Any) -> Tensor:
        own = getattr(layer, slot.kind)
        if slot.kind not in ("keys", "values"):
            state: Tensor = own[slot.index].clone()
            return state
        room = torch.full(shape, torch.nan, dtype=own.dtype)
        assert own.shape[-2] == shape[-2] - 1
        room[..., :-1, :] = own
        return room

    return tuple(
        tuple(tensor(slot, shape, layer) for slot, shape in zip(plan.slots, plan.shapes(batch, CONTEXT)))
        for plan, layer in zip(step.plans, cache.layers)
    )


@pytest.mark.filterwarnings("ignore")  # of kernels that this machine lacks
@pytest.mark.parametrize("name", CAUSAL)
def test_a_decode_step_equals_the_forward_over_everything(tmp_path: Path, name: str) -> None:
    loaded = load(tmp_path, CAUSAL[name])
    decode = in_mode(loaded, "decode", CONTEXT)
    step, model = decode.model, loaded.model
    assert isinstance(step, DecodeStep)
    tokens = torch.randint(2, 96, (3, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=tokens).logits[:, -1:]
        filled = model(input_ids=tokens[:, :-1], use_cache=True)
        own = next(value for key, value in filled.items() if key in ("cache", "past_key_values", "cache_params"))
        layers = held(step, own, 3)
        once, again = (step(tokens[:, -1:], layers, CONTEXT) for _ in range(2))
    close = 1e-6 if name in STATES_KEEP_FP32 else 1e-12
    torch.testing.assert_close(once, expected, rtol=0, atol=close)
    if name not in STATES_KEEP_FP32:
        assert torch.equal(once, again), "a step left the context changed"


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("context", [1, 7, 8, 40])
def test_the_cache_has_the_shapes_of_the_context_and_keeps_them(tmp_path: Path, name: str, context: int) -> None:
    decode = in_mode(load(tmp_path, CAUSAL[name], weights="meta"), "decode", context)
    assert decode.example_at is not None
    (tokens, layers, held_tokens), kwargs = decode.example_at(5, None)
    assert isinstance(tokens, Tensor) and tokens.shape == (5, 1) and held_tokens == context and kwargs == {}
    assert isinstance(layers, tuple)
    shapes = {tuple(tensor.shape) for layer in layers for tensor in layer}
    window = min(context, 7) + 1  # a window of 8 holds 7 tokens before the new one
    expected = {
        "llama": {(5, 2, context + 1, 8)},
        "sliding": {(5, 2, window, 8)},
        "mixed windows": {(5, 2, window, 8), (5, 2, context + 1, 8)},
        "latent": {(5, 1, context + 1, 16), (5, 1, context + 1, 8)},
        "experts": {(5, 2, context + 1, 8)},
        "learned positions": {(5, 4, context + 1, 8)},
    }
    if name in expected:
        assert shapes == expected[name]
    else:
        assert all(shape[0] == 5 for shape in shapes)


def test_prefill_answers_with_the_last_token_and_a_cache(tmp_path: Path) -> None:
    loaded = load(tmp_path, CAUSAL["llama"])
    prefill = in_mode(loaded, "prefill", 9)
    with torch.no_grad():
        output = prefill.model(*prefill.args, **prefill.kwargs)
        whole = loaded.model(input_ids=prefill.kwargs["input_ids"]).logits
    assert output.logits.shape == (2, 1, 96)
    torch.testing.assert_close(output.logits, whole[:, -1:], rtol=0, atol=1e-12)
    assert (output.get("cache") or output.get("past_key_values")).get_seq_length() == 9


def test_training_has_the_loss_of_the_next_token(tmp_path: Path) -> None:
    loaded = load(tmp_path, CAUSAL["llama"])
    training = in_mode(loaded, "training", 12)
    assert training.loss is not None and in_mode(loaded, "inference").loss is None
    output = training.model(**training.kwargs)
    found: Any = training.loss(output, training.kwargs)
    total, weight = found
    tokens = training.kwargs["input_ids"]
    expected = training.model(input_ids=tokens, labels=tokens).loss
    assert weight == 2 * 11
    torch.testing.assert_close((total / weight).float(), expected, rtol=1e-6, atol=0)


def test_an_example_is_the_same_each_time_and_of_any_size(tmp_path: Path) -> None:
    loaded = load(tmp_path, CAUSAL["llama"])
    decode = in_mode(loaded, "decode")
    assert decode.default_sequence == 63 and decode.example_at is not None
    (first, layers, context), _ = decode.example_at(4, 30)
    (second, others, _), _ = decode.example_at(4, 30)
    assert context == 30
    assert isinstance(first, Tensor) and isinstance(second, Tensor) and torch.equal(first, second)
    assert isinstance(layers, tuple) and isinstance(others, tuple) and torch.equal(layers[0][0], others[0][0])
    assert decode.model(first, layers, context).shape == (4, 1, 96)


@pytest.mark.parametrize(
    ("name", "mode", "sequence", "words"),
    [
        ("encoder", "decode", None, ("no mode 'decode'", "inference, training")),
        ("images", "prefill", None, ("no mode 'prefill'",)),
        ("images", "inference", 7, ("no sequence",)),
        ("llama", "decode", 64, ("65 positions", "has 64", "at most 63")),
        ("llama", "prefill", 65, ("65 positions", "at most 64")),
        ("llama", "decode", 0, ("0 tokens",)),
        ("llama", "generate", None, ("no mode 'generate'",)),
    ],
)
def test_what_a_model_cannot_do_is_one_clear_line(
    tmp_path: Path, name: str, mode: str, sequence: int | None, words: tuple[str, ...]
) -> None:
    loaded = load_model(write_folder(tmp_path / "model", {**CAUSAL, **OTHERS}[name]), weights="meta")
    with pytest.raises(InvalidSettings) as caught:
        in_mode(loaded, mode, sequence)
    message = str(caught.value)
    assert "\n" not in message and caught.value.remedy
    assert all(word in message for word in words), message


def test_a_model_without_a_cache_says_so(tmp_path: Path) -> None:
    encoder = Tiny("BertLMHeadModel", "bert", OTHERS["encoder"].settings)
    loaded = load_model(write_folder(tmp_path / "model", encoder), weights="meta")
    with pytest.raises(InvalidModel, match="keeps no cache"):
        in_mode(loaded, "decode")


@pytest.mark.parametrize("name", CAUSAL)
def test_language_models_offer_every_mode(tmp_path: Path, name: str) -> None:
    assert load_model(write_folder(tmp_path / "model", CAUSAL[name]), weights="meta").modes == MODES
