"""A function, a decorated function, a module or an engine of a user's own file, made ready to be served. No torch."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

from microbatch.errors import InvalidModel, InvalidSettings
from microbatch.models.named_object import attempt, is_named, named_object
from microbatch.serving.engine.batcher import DynamicBatcher
from microbatch.serving.engine.decorate import Batched
from microbatch.serving.engine.prepare import is_module
from microbatch.serving.loading.served import Given, Served

WHAT_WORKS = (
    "Name a function from a list of items to a list of results, one decorated with microbatch.batched, an nn.Module, "
    "or a function without arguments that returns one of these or (model, example)."
)


def is_local(text: str) -> bool:
    """Whether the text names an object in a file, or in a module of the current directory; asked without torch."""
    place = text.rpartition(":")[0]
    if not is_named(text):
        return False
    path = Path.cwd().joinpath(*place.split("."))
    return place.endswith(".py") or path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def from_named(text: str, name: str, given: Given) -> Served:
    """What `text` names, as an engine.

    Raises:
        InvalidModel: nothing that can be served, or the user's code raised.
        InvalidSettings: settings that contradict each other, or those that the object brings.
    """
    found = _importable_from_now_on(text)
    if _makes_something(found):
        found = attempt(found, text, "raised")
    if isinstance(found, DynamicBatcher):
        return _engine(text, name, found, given)
    if isinstance(found, Batched):
        return _function(text, name, _batched(found, name, given))
    if is_module(found) or isinstance(found, tuple):
        from microbatch.models.user_code import as_loaded
        from microbatch.serving.loading.modules import from_loaded, from_module

        if is_module(found):
            return from_module(text, name, found, given)
        return from_loaded(text, name, as_loaded(text, found), given)
    if not callable(found) or isinstance(found, type):
        raise InvalidModel(f"{text} is a {type(found).__name__}, which cannot be served.", WHAT_WORKS)
    if any(map(inspect.iscoroutinefunction, (found, type(found).__call__))):
        raise InvalidModel(f"{text} is a coroutine function.", "Write def: the engine calls it in a thread of its own.")
    return _function(text, name, DynamicBatcher(found, name=name, **given))


def _importable_from_now_on(text: str) -> Any:
    """The object; its folder stays on the path, for what it imports later and for worker processes.

    A file is imported under its own name where nothing else bears that name, so that a process finds it again.
    """
    place, _, name = text.rpartition(":")
    path = Path(place)
    folder = path.resolve().parent if place.endswith(".py") else Path.cwd()
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    if place.endswith(".py") and path.is_file() and _is_found_as(path):
        return named_object(f"{path.stem}:{name}")
    return named_object(text)


def _is_found_as(path: Path) -> bool:
    if not path.stem.isidentifier():
        return False
    try:
        spec = importlib.util.find_spec(path.stem)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == path.resolve()


def _makes_something(found: Any) -> bool:
    """Whether it is a function without arguments, or a class that can be made without any."""
    if isinstance(found, DynamicBatcher | Batched) or is_module(found) or not callable(found):
        return False
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):  # of a builtin: it takes items
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    takes = [p for p in parameters if p.kind in (*positional, inspect.Parameter.VAR_POSITIONAL)]
    return not any(p.default is p.empty for p in takes) and (not takes or isinstance(found, type))


def _engine(text: str, name: str, engine: DynamicBatcher, given: Given) -> Served:
    if given:
        raise InvalidSettings(
            f"{text} is a DynamicBatcher, which has its settings; {', '.join(sorted(given))} would say it again.",
            "Leave the options out, or name the function.",
        )
    engine.name = name
    return _function(text, name, engine)


def _batched(found: Batched[Any, Any], name: str, given: Given) -> DynamicBatcher:
    """Its own engine; with settings on the command line another one, in which those win over the decorator's."""
    if not given:
        found.engine.name = name
        return found.engine
    return DynamicBatcher(found.function, name=name, **{**found.settings, **given})


def _function(text: str, name: str, engine: DynamicBatcher) -> Served:
    return Served(name=name, text=text, kind="function", engine=engine, takes="what the function takes in a list")
