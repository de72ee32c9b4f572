"""GGUF files as Hugging Face folders: the same logits, whole or nothing, and clear refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from microbatch.errors import InvalidModel, InvalidSettings
from microbatch.models import convert as convert_module
from microbatch.models.convert import convert
from microbatch.models.load import load_model
from tests.models.tiny import CAUSAL, SHARED, Tiny, write_folder
from tests.models.tiny_gguf import Type, write_gguf, write_out

LLAMA = CAUSAL["llama"]
WIDE = {**SHARED, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
"""Rows of whole blocks of 32, as the quantised types need."""


def model_of(folder: Path, tiny: Tiny, **more: object) -> Any:
    """With random weights in which nothing is left at one or zero."""
    model = load_model(write_folder(folder, tiny, **more), weights="random", dtype="fp32").model
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def logits(model: Any) -> torch.Tensor:
    tokens = torch.randint(2, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found: torch.Tensor = model.double()(input_ids=tokens).logits
    return found


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The difference relative to the spread of the logits."""
    return float((found - expected).std() / expected.std())


@pytest.mark.parametrize(
    ("tiny", "architecture", "permute", "more"),
    [
        (LLAMA, "llama", True, {}),
        (LLAMA, "llama", True, {"tie_word_embeddings": True, "head_dim": 16}),
        (LLAMA, "llama", True, {"num_key_value_heads": 4, "rope_theta": 500000.0, "rms_norm_eps": 1e-5}),
        (Tiny("MistralForCausalLM", "mistral", SHARED), "llama", True, {"sliding_window": None, "head_dim": 8}),
        (Tiny("Qwen2ForCausalLM", "qwen2", SHARED), "qwen2", False, {"head_dim": 8}),
        (Tiny("Qwen3ForCausalLM", "qwen3", SHARED), "qwen3", False, {"head_dim": 16}),
    ],
)
def test_fp32_files_give_the_same_logits(
    tmp_path: Path, tiny: Tiny, architecture: str, permute: bool, more: dict[str, object]
) -> None:
    model = model_of(tmp_path / "before", tiny, **more)
    file = write_gguf(tmp_path / "model.gguf", model, architecture, permute=permute)
    done = convert(file, tmp_path / "after")
    loaded = load_model(done.path, dtype="fp64")
    assert loaded.notes == () and done.dtype == "fp32"
    assert done.parameters == sum(parameter.numel() for parameter in model.parameters())
    torch.testing.assert_close(logits(loaded.model), logits(model), rtol=0, atol=1e-12)


def steps(blocks: torch.Tensor, kind: Type) -> torch.Tensor:
    """How far a number may move, for each block of 32: half a step of the type, or a whole one at an end cut off."""
    largest, spread = blocks.abs().amax(-1), blocks.amax(-1) - blocks.amin(-1)
    return {
        Type.F16: largest * 2**-11,
        Type.BF16: largest * 2**-8,
        Type.Q8_0: largest / 127 / 2,
        Type.Q5_1: spread / 31 / 2,
        Type.Q5_0: largest / 16,
        Type.Q4_1: spread / 15 / 2,
        Type.Q4_0: largest / 8,
    }[kind]


@pytest.mark.parametrize(
    "kind", [Type.F16, Type.BF16, Type.Q8_0, Type.Q5_1, Type.Q5_0, Type.Q4_1, Type.Q4_0], ids=lambda kind: kind.name
)
def test_quantised_files_are_within_their_quantisation(tmp_path: Path, kind: Type) -> None:
    model = model_of(tmp_path / "before", Tiny("LlamaForCausalLM", "llama", WIDE))
    file = write_gguf(tmp_path / "model.gguf", model, "llama", kind=kind, permute=True)
    done = convert(file, tmp_path / "after")
    assert done.dtype == ("bf16" if kind is Type.BF16 else "fp16")
    assert next(iter(done.quantisation)) == kind.name
    converted = load_model(done.path, dtype="fp64").model
    found = converted.state_dict()
    for name, value in model.state_dict().items():
        blocks = value.double().reshape(-1, 32)
        moved = (found[name].reshape(-1, 32) - blocks).abs().amax(-1)
        scales_and_16_bits = blocks.abs().amax(-1) * 2**-9
        allowed = steps(blocks, kind if value.dim() > 1 else Type.BF16 if kind is Type.BF16 else Type.F16)
        assert (moved <= allowed + scales_and_16_bits).all(), name
    if kind in (Type.F16, Type.Q8_0):
        assert far(logits(converted), logits(model)) < (0.005 if kind is Type.F16 else 0.05)


