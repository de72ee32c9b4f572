"""torchvision and timm models by name."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from microbatch.errors import InvalidModel, InvalidSettings
from microbatch.models.load import load_model

AUXILIARY = 1024 * 256 * 9 + 2 * 256 + 256 * 21 + 21
"""The second head of FCN, which is there only for training with the published weights."""

MODELS = [
    ("torchvision:resnet18", [(2, 3, 224, 224)], "images", 11_689_512),
    ("torchvision:resnet18,image=64", [(2, 3, 64, 64)], "images", 11_689_512),
    ("torchvision:vit_b_16,image=32", [(2, 3, 32, 32)], "images", 86_567_656 - 192 * 768),
    ("torchvision:inception_v3", [(2, 3, 299, 299)], "images", 27_161_264),
    ("torchvision:fcn_resnet50", [(2, 3, 224, 224)], "images", 35_322_218 - AUXILIARY),
    ("torchvision:r3d_18", [(2, 3, 16, 112, 112)], "clips", 33_371_472),
    ("torchvision:raft_small", [(2, 3, 224, 224)] * 2, "pairs of images", 990_162),
    ("timm:resnet18", [(2, 3, 224, 224)], "images", 11_689_512),
    ("timm:vit_tiny_patch16_224,image=32", [(2, 3, 32, 32)], "images", 5_717_416 - 192 * 192),
    ("timm:resnet18.a1_in1k", [(2, 3, 224, 224)], "images", 11_689_512),
]
"""Parameters as the documentation of the packages counts them; an image of 32 leaves 4 of 196 positions."""


@pytest.mark.parametrize(("text", "shapes", "unit", "parameters"), MODELS)
def test_a_model_by_name_on_meta(text: str, shapes: list[tuple[int, ...]], unit: str, parameters: int) -> None:
    loaded = load_model(text, weights="meta")
    tensors = [value for value in loaded.args if isinstance(value, Tensor)]
    assert [tuple(tensor.shape) for tensor in tensors] == shapes
    assert (loaded.unit, loaded.name, loaded.model.training) == (unit, text, False)
    assert {parameter.device.type for parameter in loaded.model.parameters()} == {"meta"}
    assert sum(parameter.numel() for parameter in loaded.model.parameters()) == parameters


@pytest.mark.parametrize("text", ["torchvision:resnet18,image=32", "timm:vit_tiny_patch16_224,image=32"])
def test_a_model_with_weights_runs(text: str) -> None:
    loaded = load_model(text, dtype="bf16")
    with torch.no_grad():
        output = loaded.model(*loaded.args)
    assert output.shape == (2, 1000) and output.dtype == torch.bfloat16 and output.isfinite().all()


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("torchvision:resnet5", InvalidModel, ("no model 'resnet5'", "resnet50")),
        ("torchvision:zzzzzzzz", InvalidModel, ("no model 'zzzzzzzz'", "list_models")),
        ("torchvision:fasterrcnn_resnet50_fpn", InvalidModel, ("a list of images", "file.py:callable")),
        ("torchvision:", InvalidModel, ("names no model", "torchvision:resnet50")),
        ("timm:resnet5", InvalidModel, ("no model 'resnet5'", "resnet50")),
        ("timm:resnet18.nothing", InvalidModel, ("no weights 'resnet18.nothing'",)),
        ("timm:hf-hub:someone/model", InvalidModel, ("no model 'hf-hub:someone/model'",)),
        ("timm:resnet18,depth=3", InvalidSettings, ("depth=3", "image=160")),
        ("timm:resnet18,image=0", InvalidSettings, ("image=0",)),
        ("timm:resnet18,image=", InvalidSettings, ("image=",)),
    ],
)
def test_refusals_are_one_clear_line(text: str, error: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        load_model(text)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 300
    assert all(word in message for word in words), message


@pytest.mark.parametrize("package", ["torchvision", "timm"])
def test_a_missing_package_names_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InvalidModel, match=rf"needs the package {package}.*microbatch\[vision\]"):
        load_model(f"{package}:resnet18")


def test_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetched(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("socket.socket.connect", fetched)
    load_model("torchvision:fcn_resnet50", weights="meta")
    load_model("timm:resnet18.a1_in1k", weights="meta")


def test_the_packages_are_loaded_only_when_asked_for() -> None:
    code = (
        "import sys; import microbatch.models.load;"
        "print([m for m in ('torchvision', 'timm', 'transformers', 'gguf', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
