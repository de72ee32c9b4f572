"""``microbatch compare``: exit status 1 is for CI."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from microbatch.cli.app import run
from tests.cli.examples import CSV


@pytest.fixture
def before(tmp_path: Path) -> str:
    (tmp_path / "before.csv").write_text(CSV)
    return str(tmp_path / "before.csv")


def slower(path: Path, factor: float) -> str:
    """The same curve with every time multiplied."""
    header, *rows = CSV.splitlines()
    pairs = [row.split(",") for row in rows]
    path.write_text("\n".join([header, *(f"{size},{float(seconds) * factor}" for size, seconds in pairs)]) + "\n")
    return str(path)


def test_a_profile_does_not_regress_against_itself(before: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", before, before]) == 0
    assert "No size is slower" in capsys.readouterr().out


def test_a_regression_exits_with_1(before: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after = slower(tmp_path / "after.csv", 1.3)
    assert run(["compare", before, after, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["improvements"] == []
    assert {round(change["ratio"], 2) for change in document["regressions"]} == {1.3}


def test_an_improvement_exits_with_0(before: str, tmp_path: Path) -> None:
    assert run(["compare", before, slower(tmp_path / "after.csv", 0.7)]) == 0


def test_a_threshold_decides_what_counts(before: str, tmp_path: Path) -> None:
    after = slower(tmp_path / "after.csv", 1.3)
    assert run(["compare", before, after, "--threshold", "0.5"]) == 0


def test_a_missing_file_is_one_line(before: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", before, "nowhere.json"]) == 2
    printed = capsys.readouterr()
    assert "nowhere.json" in printed.err
    assert printed.err.count("\n") == 1
