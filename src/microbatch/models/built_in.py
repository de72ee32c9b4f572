"""The built-in models and their settings in text form, as in ``mlp:depth=8,width=1024``.

To add a model, write a function that returns a `Loaded`, and its row in `BUILT_IN`. Its keyword arguments are its
settings: whole numbers, decimal numbers, true or false, or one of a few words (``Literal``).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from microbatch.errors import InvalidModel, InvalidSettings
from microbatch.models.loaded import Loaded
from microbatch.models.moe import moe
from microbatch.models.networks import cnn, mlp, pool
from microbatch.models.spelling import nearest
from microbatch.models.transformer import decoder, transformer

BUILT_IN: dict[str, Callable[..., Loaded]] = {
    "mlp": mlp,
    "cnn": cnn,
    "pool": pool,
    "transformer": transformer,
    "decoder": decoder,
    "moe": moe,
}


def build(text: str) -> Loaded:
    """The built-in model that `text` names, with its settings, in eval mode; weights depend on ``seed`` alone.

    Raises:
        InvalidModel: no built-in model of that name.
        InvalidSettings: an unknown setting, a value out of its range, or settings that contradict each other.
    """
    name, _, rest = text.partition(":")
    if name not in BUILT_IN:
        raise InvalidModel(f"There is no built-in model {name!r}.", nearest(name, BUILT_IN))
    given = _settings(name, rest)
    return _seeded(text, given.get("seed", 0), lambda: BUILT_IN[name](**given))


def _seeded(text: str, seed: int, make: Callable[[], Loaded]) -> Loaded:
    """What `make` makes, and makes for other modes, named after the user's text."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        loaded = make()
    loaded.model.eval()
    other = loaded.build_mode
    if other is None:
        return replace(loaded, name=text)
    return replace(loaded, name=text, build_mode=lambda mode, length: _seeded(text, seed, lambda: other(mode, length)))


def settings(name: str) -> dict[str, object]:
    """Every setting of a built-in model with its default."""
    return {key: parameter.default for key, parameter in inspect.signature(BUILT_IN[name]).parameters.items()}


def _settings(model: str, text: str) -> dict[str, Any]:
    types = get_type_hints(BUILT_IN[model])
    given: dict[str, Any] = {}
    for pair in filter(None, text.split(",")):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if name not in settings(model):
            raise InvalidSettings(f"{model} has no setting {name!r}.", nearest(name, settings(model)))
        if not equals or not value:
            raise InvalidSettings(f"The setting {name} of {model} has no value.", f"Write {name}=VALUE.")
        if name in given:
            raise InvalidSettings(f"The setting {name} of {model} is given twice.", "Leave one of them out.")
        given[name] = _value(name, value, types[name])
    return given


def _value(name: str, text: str, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        return _word(name, text, get_args(kind))
    kinds = [part for part in get_args(kind) or (kind,) if part is not NoneType]
    return _READERS[kinds[0]](name, text)


def _word(name: str, text: str, words: tuple[str, ...]) -> str:
    if text not in words:
        raise InvalidSettings(f"{name}={text} is not a choice.", nearest(text, words))
    return text


def _whole(name: str, text: str) -> int:
    least = 0 if name == "seed" else 1
    number = int(text) if text.lstrip("+-").isdecimal() and len(text) < _LONGEST_NUMBER else None
    if number is None or number < least:
        raise InvalidSettings(f"{name}={text} is not a whole number of {least} or more.", f"Write {name}=8.")
    return number


def _decimal(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (number > 0 and math.isfinite(number)):
        raise InvalidSettings(f"{name}={text} is not a number above zero.", f"Write {name}=1.25.")
    return number


def _truth(name: str, text: str) -> bool:
    return _word(name, text, ("true", "false")) == "true"


_READERS: dict[type, Callable[[str, str], Any]] = {int: _whole, float: _decimal, bool: _truth}
_LONGEST_NUMBER = 10
"""Digits beyond which a size is a slip of the keyboard, not a model."""
