"""``make mutants``: break the code at each listed place, one at a time, and see that a test turns red for each.

The breaks are made in a copy of the tree; the working tree is never touched. A word after the command keeps only the
rows whose file contains it: ``python -m scripts.mutants units``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.mutant import Mutant
from scripts.mutants_table import MUTANTS

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(
    ".venv", ".git", "__pycache__", ".*_cache", ".hypothesis", "_build", ".envs", "report"
)
GREEN, RED = 0, 1
"""Exit statuses of pytest; any other means that the tests could not be run."""
LONGEST = 180.0
"""Seconds for the tests of one row. A break that makes the code hang is seen as well as one that makes it wrong."""


def main(words: Sequence[str]) -> int:
    """Run the table and print it; 1 when a break survives."""
    rows = [mutant for mutant in MUTANTS if all(word in mutant.file for word in words)]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
        for test in sorted({mutant.test for mutant in rows}):
            if run_tests(tree, [test], LONGEST) != GREEN:
                print(f"{test} is not green before anything is broken; run make test first.")
                return 1
        verdicts = [report(mutant, judge(tree, mutant)) for mutant in rows]
    survived = verdicts.count(False)
    print(f"{len(verdicts)} breaks, {len(verdicts) - survived} seen, {survived} survived")
    return 1 if survived else 0


def judge(tree: Path, mutant: Mutant) -> str:
    """Break one place, run its test, put the place back. Answers red, hangs, SURVIVED or why the row is wrong."""
    path = tree / mutant.file
    whole = path.read_text(encoding="utf-8")
    if whole.count(mutant.old) != 1:
        return f"ROW IS WRONG: its text occurs {whole.count(mutant.old)} times"
    path.write_text(whole.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        status = run_tests(tree, [mutant.test], LONGEST)
    finally:
        path.write_text(whole, encoding="utf-8")
    return {RED: "red", GREEN: "SURVIVED", None: "hangs"}.get(status, f"ROW IS WRONG: pytest ended with {status}")


def run_tests(tree: Path, tests: Sequence[str], limit: float) -> int | None:
    """Exit status of pytest in the copied tree; None when it took longer than the limit."""
    data = ROOT.parent / "shared" / "data"
    here = {"MICROBATCH_DATA": str(data)} if data.is_dir() else {}
    environment = here | os.environ | {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1", "CI": "true"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    try:
        return subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, timeout=limit, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return None


def report(mutant: Mutant, verdict: str) -> bool:
    """Print one row as soon as it is known; whether the break was seen."""
    seen = verdict in ("red", "hangs")
    print(f"{verdict:<9} {mutant.file.removeprefix('src/microbatch/'):<28} {mutant.breaks}", flush=True)
    return seen


if __name__ == "__main__":
    started = time.monotonic()
    status = main(sys.argv[1:])
    print(f"{time.monotonic() - started:.0f} s")
    sys.exit(status)
