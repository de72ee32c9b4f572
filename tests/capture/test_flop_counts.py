"""Whole models of other libraries against counts that share no code with the capture."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="needs the extra llm")

from benchmarks.flop_counts import CONFIGS, compare_config, compare_vision
from microbatch.models.torchvision_operators import make_torchvision_importable

VISION = (
    "torchvision:resnet18", "torchvision:mobilenet_v3_small", "torchvision:shufflenet_v2_x0_5", "torchvision:vgg11",
    "torchvision:squeezenet1_1", "torchvision:vit_b_16", "timm:test_convnext", "timm:vit_tiny_patch16_224",
    "timm:mixer_s32_224", "timm:test_resnet", "timm:deit_tiny_patch16_224",
)  # fmt: skip
MODES = ("prefill", "decode", "inference")
CASES = [
    (name, config.modes[0] if len(config.modes) == 1 else MODES[place % 3])
    for place, (name, config) in enumerate(CONFIGS.items())
]


@pytest.mark.parametrize("name", VISION)
def test_vision_models(name: str) -> None:
    make_torchvision_importable()
    pytest.importorskip(name.partition(":")[0])
    row = compare_vision(name)
    assert row.captured == row.independent and row.warnings == ()


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_configs_as_functions_of_batch_and_sequence(name: str, mode: str) -> None:
    # Four layers show a repetition, and behind DeepSeek's three dense layers one with experts.
    row = compare_config(name, mode, layers=4)
    assert row.captured == row.independent and row.warnings == ()
