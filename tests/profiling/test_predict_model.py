"""Predictions of real models: built-in ones, modules, and Hugging Face configs written by hand, without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import microbatch
from microbatch.errors import InvalidModel, InvalidSettings
from microbatch.models.load import load_model
from microbatch.profiling.predict import predict
from microbatch.profiling.workload import Workload
from tests.roofline import works


def llama(folder: Path, **sizes: int) -> str:
    """A folder with nothing but config.json."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
             "vocab_size")  # fmt: skip
    config: dict[str, Any] = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "tie_word_embeddings": False,
        "max_position_embeddings": 8192, **{name: sizes[name] for name in names},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


LLAMAS = {
    "llama-2-7b": ((4096, 32, 32, 32, 11008, 32000), 169, 87),
    "llama-3-8b": ((4096, 32, 32, 8, 14336, 128256), 822, 421),
}


@pytest.mark.parametrize("name", LLAMAS)
def test_the_published_context_limits_come_out_of_a_config(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra llm is not installed")
    (hidden, layers, heads, kv, ffn, vocabulary), a100, h100 = LLAMAS[name]
    folder = llama(
        tmp_path, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv,
        intermediate_size=ffn, vocab_size=vocabulary,
    )  # fmt: skip
    profile = predict(folder, "a100", mode="decode", sequence=2048, max_batch_size=8)
    assert profile.prediction is not None
    limits = profile.prediction.decode
    assert limits is not None and limits.active_parameters is not None
    assert round(limits.context_limit or 0) == a100
    kappa = 2 * layers * kv * (hidden // heads) * 2
    assert limits.cache_bytes_per_token == kappa
    assert limits.half_batch == pytest.approx(2 * limits.active_parameters / (2048 * kappa))
    attention = 4 * layers * hidden
    ridge = 989e12 / 3.35e12
    assert round(2 * limits.active_parameters / (kappa * ridge - attention)) == h100


def test_eight_devices_share_a_small_llama(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra llm is not installed")
    folder = llama(tmp_path, hidden_size=1024, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4,
                   intermediate_size=4096, vocab_size=32000)  # fmt: skip
    one, eight = (
        predict(folder, device, mode="decode", sequence=512, max_batch_size=32) for device in ("h100", "8xh100")
    )
    exchanges = [layer for layer in eight.layers if layer.kind == "communication"]
    assert sum(layer.repeat for layer in exchanges) == 2 * 4
    assert one.weight_bytes is not None and eight.weight_bytes is not None
    assert eight.weight_bytes == pytest.approx(one.weight_bytes / 8, rel=0.01)
    # 4 heads of keys on 8 devices: the cache is cut in 4, so that each device holds a quarter.
    assert one.memory is not None and eight.memory is not None
    cache = 512 * 2 * 4 * 4 * 64 * 2
    prefill = predict(folder, "h100", mode="prefill", sequence=512, max_batch_size=2)
    assert prefill.memory is not None
    widest = max(3 * 4096, 1024 + 4096) * 512 * 2  # silu(gate)·up reads two and writes one
    assert prefill.memory.bytes_per_item == pytest.approx(cache + widest, rel=0.01)
    assert one.memory.bytes_per_item - eight.memory.bytes_per_item == pytest.approx(0.75 * cache, rel=0.1)


class Twice(nn.Module):
    """Two products and a sum that depends on nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.relu(self.first(x)))
        return result


def test_a_module_with_an_example() -> None:
    model = Twice()
    before = [parameter.clone() for parameter in model.parameters()]
    profile = microbatch.predict(model, "t4", example=torch.randn(3, 64), max_batch_size=64, name="twice", unit="cells")
    assert (profile.model, profile.unit, profile.dtype) == ("twice", "cells", "fp32")
    assert {layer.name for layer in profile.layers} >= {"first", "second"}
    point = profile.points[9]
    assert point.flops == pytest.approx(point.batch_size * (2 * 2 * 64 * 256 + 256), rel=0.01)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_a_module_alone_is_refused() -> None:
    with pytest.raises(InvalidModel, match="does not say what goes into it"):
        predict(Twice(), "t4")


def test_a_mode_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(InvalidSettings, match=r"no mode 'prefill'.*inference, training"):
        predict("mlp:depth=1,width=8", "t4", mode="prefill")


@pytest.mark.parametrize(("model", "mode"), [("mlp:depth=2,width=64", "training"), ("cnn", "inference")])
def test_memory_is_that_of_a_run_on_fake_tensors(model: str, mode: str) -> None:
    profile = predict(model, "a100", mode=mode, max_batch_size=64)
    loaded = load_model(model)
    with Workload(loaded.model, loaded.args, loaded.kwargs, mode=mode) as workload:
        expected = workload.predict_peak(64).peak_bytes
    assert profile.points[-1].predicted_peak_bytes == expected
    assert profile.prediction is not None
    assert "fake tensors" in profile.prediction.memory_method


def test_quantised_weights_are_smaller_and_read_faster() -> None:
    whole, packed = (
        predict("mlp:depth=2,width=512", works.plain("h100"), dtype="bf16", weights_dtype=stored, max_batch_size=8)
        for stored in (None, "int4")
    )
    assert whole.weight_bytes is not None and packed.weight_bytes is not None
    assert packed.weight_bytes == pytest.approx(whole.weight_bytes / 4, rel=0.01)
    assert packed.points[0].samples[0] < 0.3 * whole.points[0].samples[0]
    assert packed.prediction is not None
    assert packed.prediction.weight_dtype == "int4"


def test_a_mixture_of_experts_reads_the_experts_that_are_picked() -> None:
    profile = predict("moe", "h100", dtype="bf16", max_batch_size=256)
    moved = {point.batch_size: point.moved_bytes or 0.0 for point in profile.points}
    assert moved[256] > 1.5 * moved[1]
    assert profile.prediction is not None and profile.prediction.ridge_weights is not None
    assert profile.prediction.ridge_weights > 2 * 295