def q4_k(block: bytes) -> np.ndarray[Any, np.dtype[np.float64]]:
    """256 numbers of Q4_K: ggml-quants.c, dequantize_row_q4_K with get_scale_min_k4."""
    d, dmin = np.frombuffer(block[:4], np.float16).astype(np.float64)
    packed, nibbles = np.frombuffer(block[4:16], np.uint8), np.frombuffer(block[16:], np.uint8).reshape(4, 32)

    def scale_and_least(j: int) -> tuple[int, int]:
        if j < 4:
            return int(packed[j]) & 63, int(packed[j + 4]) & 63
        scale = (int(packed[j + 4]) & 15) | ((int(packed[j - 4]) >> 6) << 4)
        return scale, (int(packed[j + 4]) >> 4) | ((int(packed[j]) >> 6) << 4)

    values = []
    for group in range(8):
        scale, least = scale_and_least(group)
        quants = nibbles[group // 2] & 15 if group % 2 == 0 else nibbles[group // 2] >> 4
        values.append(d * scale * quants - dmin * least)
    return np.concatenate(values)


def q6_k(block: bytes) -> np.ndarray[Any, np.dtype[np.float64]]:
    """256 numbers of Q6_K: ggml-quants.c, dequantize_row_q6_K."""
    low, high = np.frombuffer(block[:128], np.uint8), np.frombuffer(block[128:192], np.uint8)
    scales, d = np.frombuffer(block[192:208], np.int8), np.frombuffer(block[208:], np.float16).astype(np.float64)[0]
    values = np.empty(256)
    for half in range(2):
        for number in range(32):
            nibbles, bits = low[64 * half :], int(high[32 * half + number])
            for part in range(4):
                nibble = int(nibbles[number + 32 * (part % 2)]) >> (4 * (part // 2)) & 15
                quant = (nibble | ((bits >> (2 * part)) & 3) << 4) - 32
                values[128 * half + 32 * part + number] = d * scales[8 * half + 2 * part + number // 16] * quant
    return values


@pytest.mark.parametrize(("kind", "size", "plain"), [(Type.Q4_K, 144, q4_k), (Type.Q6_K, 210, q6_k)])
def test_k_quants_are_read_as_ggml_defines_them(tmp_path: Path, kind: Type, size: int, plain: Any) -> None:
    settings = {**SHARED, "hidden_size": 256, "head_dim": 64, "vocab_size": 8, "tie_word_embeddings": True}
    model = model_of(tmp_path / "before", Tiny("LlamaForCausalLM", "llama", settings))
    file = write_gguf(tmp_path / "plain.gguf", model, "llama", permute=True)
    rows = np.random.default_rng(0).integers(0, 60, (8, size), dtype=np.uint8)  # bytes whose fp16 scales are small
    reader, writer = gguf.GGUFReader(file), gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    for field in reader.fields.values():
        if field.name.startswith("llama."):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        if tensor.name == "token_embd.weight":
            writer.add_tensor(tensor.name, rows, raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    write_out(writer)
    done = convert(tmp_path / "k.gguf", tmp_path / "after", dtype="fp32")
    found = load_file(Path(done.path) / "model.safetensors")["model.embed_tokens.weight"].double().numpy()
    np.testing.assert_allclose(found, np.stack([plain(row.tobytes()) for row in rows]), rtol=1e-6)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    model = model_of(tmp_path / "before", LLAMA)
    return write_gguf(tmp_path / "model.gguf", model, "llama", permute=True, vocabulary=True)


def test_the_tokenizer_comes_along(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    def fetched(*_: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("socket.socket.connect", fetched)
    done = convert(file, tmp_path / "after")
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(done.files)
    assert done.notes == ()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "after")
    vocabulary = tokenizer.get_vocab()
    assert tokenizer.encode("abc", add_special_tokens=False) == [vocabulary["ab"], vocabulary["c"]]
    assert json.loads((tmp_path / "after" / "config.json").read_text())["eos_token_id"] == 1


def test_a_file_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", model_of(tmp_path / "before", LLAMA), "llama", permute=True)
    assert "no tokenizer" in convert(file, tmp_path / "after").notes[0]


def test_large_weights_are_cut_into_files(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = convert(file, tmp_path / "whole")
    monkeypatch.setattr(convert_module, "LARGEST_SHARD", 20_000)
    done = convert(file, tmp_path / "cut")
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    shards = sorted((tmp_path / "cut").glob("model-*.safetensors"))
    assert len(shards) > 2 and set(index["weight_map"].values()) == {shard.name for shard in shards}
    assert index["metadata"]["total_size"] == done.bytes == whole.bytes
    assert all(sum(t.numel() * 4 for t in load_file(shard).values()) <= 20_000 for shard in shards)
    one, many = load_model(whole.path).model.state_dict(), load_model(done.path).model.state_dict()
    assert all(torch.equal(many[name], value) for name, value in one.items())


def test_progress_and_an_empty_folder(tmp_path: Path, file: Path) -> None:
    (tmp_path / "after").mkdir()
    said: list[tuple[float, str]] = []
    convert(file, tmp_path / "after", progress=lambda share, text: said.append((share, text)))
    assert said[-1][0] == 1.0 and [share for share, _ in said] == sorted(share for share, _ in said)


def changed(file: Path, target: Path, **fields: object) -> Path:
    """The same metadata and tensors with some of them changed; a tensor of None is left out."""
    reader = gguf.GGUFReader(file)
    architecture = str(fields.pop("architecture", "llama"))
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("llama."):
            value = fields.get(field.name.replace(".", "_"), field.contents())
            if value is not None:
                writer.add_key_value(field.name.replace("llama", architecture), value, field.types[0])
    if "split" in fields:
        writer.add_uint16("split.count", 3)
    for tensor in reader.tensors:
        if fields.get("without") != tensor.name:
            writer.add_tensor(str(fields.get(tensor.name, tensor.name)), tensor.data, raw_dtype=tensor.tensor_type)
    write_out(writer)
    return target


BROKEN: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "another architecture": ({"architecture": "rwkv7"}, ("architecture 'rwkv7'", "Known: llama, qwen2")),
    "one of several parts": ({"split": True}, ("one of 3 parts", "--merge")),
    "a weight less": ({"without": "blk.1.ffn_up.weight"}, ("model.layers.1.mlp.up_proj.weight", "is not there")),
    "a weight unknown": (
        {"blk.1.ffn_up.weight": "blk.1.ffn_sideways.weight"},
        ("blk.1.ffn_sideways.weight", "no place"),
    ),
    "a weight of another size": ({"llama_feed_forward_length": 64}, ("mlp.gate_proj.weight should be (64, 32)",)),
    "metadata less": ({"llama_context_length": None}, ("lacks the metadata 'context_length'",)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_does_not_fit_is_one_clear_line(tmp_path: Path, file: Path, name: str) -> None:
    fields, words = BROKEN[name]
    broken = changed(file, tmp_path / "broken.gguf", **fields)
    with pytest.raises(InvalidModel) as caught:
        convert(broken, tmp_path / "after")
    message = str(caught.value)
    assert "\n" not in message and caught.value.remedy
    assert all(word in message for word in words), message
    assert leftovers(tmp_path) == []


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith((".after", "after"))]


@pytest.mark.parametrize("share", [0.001, 0.02, 0.2, 0.5, 0.99])
def test_a_cut_off_file_is_one_clear_line(tmp_path: Path, file: Path, share: float) -> None:
    data = file.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: max(5, int(len(data) * share))])
    with pytest.raises(InvalidModel, match="is cut off or broken"):
        convert(tmp_path / "cut.gguf", tmp_path / "after")
    assert leftovers(tmp_path) == []


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("not a model")
    with pytest.raises(InvalidModel, match=r"no GGUF file: it begins with b'not '"):
        convert(tmp_path / "text.gguf", tmp_path / "after")
    with pytest.raises(InvalidModel, match="no file"):
        convert(tmp_path / "missing.gguf", tmp_path / "after")


def test_the_target_must_be_free(tmp_path: Path, file: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("mine")
    for target, words in ((full, "not empty"), (file, "is a file"), (tmp_path / "no" / "such", "does not exist")):
        with pytest.raises(InvalidSettings, match=words):
            convert(file, target)
    assert [path.name for path in full.iterdir()] == ["mine.txt"]


def test_too_little_room_is_told_beforehand(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage)
    with pytest.raises(InvalidSettings, match="has 1 kB left"):
        convert(file, tmp_path / "after")
    assert leftovers(tmp_path) == []


class Stopped(BaseException):
    """As KeyboardInterrupt, which pytest takes for itself."""


def test_an_interrupt_leaves_nothing(tmp_path: Path, file: Path) -> None:
    seen: Iterator[int] = iter(range(100))

    def stop(*_: object) -> None:
        if next(seen) == 5:
            raise Stopped

    with pytest.raises(Stopped):
        convert(file, tmp_path / "after", progress=stop)
    assert leftovers(tmp_path) == []
