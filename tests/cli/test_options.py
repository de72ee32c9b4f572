"""Quantities and shapes on the command line, and what is checked before anything is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from microbatch.cli.app import run
from microbatch.cli.options import parse_gemm
from microbatch.cli.output import check_outputs, print_json
from microbatch.errors import InvalidQuantity, InvalidSettings


@pytest.mark.parametrize("text", ["4096x22016", "4096X22016", " 4096×22016 "])
def test_the_shape_of_a_weight(text: str) -> None:
    assert parse_gemm(text) == (4096, 22016)


@pytest.mark.parametrize("text", ["4096", "0x8", "x", "4096x", "4096x22016x2", "-1x2", "1.5x2"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(InvalidQuantity, match="KxN"):
        parse_gemm(text)


BAD_VALUES = (
    (["profile", "mlp", "--budget", "60"], "'60' is not a duration"),
    (["profile", "mlp", "--budget", "0s"], "above zero"),
    (["profile", "mlp", "--max-batch", "0"], "--max-batch"),
    (["profile", "mlp", "--max-batch", "many"], "--max-batch"),
    (["profile", "mlp", "--memory-limit", "8"], "'8' is not a size in bytes"),
    (["profile", "mlp", "--mode", "guessing"], "guessing"),
    (["profile", "mlp", "--threads", "0"], "--threads"),
    (["profile", "mlp", "--objective", "best"], "best"),
    (["profile", "mlp", "--latency-target", "soon"], "'soon' is not a duration"),
    (["profile"], "MODEL"),
    (["explain", "a.csv", "--gemm", "4096"], "KxN"),
    (["explain"], "CURVE"),
    (["compare", "a.json"], "AFTER"),
    (["compare", "a.json", "b.json", "--threshold", "0"], "--threshold"),
)


@pytest.mark.parametrize(("arguments", "says"), BAD_VALUES, ids=lambda value: " ".join(value) if value else "")
def test_a_bad_value_is_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert says in printed.err


@pytest.mark.parametrize("name", ["mlp.html", "mlp.json", "mlp.PNG", "mlp.svg", "mlp.txt", "mlp.csv"])
def test_a_file_that_can_be_written_passes(name: str, tmp_path: Path) -> None:
    check_outputs([tmp_path / name])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mlp.docx", "suffix '.docx'"),
        ("mlp", "no suffix"),
        ("nowhere/mlp.html", "does not exist"),
        (".", "is a folder"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_measuring(name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match=says) as caught:
        check_outputs([tmp_path / name])
    assert caught.value.remedy


def test_json_has_a_version_and_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"noise": float("nan"), "sizes": (1, 2)})
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, "noise": None, "sizes": [1, 2]}
