"""What ``file.py:name`` or ``package.module:name`` stands for: any object of a user's own code. Loads no torch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from microbatch.errors import InvalidModel
from microbatch.models.spelling import nearest


def is_named(text: str) -> bool:
    """``file.py:name`` or ``package.module:name``; ``mpl:depth=8`` is a built-in model misspelt."""
    place, colon, name = text.rpartition(":")
    return bool(colon) and name.isidentifier() and (place.endswith(".py") or place.replace(".", "a").isidentifier())


def named_object(text: str) -> Any:
    """The object that `text` names; its file or module is run as an import would.

    Raises:
        InvalidModel: there is no such file, module or name, or its code raised.
    """
    place, _, name = text.rpartition(":")
    module = _run_file(Path(place)) if place.endswith(".py") else _import(place)
    found = getattr(module, name, None)
    if found is None:
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise InvalidModel(f"{place} has no callable {name!r}.", nearest(name, known) if known else "It defines none.")
    return found


def attempt(run: Callable[[], Any], what: str, did: str) -> Any:
    """What `run` returns.

    Raises:
        InvalidModel: it raised; said of `what`, which `did` so.
    """
    try:
        return run()
    except Exception as error:
        lines = str(error).splitlines() or [""]
        raise InvalidModel(f"{what} {did} {type(error).__name__}: {lines[0]}", "Fix it, then run again.") from error


def _run_file(path: Path) -> ModuleType:
    """Runs a file as an import would, its own folder importable as it is for ``python file.py``."""
    if not path.is_file():
        raise InvalidModel(f"There is no file {str(path)!r}.", "Check the path before the colon.")
    name = f"microbatch_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module, run = importlib.util.module_from_spec(spec), spec.loader.exec_module
    sys.modules[name] = module  # dataclasses and pickling in the file look their module up
    with _importable(path.resolve().parent):
        attempt(lambda: run(module), str(path), "raised while it was imported")
    return module


def _import(name: str) -> ModuleType:
    with _importable(Path.cwd()):
        try:
            found = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            found = None
        if found is None:
            raise InvalidModel(
                f"There is no module {name!r}.", "Install it, or run from the folder that holds it; files end in .py."
            )
        module: ModuleType = attempt(lambda: importlib.import_module(name), name, "raised while it was imported")
        return module


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
