"""The table of breaks stays true: each row finds its place once, changes it, and names a test that exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import mutants
from scripts.mutant import Mutant
from scripts.mutants_table import MUTANTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.file.removeprefix('src/microbatch/')}: {m.breaks}")
def test_every_row_finds_its_place(mutant: Mutant, root: Path) -> None:
    assert (root / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1
    assert mutant.old != mutant.new
    assert (root / mutant.test.split("::")[0]).exists()


def test_every_room_is_in_the_table(root: Path) -> None:
    rooms = {path.parent.name for path in (root / "src" / "microbatch").glob("*/__init__.py")}
    assert rooms - {mutant.file.split("/")[2] for mutant in MUTANTS} == set()


def small_tree(folder: Path, test: str) -> Path:
    (folder / "src").mkdir()
    (folder / "src" / "double.py").write_text("def double(x: int) -> int:\n    return 2 * x\n")
    (folder / "test_double.py").write_text(f"from double import double\n\n\ndef test_double() -> None:\n    {test}\n")
    return folder


@pytest.mark.parametrize(("test", "verdict"), [("assert double(3) == 6", "red"), ("assert double(0) == 0", "SURVIVED")])
def test_a_break_is_seen_or_survives(test: str, verdict: str, tmp_path: Path) -> None:
    tree = small_tree(tmp_path, test)
    mutant = Mutant("src/double.py", "2 * x", "3 * x", "test_double.py", "doubling")
    assert mutants.judge(tree, mutant) == verdict
    assert "2 * x" in (tree / "src" / "double.py").read_text()


def test_a_row_that_finds_nothing_is_told(tmp_path: Path) -> None:
    tree = small_tree(tmp_path, "assert double(3) == 6")
    row = Mutant("src/double.py", "4 * x", "3 * x", "test_double.py", "doubling")
    assert mutants.judge(tree, row).startswith("ROW IS WRONG")
