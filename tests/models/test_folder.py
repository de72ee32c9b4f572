"""Hugging Face folders: what loads, with which weights, and what is refused with which words."""

from __future__ import annotations

import json
import logging
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from microbatch.errors import InvalidModel
from microbatch.models.load import load_model
from tests.models.tiny import CAUSAL, OTHERS, Tiny, write_folder

LLAMA = CAUSAL["llama"]
TRAP = "import pathlib\npathlib.Path({path!r}).touch()\n"


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", [*CAUSAL, *OTHERS])
@pytest.mark.parametrize("weights", ["meta", "random"])
def test_every_kind_of_architecture_loads(tmp_path: Path, name: str, weights: Any) -> None:
    tiny = {**CAUSAL, **OTHERS}[name]
    loaded = load_model(write_folder(tmp_path / "model", tiny), weights=weights)
    assert type(loaded.model).__name__ == tiny.kind
    assert {parameter.device.type for parameter in loaded.model.parameters()} == {
        "meta" if weights == "meta" else "cpu"
    }
    assert not loaded.model.training
    if weights == "random":
        with torch.no_grad():
            output = loaded.model(*loaded.args, **loaded.kwargs)
        assert all(torch.isfinite(value).all() for value in output.values() if isinstance(value, torch.Tensor))


@pytest.mark.parametrize(
    ("name", "shapes", "unit"),
    [
        ("llama", {"input_ids": (5, 63)}, "sequences"),
        ("encoder", {"input_ids": (5, 63)}, "sequences"),
        ("encoder from padding", {"input_ids": (5, 61)}, "sequences"),
        ("images", {"pixel_values": (5, 3, 32, 32)}, "images"),
        ("convolutions", {"pixel_values": (5, 3, 224, 224)}, "images"),
        ("encoder and decoder", {"input_ids": (5, 512), "decoder_input_ids": (5, 512)}, "sequences"),
        ("text and images", {"input_ids": (5, 63), "pixel_values": (5, 3, 32, 32)}, "sequences"),
        ("sound", {"input_values": (5, 16000)}, "clips"),
        ("spectrum", {"input_features": (5, 80, 100), "decoder_input_ids": (5, 447)}, "clips"),
    ],
)
def test_inputs_come_from_the_config(tmp_path: Path, name: str, shapes: dict[str, tuple[int, ...]], unit: str) -> None:
    loaded = load_model(write_folder(tmp_path / "model", {**CAUSAL, **OTHERS}[name]), weights="meta")
    assert loaded.example_at is not None
    _, inputs = loaded.example_at(5, None)
    tensors = {name: tuple(value.shape) for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    assert (tensors, loaded.unit) == (shapes, unit)


def test_an_image_size_beside_the_config_is_used(tmp_path: Path) -> None:
    text = write_folder(tmp_path / "model", OTHERS["convolutions"])
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps({"size": {"shortest_edge": 96}}))
    image = load_model(text, weights="meta").kwargs["pixel_values"]
    assert isinstance(image, torch.Tensor) and image.shape == (2, 3, 96, 96)


def saved(folder: Path, tiny: Tiny = LLAMA) -> tuple[str, Any]:
    """A folder with weights, and the model that was saved."""
    model = load_model(write_folder(folder, tiny), weights="random").model
    model.save_pretrained(folder)  # type: ignore[operator]
    return str(folder), model


def test_weights_are_loaded_where_they_are(tmp_path: Path) -> None:
    text, model = saved(tmp_path / "model")
    loaded = load_model(text)
    assert loaded.notes == ()
    again = loaded.model.state_dict()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())


def test_random_weights_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="microbatch"):
        loaded = load_model(write_folder(tmp_path / "model", LLAMA))
    assert "the weights are random" in loaded.notes[0]
    assert loaded.notes[0] in caplog.text
    assert load_model(str(tmp_path / "model"), weights="meta").notes == ()


def test_quantised_weights_that_are_not_loaded_are_told_of(tmp_path: Path) -> None:
    text = write_folder(tmp_path / "model", LLAMA, quantization_config={"quant_method": "fp8"}, dtype="bfloat16")
    loaded = load_model(text, weights="meta")
    assert loaded.notes == (f"{text} stores its weights quantised (fp8); here they are bfloat16.",)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}


def test_nothing_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetched(*_: object) -> None:
        raise AssertionError("the network was asked")

    text, _ = saved(tmp_path / "model")
    monkeypatch.setattr("socket.socket.connect", fetched)
    assert load_model(text).notes == ()


