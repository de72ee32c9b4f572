"""One model in the mode that is asked for: the built-in ones and a user's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from microbatch.errors import InvalidSettings
from microbatch.models.load import load_model
from microbatch.models.modes import in_mode

DECODER = "decoder:depth=2,width=32,heads=4,kv_heads=2,vocabulary=64,context=7"


def shapes(value: object) -> object:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    assert isinstance(value, list | tuple)
    return [shapes(item) for item in value]


@pytest.mark.parametrize(
    ("mode", "sequence", "first", "held"),
    [
        ("inference", None, (3, 1), 7),
        ("inference", 4, (3, 1), 4),
        ("training", None, (3, 1), 7),
        ("decode", None, (3, 1), 7),
        ("decode", 11, (3, 1), 11),
        ("prefill", None, (3, 7), None),
        ("prefill", 11, (3, 11), None),
        ("prefill", 1, (3, 1), None),
    ],
)
def test_the_built_in_decoder_in_every_mode(
    mode: str, sequence: int | None, first: tuple[int, ...], held: int | None
) -> None:
    loaded = in_mode(load_model(DECODER), mode, sequence)
    assert loaded.name == DECODER and not loaded.model.training
    assert loaded.example_at is not None
    args, _ = loaded.example_at(3, None)
    assert shapes(args[0]) == first
    if held is None:
        assert len(args) == 1 and loaded.default_sequence == first[1]
    else:
        assert shapes(args[1]) == [[(3, 2, held, 8)] * 2] * 2 and loaded.default_sequence == held
    assert loaded.model(*args).shape == (3, 64)


def test_the_example_of_a_mode_takes_other_sequences() -> None:
    prefill, decode = (in_mode(load_model(DECODER), mode, 9) for mode in ("prefill", "decode"))
    assert prefill.example_at is not None and decode.example_at is not None
    assert shapes(prefill.example_at(2, 5)[0]) == [(2, 5)]
    assert shapes(decode.example_at(2, 5)[0][1]) == [[(2, 2, 5, 8)] * 2] * 2
    with pytest.raises(InvalidSettings, match=r"holds 9 tokens, not 10.*context=10"):
        decode.example_at(2, 10)


def test_the_decoder_s_weights_do_not_depend_on_the_mode_or_on_chance() -> None:
    text = DECODER.replace("context=7", "context=7,cache=false")
    again = in_mode(load_model(DECODER), "prefill", 8).model.state_dict()
    torch.manual_seed(3)
    assert all(torch.equal(again[name], value) for name, value in load_model(text).model.state_dict().items())


def test_dtype_holds_in_every_mode() -> None:
    decode = in_mode(load_model(DECODER, dtype="fp64"), "decode", 5)
    assert decode.example_at is not None
    (_, layers), _ = decode.example_at(2, None)
    assert isinstance(layers, list) and layers[0][0].dtype == torch.float64
    assert {parameter.dtype for parameter in decode.model.parameters()} == {torch.float64}


def test_the_transformer_takes_a_sequence() -> None:
    loaded = in_mode(load_model("transformer:width=32"), "inference", 48)
    assert shapes(loaded.args) == [(2, 48, 32)] and loaded.default_sequence == 48
    assert loaded.model(*loaded.args).shape == (2, 48, 32)


def test_a_model_without_a_sequence_says_so() -> None:
    loaded = load_model("mlp:depth=1,width=4")
    assert in_mode(loaded, "training") is loaded
    with pytest.raises(InvalidSettings, match="no sequence"):
        in_mode(loaded, "inference", 4)
    with pytest.raises(InvalidSettings, match="no mode 'decode'"):
        in_mode(loaded, "decode")
