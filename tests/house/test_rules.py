"""The rules of the house that a reader of the source can check: sizes, printing, names, floors."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

LONGEST_FUNCTION = 80
LONGEST_FILE = 500
FOLDERS = ("src", "tests", "scripts", "benchmarks")
VAGUE = {"util", "utils", "helper", "helpers", "common", "misc", "manager", "factory", "registry", "base"}


@cache
def python_files(root: Path, *folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((root / folder).rglob("*.py")) if ".envs" not in path.parts]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", autouse=True)
def _no_trees_left() -> Iterator[None]:
    """Hundreds of thousands of nodes would slow down whatever runs after."""
    yield
    tree_of.cache_clear()


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_no_function_is_longer_than_a_reader_can_hold(root: Path) -> None:
    too_long = [
        f"{path.relative_to(root)}:{node.lineno} {node.name} has {length} lines"
        for path in python_files(root, *FOLDERS)
        for node in functions(path)
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > LONGEST_FUNCTION
    ]
    assert too_long == []


def test_no_file_is_longer_than_a_reader_can_hold(root: Path) -> None:
    lengths = {str(p.relative_to(root)): len(p.read_text().splitlines()) for p in python_files(root, *FOLDERS)}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE} == {}


def test_only_the_command_line_prints(root: Path) -> None:
    calls = [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in python_files(root, "src")
        if "cli" not in path.parts
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.stdout.write", "sys.stderr.write")
    ]
    assert calls == []


def test_no_file_has_a_name_that_says_nothing(root: Path) -> None:
    source = root / "src" / "microbatch"
    names = {part for path in source.rglob("*") for part in path.relative_to(source).with_suffix("").parts}
    assert names & VAGUE == set()


def test_no_public_function_swallows_keywords(root: Path) -> None:
    swallowing = [
        f"{path.relative_to(root)}:{node.lineno} {node.name}"
        for path in python_files(root, "src")
        for node in functions(path)
        if node.args.kwarg is not None
        and not node.name.startswith("_")
        # A call that is passed on whole, as a wrapper or a module's forward does, swallows nothing.
        and not re.search(rf"\*\*{node.args.kwarg.arg}\b", ast.unparse(ast.Module(node.body, [])))
    ]
    assert swallowing == []


def test_every_module_says_what_it_is_for(root: Path) -> None:
    silent = [
        str(path.relative_to(root))
        for path in python_files(root, *FOLDERS)
        if path.read_text().strip() and not ast.get_docstring(tree_of(path))
    ]
    assert silent == []


def test_no_path_of_one_machine_is_written_down(root: Path) -> None:
    of_one_machine = re.compile(r"(?<![\w.])/(?:home|root|Users|work|mnt)/\w")
    texts = [
        p for p in [*root.glob("*.*"), *(root / "docs").rglob("*.md"), *python_files(root, *FOLDERS)] if p.is_file()
    ]
    found = [
        f"{path.relative_to(root)}:{number}"
        for path in texts
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if of_one_machine.search(line)
    ]
    assert found == []


def test_the_version_is_written_once(root: Path) -> None:
    import microbatch

    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert project["version"] == microbatch.__version__
    assert f"## {microbatch.__version__}" in (root / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_dependency_is_pinned_and_has_its_reason(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(w for extra in project["optional-dependencies"].values() for w in extra)]
    names = {re.split(r"[<>=\[]", requirement)[0].lower() for requirement in wanted}
    pinned = {
        line.split("==")[0].lower() for line in (root / "constraints.txt").read_text().splitlines() if "==" in line
    }
    reasons = (root / "docs" / "dependencies.md").read_text(encoding="utf-8").lower()
    assert names - pinned == set()
    assert {name for name in names if f"`{name}`" not in reasons} == set()


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        "import sys; from importlinter.cli import lint_imports_command as c; sys.exit(c())",
    ]
    return subprocess.run(
        [*command, "--no-cache"],
        cwd=folder,
        env={"PYTHONPATH": "src"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_imports_go_down_only(root: Path) -> None:
    done = lint_imports(root)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("curves/profile.py", "from microbatch.hardware import catalogue"),
        ("curves/fit.py", "import torch"),
        ("units.py", "import numpy"),
        ("measure/timer.py", "import microbatch.reporting.text"),
    ],
)
def test_an_import_that_goes_up_is_seen(root: Path, tmp_path: Path, file: str, line: str) -> None:
    shutil.copy(root / "pyproject.toml", tmp_path)
    shutil.copytree(root / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path / "src" / "microbatch" / file
    target.write_text(f"{target.read_text(encoding='utf-8')}\n{line}\n", encoding="utf-8")
    done = lint_imports(tmp_path)
    assert done.returncode == 1, done.stdout
    assert "BROKEN" in done.stdout
