"""`microbatch generate`: answers to a file, and a run that goes on."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree

import pytest

from microbatch.cli.app import run
from tests.llm.engines import TEXT, model_of, tokenizer_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    copytree(tokenizer_folder(), folder)
    model_of(TEXT).save_pretrained(folder)
    return folder


LINES = ['{"prompt": "one", "id": "a"}', '"two"', '{"messages": [{"role": "user", "content": "hi"}], "n": 2}',
         '{"prompt": [5, 6, 7], "max_tokens": 3, "logprobs": 1}']  # fmt: skip


def test_answers_are_written_and_a_run_goes_on(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("\n".join(LINES) + "\n")
    command = ["generate", str(model), str(prompts), "--out", str(out), "--max-tokens", "6", "--json"]
    assert run(command) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["prompts"], said["answered"], said["answered_before"], said["failed"]) == (4, 4, 0, [])
    whole = out.read_bytes()
    rows = [json.loads(row) for row in whole.splitlines()]
    assert [row["line"] for row in rows] == [1, 2, 3, 4] and rows[0]["id"] == "a"
    assert len(rows[2]["completions"]) == 2 and rows[3]["usage"]["completion_tokens"] <= 3
    assert rows[3]["completions"][0]["logprobs"]

    out.write_bytes(whole[: whole.index(b"\n") + 20])  # killed in the middle of the second answer
    assert run(command) == 0
    assert json.loads(capsys.readouterr().out)["answered_before"] == 1
    again = [json.loads(row) for row in out.read_bytes().splitlines()]
    assert [(row["line"], row["text"]) for row in again] == [(row["line"], row["text"]) for row in rows]
    whole = out.read_bytes()
    assert run(command[:-1]) == 0
    assert "4 of 4 answers, 4 of them by an earlier run; 0 tokens" in capsys.readouterr().out

    assert run([*command[:-1], "--temperature", "0.5"]) == 2
    assert "other settings" in capsys.readouterr().err
    assert out.read_bytes() == whole


def test_what_fails_is_said_by_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('"good"\n{"prompt": [5], "max_tokens": 999}\n')
    assert run(["generate", str(model), str(prompts), "--out", str(out), "--max-tokens", "4"]) == 1
    assert "line 2: 1 tokens of prompt and 999 of answer" in capsys.readouterr().out
    assert [sorted(set(json.loads(row)) & {"text", "error"}) for row in out.read_text().splitlines()] == [
        ["text"],
        ["error"],
    ]


def test_bad_lines_are_named_before_a_model_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('"good"\n{"promt": "x"}\n\n{\n')
    assert run(["generate", "nowhere", str(prompts), "--out", str(tmp_path / "out.jsonl")]) == 2
    said = capsys.readouterr().err
    assert "2 bad lines" in said and "line 2: " in said and "line 4: no JSON" in said
    assert not (tmp_path / "out.jsonl").exists()
