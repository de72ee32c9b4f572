"""From a MODEL as the user writes it to a model that can be measured.

To support a further form, write a function from the text to a `Loaded` and its row in `FORMS`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from microbatch.errors import InvalidModel, InvalidSettings
from microbatch.models.built_in import BUILT_IN, build, nearest
from microbatch.models.loaded import Loaded

TORCH_DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
"""Dtypes that a model can be loaded in, by our spelling (tf32 is stored as fp32)."""

OPTIONS = ("unit", "loss")
WHAT_WORKS = "Use a built-in model ({}), package.module:callable or file.py:callable.".format(", ".join(BUILT_IN))


def load_model(text: str, *, dtype: str | None = None) -> Loaded:
    """The model that `text` names, and an example of its input.

    A MODEL is a built-in model with settings (``mlp:depth=8,width=1024``), or a callable that takes no argument, as
    ``package.module:callable`` or ``file.py:callable``. It returns ``(model, example)`` or
    ``(model, example, options)``: the example is a tensor, a tuple of positional or a dict of keyword arguments;
    options may hold ``unit`` (what one item is called) and ``loss``.

    Args:
        dtype: fp64, fp32, tf32, fp16 or bf16: the model and the floating-point tensors of the example are converted.

    Raises:
        InvalidModel: the form is unknown or not supported, a file or callable is missing, or it raised or returned
            something else.
        InvalidSettings: a setting of a built-in model, or the dtype, is not valid.
    """
    form = next(form for matches, form in FORMS if matches(text))
    loaded = form(text)
    return loaded if dtype is None else _converted(loaded, dtype)


def _converted(loaded: Loaded, dtype: str) -> Loaded:
    if dtype not in TORCH_DTYPES:
        raise InvalidSettings(f"A model cannot be loaded in {dtype!r}.", nearest(dtype, TORCH_DTYPES))
    target = TORCH_DTYPES[dtype]

    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(target) if tensor.is_floating_point() else tensor

    return dataclasses.replace(
        loaded,
        model=loaded.model.to(target),
        args=tree_map_only(Tensor, convert, loaded.args),
        kwargs=tree_map_only(Tensor, convert, loaded.kwargs),
    )


def _from_callable(text: str) -> Loaded:
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


def _example(text: str, example: object) -> tuple[tuple[object, ...], dict[str, object]]:
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


def _refuse_pickle(text: str) -> Loaded:
    raise InvalidModel(
        f"{text} is a pickle, and loading one can run any code that is hidden in it.",
        "Write a function that builds the model and loads its weights, and name it as file.py:callable.",
    )


def _not_yet(form: str) -> Callable[[str], Loaded]:
    def refuse(text: str) -> Loaded:
        raise InvalidModel(f"{text!r} is {form}, a form that is not supported yet.", WHAT_WORKS)

    return refuse


def _refuse_unknown(text: str) -> Loaded:
    if text.endswith(".py"):
        raise InvalidModel(f"{text!r} names a file but no callable in it.", f"Write {text}:callable.")
    raise InvalidModel(f"There is no model {text!r}.", f"{_close_built_in(text)}{WHAT_WORKS}")


def _close_built_in(text: str) -> str:
    sentence = nearest(text.partition(":")[0], BUILT_IN)
    return f"{sentence} " if sentence.startswith("Did") else ""


def _is_built_in(text: str) -> bool:
    return text.partition(":")[0] in BUILT_IN


def _is_callable(text: str) -> bool:
    """``file.py:name`` or ``package.module:name``; ``mpl:depth=8`` is a built-in model misspelt."""
    place, colon, name = text.rpartition(":")
    return bool(colon) and name.isidentifier() and (place.endswith(".py") or place.replace(".", "a").isidentifier())


FORMS: tuple[tuple[Callable[[str], bool], Callable[[str], Loaded]], ...] = (
    (_is_built_in, build),
    (lambda text: text.endswith((".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt")), _refuse_pickle),
    (lambda text: text.endswith(".pt2"), _not_yet("a torch.export archive")),
    (lambda text: text.startswith("torchvision:"), _not_yet("a torchvision model")),
    (lambda text: text.startswith("timm:"), _not_yet("a timm model")),
    (lambda text: text.endswith(".gguf"), _not_yet("a GGUF file")),
    (os.path.isdir, _not_yet("a model folder")),
    (_is_callable, _from_callable),
    (lambda _: True, _refuse_unknown),
)
"""Forms in the order in which they are tried: whether a text is of the form, and how it is loaded."""
