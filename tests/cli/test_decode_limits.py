"""The two limits of continuous batching that a profile in decode mode of a folder prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from microbatch.cli.commands.profile import command
from microbatch.cli.decode_limits import DecodeLimits, decode_limits
from microbatch.errors import NoAnswer
from microbatch.models.hugging_face import import_transformers
from tests.models.tiny import SHARED

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with weights."""
    transformers: Any = import_transformers("The test")
    target = tmp_path_factory.mktemp("tiny") / "llama"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHARED)).save_pretrained(target)
    return target


def limits(folder: Path, **changed: Any) -> DecodeLimits:
    settings: dict[str, Any] = {
        "dtype": "fp32", "device": "cpu", "context": 32, "memory_limit": None, "target": None,
    }  # fmt: skip
    return decode_limits(folder, **(settings | changed))


def test_without_a_target_there_are_both_limits(folder: Path) -> None:
    found = limits(folder)
    assert found.found is not None, found.reason
    assert 1 <= found.found.max_sequences <= found.found.max_tokens
    assert f"max_num_sequences={found.found.max_sequences}" in str(found) and "best throughput" in str(found)


def test_a_target_of_a_minute_is_limited_by_something_else_and_one_of_a_nanosecond_by_nothing(folder: Path) -> None:
    wide = limits(folder, target=60.0)
    assert wide.found is not None and wide.found.limited_by == "memory"  # 128 sequences are the most of an engine
    none = limits(folder, target=1e-9)
    assert none.found is None and none.to_json()["max_num_sequences"] is None
    assert "target" in none.reason


def test_a_folder_that_is_no_language_model_gives_a_reason(tmp_path: Path) -> None:
    assert limits(tmp_path).found is None
    assert limits(tmp_path).reason


def test_the_command_prints_them(folder: Path) -> None:
    options = ["--mode", "decode", "--context", "16", "--budget", "1s", "--max-batch", "4"]
    for _ in range(3):
        said = CliRunner().invoke(command, [str(folder), *options, "--json"])
        if not isinstance(said.exception, NoAnswer):
            break
    else:
        pytest.skip(f"this machine is too noisy now: {said.exception}")
    assert said.exit_code == 0, said.exception
    document = json.loads(said.stdout)
    assert document["decode_limits"]["max_num_tokens"] >= document["decode_limits"]["max_num_sequences"] >= 1
    assert document["decode_limits"]["context"] == 16
