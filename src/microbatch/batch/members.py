"""The members of a batch: going through them by name, and putting changed ones in their places."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from microbatch.batch.packed import special_size


def is_leaf(value: object) -> bool:
    """What has entries along dimension 0 and no members."""
    return isinstance(value, (Tensor, np.ndarray, PackedSequence))


def leaf_size(value: Any) -> int | None:
    """Entries along dimension 0; None without dimensions."""
    if (special := special_size(value)) is not None:
        return special
    return int(value.shape[0]) if value.ndim else None


def is_plain_sequence(value: object) -> bool:
    """A list or a tuple whose elements have no names."""
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields") and not isinstance(value, torch.Size)


def members(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Name and value of each member of a container; nothing for what is none."""
    if isinstance(value, Mapping):
        yield from ((joined(path, key), item) for key, item in value.items())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((joined(path, f.name), getattr(value, f.name)) for f in dataclasses.fields(value))
    elif hasattr(value, "_fields"):
        yield from ((joined(path, name), getattr(value, name)) for name in value._fields)
    elif is_plain_sequence(value):
        yield from ((f"{path or 'batch'}[{index}]", item) for index, item in enumerate(value))


def joined(path: str, name: object) -> str:
    """Path of a member."""
    return f"{path}.{name}" if path else str(name)


def rebuilt(value: Any, path: str, change: Callable[[str, Any], Any]) -> Any:
    """A new container of the same type around changed members; what is no container is passed as it is."""
    if isinstance(value, Mapping):
        return rebuilt_mapping(value, {key: change(joined(path, key), item) for key, item in value.items()})
    items = [change(name, item) for name, item in members(path, value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        result = copy.copy(value)
        for field, item in zip(dataclasses.fields(value), items):
            object.__setattr__(result, field.name, item)
        return result
    if hasattr(value, "_fields"):
        return type(value)(*items)
    if is_plain_sequence(value):
        return items if type(value) is list else type(value)(items)
    return value


def rebuilt_mapping(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A new mapping of the same type with these items."""
    if type(value) is dict:
        return items
    if not isinstance(value, MutableMapping):
        return type(value)(items)  # type: ignore[call-arg]
    result = copy.copy(value)
    if isinstance(result, UserDict):
        result.data = {}  # a subclass with its own __copy__ may share the inner dict
    for key, item in items.items():
        result[key] = item
    return result


def leaves(path: str, value: Any) -> Iterator[tuple[str, int]]:
    """Name and entries of every leaf, however deep."""
    if is_leaf(value):
        if (size := leaf_size(value)) is not None:
            yield path, size
    else:
        for name, item in members(path, value):
            yield from leaves(name, item)
