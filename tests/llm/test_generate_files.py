"""Files of prompts and answers: bad lines by number, and a run that goes on wherever the one before was ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from microbatch.errors import InvalidSettings
from microbatch.llm.answer_file import AnswerFile
from microbatch.llm.prompt_file import PromptLine, read_prompts

COMMON = {"max_tokens": 8, "temperature": 0.0}


def prompts(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.fixture
def lines(tmp_path: Path) -> list[PromptLine]:
    return read_prompts(prompts(tmp_path / "in.jsonl", *({"prompt": f"p{i}"} for i in range(4))), COMMON, "m")


def answer(number: int) -> dict[str, Any]:
    return {"text": f"höchst {number}\n\u2028", "usage": {"completion_tokens": number}}


def test_every_form_of_a_line(tmp_path: Path) -> None:
    path = prompts(
        tmp_path / "in.jsonl", '"text"', [1, 2], "", {"prompt": "a", "max_tokens": 3, "stop": "x", "id": "q1"},
        {"messages": [{"role": "user", "content": "hi"}], "logit_bias": {"5": -1}},
    )  # fmt: skip
    found = read_prompts(path, COMMON, "m")
    assert [line.number for line in found] == [1, 2, 4, 5]
    assert [line.prompt for line in found] == ["text", (1, 2), "a", None]
    assert found[2].name == "q1" and found[2].params(COMMON).max_tokens == 3 and found[2].params(COMMON).stop == ("x",)
    assert found[3].messages is not None and found[3].params(COMMON).logit_bias == {5: -1.0}
    assert found[0].params(COMMON).max_tokens == 8


BAD = [
    ("{", "no JSON"),
    ("7", "neither a prompt nor messages"),
    ('{"prompt": "a", "messages": []}', "neither a prompt nor messages, or both"),
    ('{"prompt": ""}', "empty"),
    ('{"prompt": [true]}', "no list of token ids"),
    ('{"messages": ["hi"]}', "no list of objects"),
    ('{"prompt": "a", "max_token": 3}', "unknown key 'max_token'"),
    ('{"prompt": "a", "max_tokens": 0}', "max_tokens"),
    ('{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias"),
    ('{"prompt": "a", "stop": 7}', "stop"),
]


@pytest.mark.parametrize(("line", "said"), BAD)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str, said: str) -> None:
    path = prompts(tmp_path / "in.jsonl", {"prompt": "a"}, line)
    with pytest.raises(InvalidSettings, match=f"line 2: .*{said}"):
        read_prompts(path, COMMON, "m")


def test_all_bad_lines_are_told_at_once(tmp_path: Path) -> None:
    path = prompts(tmp_path / "in.jsonl", *["{"] * 12, '"good"')
    with pytest.raises(InvalidSettings, match=r"12 bad lines: line 1: .*line 10: .*and 2 more"):
        read_prompts(path, COMMON, "m")


def written(path: Path, lines: list[PromptLine], order: list[int]) -> bytes:
    with AnswerFile(path, lines) as answers:
        for place in order:
            answers.add(lines[place], answer(lines[place].number))
    return path.read_bytes()


def test_a_run_goes_on_from_every_byte(tmp_path: Path, lines: list[PromptLine]) -> None:
    whole = written(tmp_path / "whole.jsonl", lines, [2, 0, 3, 1])
    with AnswerFile(tmp_path / "whole.jsonl", lines) as answers:
        answers.finish()
    final = (tmp_path / "whole.jsonl").read_bytes()
    assert [json.loads(row)["line"] for row in final.splitlines()] == [1, 2, 3, 4]
    for end in range(len(whole) + 1):
        path = tmp_path / "torn.jsonl"
        path.write_bytes(whole[:end])
        with AnswerFile(path, lines) as answers:
            assert len(answers.answered) == whole[:end].count(b"\n")
            for line in lines:
                if line.number not in answers.answered:
                    answers.add(line, answer(line.number))
            answers.finish()
        assert path.read_bytes() == final


def test_answers_of_other_prompts_are_not_mixed_in(tmp_path: Path, lines: list[PromptLine]) -> None:
    written(tmp_path / "out.jsonl", lines, [0])
    changed = read_prompts(prompts(tmp_path / "in.jsonl", *({"prompt": f"p{i}"} for i in range(4))), {"seed": 3}, "m")
    with pytest.raises(InvalidSettings, match=r"Row 1 of .*out.jsonl answers line 1 of other prompts"):
        AnswerFile(tmp_path / "out.jsonl", changed)


@pytest.mark.parametrize("content", [b"dear diary\n", b"dear diary", b"[1]\n", b'{"line": 1}\n'])
def test_a_file_of_something_else_stays_as_it_is(tmp_path: Path, lines: list[PromptLine], content: bytes) -> None:
    path = tmp_path / "diary.jsonl"
    path.write_bytes(content)
    with pytest.raises(InvalidSettings, match="diary"):
        AnswerFile(path, lines)
    assert path.read_bytes() == content


def test_a_line_that_failed_is_tried_again(tmp_path: Path, lines: list[PromptLine]) -> None:
    path = tmp_path / "out.jsonl"
    with AnswerFile(path, lines) as answers:
        answers.add(lines[1], {"error": {"type": "ModelFailed", "message": "no"}})
        answers.add(lines[0], answer(1))
        answers.finish()
    with AnswerFile(path, lines) as answers:
        assert answers.answered == {1}
        answers.add(lines[1], answer(2))
        answers.finish()
    rows = [json.loads(row) for row in path.read_bytes().splitlines()]
    assert [row["line"] for row in rows] == [1, 2] and "error" not in rows[1]


@pytest.fixture(autouse=True)
def _nothing_is_left_beside(tmp_path: Path) -> Iterator[None]:
    yield
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
