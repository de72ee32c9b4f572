"""The public names are a promise: listed, sorted, loaded lazily, agreeing with what type checkers see."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import microbatch
from microbatch import errors

HEAVY = ("torch", "matplotlib", "numpy", "msgspec", "click", "rich")


def type_checking_imports(root: Path) -> dict[str, str]:
    """Name → module, as imported under ``if TYPE_CHECKING`` in the package's own file."""
    tree = ast.parse((root / "src/microbatch/__init__.py").read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def test_names_are_sorted_and_listed_once() -> None:
    assert microbatch.__all__ == sorted(set(microbatch.__all__))


def test_lazy_names_and_type_checkers_agree(root: Path) -> None:
    homes = vars(microbatch)["_HOMES"]
    assert type_checking_imports(root) == homes
    assert sorted(homes) == microbatch.__all__


def test_every_error_of_the_tree_is_public() -> None:
    tree = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert tree <= set(microbatch.__all__)


@pytest.mark.parametrize("name", microbatch.__all__)
def test_every_name_resolves_twice_and_is_documented(name: str) -> None:
    first, second = getattr(microbatch, name), getattr(microbatch, name)
    assert first is second
    assert first.__name__ == name
    assert len(inspect.getdoc(first) or "") > 20


@pytest.mark.parametrize("name", microbatch.__all__)
def test_no_name_is_also_a_module(name: str) -> None:
    assert importlib.util.find_spec(f"microbatch.{name}") is None


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'batch_size'"):
        _ = importlib.import_module("microbatch").batch_size
    assert set(microbatch.__all__) <= set(dir(microbatch))


def loaded_by(code: str) -> set[str]:
    """Which heavy packages a fresh interpreter has loaded after `code`."""
    report = f"{code}\nimport json, sys\nprint(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_package_loads_nothing() -> None:
    assert loaded_by("import microbatch") == set()


def test_the_probe_sees_what_is_loaded() -> None:
    assert loaded_by("import msgspec") == {"msgspec"}
