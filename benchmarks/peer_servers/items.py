"""What is asked: rows of numbers for the MLP, and for MiniLM docstrings of Python's own standard library."""

from __future__ import annotations

import ast
import random
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.peer_servers.callables import INPUT

COUNT = 512
"""Items, sent in turn."""
SOURCE = "docstrings of modules, classes and functions of Python's standard library, drawn at random"


@cache
def rows() -> list[Any]:
    """Rows of numbers."""
    draw = random.Random(0)
    return [[round(draw.gauss(0, 1), 4) for _ in range(INPUT)] for _ in range(COUNT)]


@cache
def texts() -> list[Any]:
    """Texts from one word to several pages, the same for the same version of Python."""
    return random.Random(0).sample(sorted(set(_docstrings(Path(sysconfig.get_path("stdlib"))))), COUNT)


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

ITEMS: dict[str, Callable[[], list[Any]]] = {"mlp": rows, "minilm": texts}


def _docstrings(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.py")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old spellings in old modules
            tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
                yield text
