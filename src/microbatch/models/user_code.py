"""A user's own function as a model: ``file.py:callable`` or ``package.module:callable``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from microbatch.errors import InvalidModel
from microbatch.models.loaded import Example, Loaded
from microbatch.models.named_object import attempt, named_object
from microbatch.models.spelling import nearest

OPTIONS = ("unit", "loss")


def from_callable(text: str) -> Loaded:
    """What the function that `text` names returns.

    Raises:
        InvalidModel: a file or callable is missing, or it raised or returned something else than a model.
    """
    found = named_object(text)
    if not callable(found):
        raise InvalidModel(f"{text} is a {type(found).__name__}, not a callable.", "Name a function.")
    return as_loaded(text, attempt(found, text, "raised"))


def as_loaded(text: str, result: object) -> Loaded:
    """What a function returned, as a model and its example.

    Raises:
        InvalidModel: something else than ``(model, example)`` or ``(model, example, options)``.
    """
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