def test_a_missing_weight_is_told_of(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    text, _ = saved(tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    assert "lacks 1 of the weights, as model.layers.1.mlp.up_proj.weight" in load_model(text).notes[0]


def test_weights_of_another_size_are_one_clear_line(tmp_path: Path) -> None:
    text, _ = saved(tmp_path / "model")
    write_folder(tmp_path / "model", LLAMA, intermediate_size=64)
    with pytest.raises(InvalidModel, match=r"mlp.down_proj.weight is \(32, 48\), and config.json makes it \(32, 64\)"):
        load_model(text)


@pytest.mark.parametrize(("asked", "expected"), [(None, torch.bfloat16), ("fp32", torch.float32)])
def test_the_dtype_is_the_config_s_or_the_one_asked_for(
    tmp_path: Path, asked: str | None, expected: torch.dtype
) -> None:
    loaded = load_model(write_folder(tmp_path / "model", LLAMA, torch_dtype="bfloat16"), dtype=asked)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {expected}
    assert torch.get_default_dtype() == torch.float32


def test_without_architectures_the_usual_class_is_taken(tmp_path: Path) -> None:
    for name, kind in (
        ("llama", "LlamaForCausalLM"),
        ("encoder", "BertForMaskedLM"),
        ("convolutions", "ResNetForImage"),
    ):
        text = write_folder(tmp_path / name, {**CAUSAL, **OTHERS}[name], architectures=None)
        assert type(load_model(text, weights="meta").model).__name__.startswith(kind)


def test_code_in_the_folder_never_runs(tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    text = write_folder(tmp_path / "model", LLAMA, auto_map=auto_map)
    (tmp_path / "model" / "evil.py").write_text(TRAP.format(path=str(tmp_path / "ran")))
    loaded = load_model(text)
    assert type(loaded.model).__module__.startswith("transformers.")
    assert "code of its own, which is not run" in loaded.notes[0]
    assert not (tmp_path / "ran").exists()


def test_a_model_that_is_only_code_is_refused(tmp_path: Path) -> None:
    text = write_folder(tmp_path / "model", Tiny("Evil", "evil", {}), auto_map={"AutoConfig": "evil.Config"})
    (tmp_path / "model" / "evil.py").write_text(TRAP.format(path=str(tmp_path / "ran")))
    with pytest.raises(InvalidModel, match="code from a folder is never run"):
        load_model(text)
    assert not (tmp_path / "ran").exists()


def test_a_pickle_beside_the_config_stays_closed(tmp_path: Path) -> None:
    text = write_folder(tmp_path / "model", LLAMA)
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(tmp_path / "ran")))
    assert "only as a pickle, which is not opened" in load_model(text).notes[0]
    assert not (tmp_path / "ran").exists()


def test_a_pickle_in_the_place_of_the_weights_stays_closed(tmp_path: Path) -> None:
    text = write_folder(tmp_path / "model", LLAMA)
    (tmp_path / "model" / "model.safetensors").write_bytes(pickle.dumps(Trap(tmp_path / "ran")))
    with pytest.raises(InvalidModel, match="cannot be loaded"):
        load_model(text)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ("no config.json",)),
        ("{", ("config.json is no JSON",)),
        ("[1]", ("holds a list",)),
        ("{}", ("names no model_type", '"model_type": "llama"')),
        ('{"model_type": "lama"}', ("no model type 'lama'", "llama")),
        ('{"model_type": "qqqqqqq"}', ("no model type 'qqqqqqq'", "newer transformers")),
        ('{"model_type": "llama", "architectures": ["LlamaForCausalLMM"]}', ("LlamaForCausalLMM", "LlamaForCausalLM")),
        ('{"model_type": "llama", "architectures": ["AutoConfig"]}', ("no architecture 'AutoConfig'",)),
        ('{"model_type": "llama", "hidden_size": "wide"}', ("config.json is not valid", "hidden_size")),
        ('{"model_type": "llama", "hidden_size": 33, "num_attention_heads": 4}', ("33",)),
    ],
)
def test_refusals_are_one_clear_line(tmp_path: Path, content: str | None, words: tuple[str, ...]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    if content is not None:
        (folder / "config.json").write_text(content)
    with pytest.raises(InvalidModel) as caught:
        load_model(str(folder), weights="meta")
    message = str(caught.value)
    assert "\n" not in message and caught.value.remedy
    assert all(word in message for word in words), message


def test_a_folder_of_folders_names_the_one_that_is_meant(tmp_path: Path) -> None:
    write_folder(tmp_path / "inner", LLAMA)
    with pytest.raises(InvalidModel, match="inner"):
        load_model(str(tmp_path))


def test_a_folder_with_only_a_pickle_is_refused_as_one(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(tmp_path / "ran")))
    with pytest.raises(InvalidModel, match=r"only a pickle \(pytorch_model.bin\)"):
        load_model(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_without_transformers_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = write_folder(tmp_path / "model", LLAMA)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InvalidModel, match=r"microbatch\[llm\]"):
        load_model(text)
