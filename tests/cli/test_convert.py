"""``microbatch convert`` on a tiny file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from microbatch.cli.app import run
from tests.models.test_convert import LLAMA, model_of
from tests.models.tiny_gguf import write_gguf


@pytest.fixture
def file(tmp_path: Path) -> Path:
    model = model_of(tmp_path / "before", LLAMA)
    return write_gguf(tmp_path / "model.gguf", model, "llama", permute=True, vocabulary=True)


def test_text_says_what_was_written(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", str(file), str(tmp_path / "after"), "--dtype", "bf16"]) == 0
    printed = capsys.readouterr()
    assert "LlamaForCausalLM" in printed.out and "as bf16" in printed.out and "model.safetensors" in printed.out
    assert printed.err == ""
    assert (tmp_path / "after" / "config.json").is_file()


def test_json_is_one_document(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", str(file), str(tmp_path / "after"), "--json"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert printed.err == ""
    assert document["architecture"] == "LlamaForCausalLM" and document["dtype"] == "fp32"
    assert document["parameters"] > 0 and document["quantisation"] == {"F32": document["parameters"]}


def test_a_refusal_is_one_line_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.gguf").write_text("not a model")
    assert run(["convert", str(tmp_path / "text.gguf"), str(tmp_path / "after")]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and "no GGUF file" in printed.err
    assert not (tmp_path / "after").exists()
