"""Built-in models: their settings in text form, and that they compute what they say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from microbatch.errors import InvalidModel, InvalidSettings, UserError
from microbatch.models.built_in import BUILT_IN, build, settings
from microbatch.models.loaded import Loaded
from microbatch.models.transformer import Attention, Decoder

SMALL = {
    "mlp": "mlp:depth=2,width=8",
    "cnn": "cnn:width=4,image=8",
    "pool": "pool:channels=2,image=8",
    "transformer": "transformer:depth=1,width=8,heads=2,sequence=4",
    "decoder": "decoder:depth=1,width=8,heads=4,kv_heads=2,vocabulary=16,context=4",
    "moe": "moe:depth=1,width=8,hidden=16,experts=4",
}
"""Every built-in model in a size for tests."""


def _run(loaded: Loaded) -> Tensor:
    with torch.no_grad():
        output = loaded.model(*loaded.args, **loaded.kwargs)
    assert isinstance(output, Tensor)
    return output


@pytest.mark.parametrize("name", BUILT_IN)
def test_runs_in_eval_mode_with_a_batch_dimension(name: str) -> None:
    loaded = build(SMALL[name])
    assert not loaded.model.training
    example = loaded.args[0]
    assert isinstance(example, Tensor) and len(example) >= 2
    assert len(_run(loaded)) == len(example)
    assert loaded.name == SMALL[name]


@pytest.mark.parametrize("name", BUILT_IN)
def test_weights_depend_on_the_seed_alone(name: str) -> None:
    torch.manual_seed(1)
    first = build(SMALL[name])
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = build(SMALL[name])
    assert torch.equal(_run(first), _run(second))
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(_run(first), _run(build(SMALL[name] + ",seed=5")))


def test_the_default_mlp_is_eight_layers_of_1024() -> None:
    layers = [layer for layer in build("mlp").model.modules() if isinstance(layer, nn.Linear)]
    assert [tuple(layer.weight.shape) for layer in layers] == [(1024, 1024)] * 8
    assert sum(isinstance(layer, nn.ReLU) for layer in build("mlp").model.modules()) == 8


def test_settings_reach_the_model() -> None:
    assert build("mlp:depth=3, width=16").args[0].shape == (2, 16)  # type: ignore[attr-defined]
    assert sum(isinstance(layer, nn.Linear) for layer in build("mlp:depth=3,width=16").model.modules()) == 3
    assert isinstance(build("pool:kind=mean").model, nn.AvgPool2d)


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("mpl", InvalidModel, ("mpl", "mlp")),
        ("mlp:depht=8", InvalidSettings, ("depht", "depth")),
        ("mlp:depth=eight", InvalidSettings, ("eight", "depth")),
        ("mlp:depth=0", InvalidSettings, ("depth=0",)),
        ("mlp:depth=-3", InvalidSettings, ("-3",)),
        ("mlp:depth=1.5", InvalidSettings, ("1.5",)),
        ("mlp:depth=", InvalidSettings, ("depth",)),
        ("mlp:depth", InvalidSettings, ("depth",)),
        ("mlp:depth=2,depth=3", InvalidSettings, ("twice",)),
        ("mlp:width=99999999999999", InvalidSettings, ("99999999999999",)),
        ("mlp:seed=-1", InvalidSettings, ("seed",)),
        ("pool:kind=meen", InvalidSettings, ("meen", "mean")),
        ("decoder:cache=maybe", InvalidSettings, ("maybe", "true")),
        ("decoder:heads=3", InvalidSettings, ("256", "3")),
        ("decoder:kv_heads=3", InvalidSettings, ("8", "3")),
        ("moe:experts=2,top_k=3", InvalidSettings, ("3", "2")),
        ("moe:capacity=0", InvalidSettings, ("capacity=0",)),
        ("moe:capacity=nan", InvalidSettings, ("nan",)),
        ("moe:capacity=much", InvalidSettings, ("much",)),
        ("moe:routing=zpif", InvalidSettings, ("zpif", "zipf")),
        ("moe:gate=experts,routing=even", InvalidSettings, ("even", "experts")),
        ("moe:gate=experts,decoding=true", InvalidSettings, ("Expert's choice cannot decode", "gate=tokens")),
    ],
)
def test_a_mistake_is_named_with_a_remedy(text: str, error: type[UserError], words: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        build(text)
    assert caught.value.remedy
    assert all(word in str(caught.value) for word in words)


def test_no_token_of_the_moe_example_is_there_twice() -> None:
    example = build(SMALL["moe"]).args[0]
    assert isinstance(example, Tensor)
    assert len(example.unique(dim=0)) == len(example) >= 256


def test_every_setting_has_a_default() -> None:
    assert settings("mlp") == {"depth": 8, "width": 1024, "seed": 0}
    for name in BUILT_IN:
        assert "seed" in settings(name)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_decode_step_with_cache_equals_the_whole_context_computed_again(kv_heads: int) -> None:
    text = f"decoder:depth=2,width=16,heads=4,kv_heads={kv_heads},vocabulary=32,context=6"
    again, step = build(f"{text},cache=false"), build(f"{text},cache=true")
    model = again.model.double()
    assert isinstance(model, Decoder)
    tokens = again.args[0]
    assert isinstance(tokens, Tensor)
    with torch.no_grad():
        cache = _fill_cache(model, tokens[:, :-1])
        torch.testing.assert_close(model(tokens[:, -1:], cache), model(tokens), rtol=0, atol=1e-12)
    shapes = [(tuple(key.shape), tuple(value.shape)) for key, value in cache]
    given = step.args[1]
    assert isinstance(given, list)
    assert [(tuple(key.shape), tuple(value.shape)) for key, value in given] == shapes


def _fill_cache(model: Decoder, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of every layer, kept while the model reads `tokens`."""
    kept: list[Tensor] = []
    handles = [
        projection.register_forward_hook(lambda _, __, out: kept.append(out.unflatten(-1, (-1, 4)).transpose(1, 2)))
        for attention in model.modules()
        if isinstance(attention, Attention)
        for projection in (attention.key, attention.value)
    ]
    model(tokens)
    for handle in handles:
        handle.remove()
    return list(zip(kept[::2], kept[1::2]))


def test_the_encoder_attends_both_ways() -> None:
    loaded = build(SMALL["transformer"])
    example = loaded.args[0]
    assert isinstance(example, Tensor)
    changed = example.clone()
    changed[:, -1] += torch.randn(8, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        first, second = loaded.model(example), loaded.model(changed)
    assert (first[:, 0] - second[:, 0]).abs().max() > 1e-6
