"""A user's own function as a model: ``file.py:callable`` or ``package.module:callable``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from microbatch.errors import InvalidModel
from microbatch.models.built_in import nearest
from microbatch.models.loaded import Example, Loaded

OPTIONS = ("unit", "loss")


def is_callable(text: str) -> bool:
    """``file.py:name`` or ``package.module:name``; ``mpl:depth=8`` is a built-in model misspelt."""
    place, colon, name = text.rpartition(":")
    return bool(colon) and name.isidentifier() and (place.endswith(".py") or place.replace(".", "a").isidentifier())


def from_callable(text: str) -> Loaded:
    """What the function that `text` names returns.

    Raises:
        InvalidModel: a file or callable is missing, or it raised or returned something else than a model.
    """
    place, _, name = text.rpartition(":")
    module = _run_file(Path(place)) if place.endswith(".py") else _import(place)
    found = getattr(module, name, None)
    if found is None:
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise InvalidModel(f"{place} has no callable {name!r}.", nearest(name, known) if known else "It defines none.")
    if not callable(found):
        raise InvalidModel(f"{text} is a {type(found).__name__}, not a callable.", "Name a function.")
    return _checked(text, _attempt(found, text, "raised"))


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
        _attempt(lambda: run(module), str(path), "raised while it was imported")
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
        module: ModuleType = _attempt(lambda: importlib.import_module(name), name, "raised while it was imported")
        return module


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _attempt(run: Callable[[], Any], what: str, did: str) -> Any:
    try:
        return run()
    except Exception as error:
        lines = str(error).splitlines() or [""]
        raise InvalidModel(f"{what} {did} {type(error).__name__}: {lines[0]}", "Fix it, then run again.") from error


def _checked(text: str, result: object) -> Loaded:
    if not (isinstance(result, tuple) and len(result) in (2, 3) and isinstance(result[0], nn.Module)):
        raise InvalidModel(
            f"{text} returned {_described(result)}.",
            "Return (model, example): a torch.nn.Module, and a tensor, a tuple or a dict.",
        )
    model, example, *rest = result
    args, kwargs = _example(text, example)
    options = rest[0] if rest else {}
    if not isinstance(options, Mapping):
        raise InvalidModel(f"{text} returned options of {type(options).__name__}.", "Return a dict as the third.")
    for key in options:
        if key not in OPTIONS:
            raise InvalidModel(f"{text} returned the unknown option {key!r}.", nearest(str(key), OPTIONS))
    return Loaded(name=text, model=model, args=args, kwargs=kwargs, **_option_values(text, options))


def _option_values(text: str, options: Mapping[str, Any]) -> dict[str, Any]:
    unit, loss = options.get("unit", "rows"), options.get("loss")
    if not (isinstance(unit, str) and unit):
        raise InvalidModel(f"{text} returned the unit {unit!r}.", "A unit is a word, as in 'images'.")
    if loss is not None and not callable(loss):
        raise InvalidModel(f"{text} returned a loss of {type(loss).__name__}.", "A loss is a function.")
    return {"unit": unit, "loss": loss}


def _example(text: str, example: object) -> Example:
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, tuple | list):
        return tuple(example), {}
    if isinstance(example, Mapping):
        return (), dict(example)
    raise InvalidModel(
        f"{text} returned an example of {type(example).__name__}.", "Return a tensor, a tuple or a dict of them."
    )


def _described(result: object) -> str:
    if isinstance(result, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in result) or 'nothing'}"
    return f"a {type(result).__name__}"
