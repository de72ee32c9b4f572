"""State as JSON with its tensors taken out: what is read back is values, never something that runs.

JSON has no tuples, bytes, counters, tensors and keys other than texts; each of these is a dict with the key ``~``.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from microbatch.errors import InvalidCheckpoint

_KIND = "~"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor was taken out.

    Attributes:
        key: its name among the tensors.
        shape: of the whole tensor, over all shards.
        dtype: what it holds.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Packer:
    """Takes tensors out of nested values.

    Attributes:
        tensors: each under the path that it was first seen at, as in ``model/0.weight``. Tied weights are there once.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._keys: dict[Any, str] = {}

    def pack(self, value: Any, name: str = "") -> Any:
        """`value` in JSON's own types.

        Args:
            value: nested dicts, lists and tuples of plain values and tensors.
            name: its path.

        Raises:
            InvalidCheckpoint: something else, such as a function or an object of some class.
        """
        if isinstance(value, Tensor):
            return self._take_out(value, name)
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, (int, float)):
            return int(value) if isinstance(value, int) else float(value)
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, bytes):
            return {_KIND: "bytes", "base64": base64.b64encode(value).decode()}
        if isinstance(value, Mapping):
            return self._pack_mapping(value, name)
        if isinstance(value, (list, tuple)):
            items = [self.pack(item, f"{name}/{index}") for index, item in enumerate(value)]
            return items if isinstance(value, list) else {_KIND: "tuple", "items": items}
        raise InvalidCheckpoint(
            f"{name} is a {type(value).__name__}, which is no plain value: {value!r:.80}.",
            "Only numbers, texts, bytes, tensors and lists, tuples and dicts of them can be saved.",
        )

    def _take_out(self, tensor: Tensor, name: str) -> dict[str, Any]:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        memory = (local.data_ptr(), tensor.shape, local.stride(), local.dtype, local.device)
        key = self._keys.setdefault(memory if local.data_ptr() else name, name)
        self.tensors.setdefault(key, tensor.detach())
        dtype = str(tensor.dtype).removeprefix("torch.")
        return {_KIND: "tensor", "key": key, "shape": list(tensor.shape), "dtype": dtype}

    def _pack_mapping(self, value: Mapping[Any, Any], name: str) -> dict[str, Any]:
        packed = [(key, self.pack(item, f"{name}/{key}" if name else str(key))) for key, item in value.items()]
        if type(value) is not Counter and all(isinstance(key, str) and key != _KIND for key in value):
            return dict(packed)
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {_KIND: kind, "items": [[self.pack(key, name), item] for key, item in packed]}


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that was packed, with these tensors in their places.

    Raises:
        InvalidCheckpoint: a kind that is not known.
    """
    if isinstance(packed, list):
        return [unpack(item, tensors) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if _KIND not in packed:
        return {key: unpack(value, tensors) for key, value in packed.items()}
    kind = packed[_KIND]
    if kind not in _UNPACK:
        raise InvalidCheckpoint(f"The checkpoint holds a value of kind {kind!r}.", "Another version wrote it.")
    return _UNPACK[kind](packed, tensors)


def places(packed: Any) -> list[Place]:
    """Every tensor that was taken out, in order; tied ones more than once."""
    if isinstance(packed, list):
        return [place for item in packed for place in places(item)]
    if not isinstance(packed, dict):
        return []
    if packed.get(_KIND) == "tensor":
        return [_place(packed)]
    return [place for value in packed.values() for place in places(value)]


def _place(packed: Mapping[str, Any]) -> Place:
    dtype = getattr(torch, str(packed["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidCheckpoint(f"The checkpoint holds a tensor of {packed['dtype']!r}.", "Another version wrote it.")
    return Place(str(packed["key"]), tuple(packed["shape"]), dtype)


def _pairs(packed: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[Any, Any]:
    return {unpack(key, tensors): unpack(value, tensors) for key, value in packed["items"]}


_UNPACK: dict[str, Callable[[Mapping[str, Any], Mapping[str, Tensor]], Any]] = {
    "tuple": lambda packed, tensors: tuple(unpack(packed["items"], tensors)),
    "dict": _pairs,
    "counter": lambda packed, tensors: Counter(_pairs(packed, tensors)),
    "bytes": lambda packed, _: base64.b64decode(packed["base64"]),
    "tensor": lambda packed, tensors: tensors[packed["key"]],
}
