"""Example inputs: which dimension is the batch, and the same example at another batch size.

Tensors are found in tuples, lists, named tuples, dicts, other mappings, dataclasses, and plain objects such as
key-value caches. A tensor is named by its path: ``args[0]``, ``input_ids``, ``cache.layers[1].keys``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping, MutableMapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from microbatch.errors import InvalidModel

Dimension = int | Mapping[str, int | None] | None
"""Where the batch is: one dimension for every tensor, or one by path (None: that tensor has no batch)."""

Args = tuple[object, ...]
Kwargs = dict[str, object]
Change = Callable[[str, Tensor], Tensor]
"""What takes a tensor's place, given its path."""

_REMEDY = (
    "Say where the batch is: batch_dimension=1 for every tensor, or batch_dimension={path: dimension}, "
    "with None for a tensor that has no batch."
)


def find_batch_size(args: Args, kwargs: Kwargs, *, dimension: Dimension = None) -> int:
    """Items in the example's batch.

    Dimension 0 of every tensor that has one counts as the batch, unless `dimension` tells otherwise.

    Raises:
        InvalidModel: no tensor, an empty batch, a path that is not there, or two tensors that disagree.
    """
    sizes: dict[str, int | None] = {}

    def note(path: str, tensor: Tensor) -> Tensor:
        batch = _batch_dimension(path, tensor, dimension)
        sizes[path] = None if batch is None else tensor.shape[batch]
        return tensor

    map_tensors(args, kwargs, note)
    _check_paths(dimension, list(sizes))
    return _agreed({path: size for path, size in sizes.items() if size is not None})


def with_batch_size(args: Args, kwargs: Kwargs, batch_size: int, *, dimension: Dimension = None) -> tuple[Args, Kwargs]:
    """The same example with `batch_size` items: its items in order, repeated cyclically or cut.

    Values come from the example, so integer ids stay valid. Every new tensor is dense in the order of the old
    one's strides (channels last stays channels last). Tensors without a batch are passed as they are.

    Raises:
        InvalidModel: as in `find_batch_size`; or a batch size below 1.
    """
    if batch_size < 1:
        raise InvalidModel(f"A batch of {batch_size} holds no items.", "Give a batch size of 1 or more.")
    find_batch_size(args, kwargs, dimension=dimension)

    def resize(path: str, tensor: Tensor) -> Tensor:
        batch = _batch_dimension(path, tensor, dimension)
        return tensor if batch is None else _repeated(tensor, batch, batch_size)

    return map_tensors(args, kwargs, resize)


def map_tensors(args: Args, kwargs: Kwargs, change: Change) -> tuple[Args, Kwargs]:
    """New args and kwargs with ``change(path, tensor)`` in place of each tensor; containers are new objects."""
    walk = _Walk(change)
    new_args = tuple(walk(f"args[{index}]", value) for index, value in enumerate(args))
    return new_args, {name: walk(name, value) for name, value in kwargs.items()}


def tensors_in(value: object) -> list[Tensor]:
    """Every tensor in a nested value, in order, also in a model's output."""
    found: list[Tensor] = []

    def note(_: str, tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _Walk(note)("", value)
    return found


def can_change(value: object) -> bool:
    """Whether a call could change the value's structure: a list, a mapping or a cache; tensors and tuples it cannot."""
    if isinstance(value, Tensor):
        return False
    if isinstance(value, tuple):
        return any(can_change(item) for item in value)
    return any(matches(value) for matches, _ in _CONTAINERS)


def _batch_dimension(path: str, tensor: Tensor, dimension: Dimension) -> int | None:
    if isinstance(dimension, Mapping):
        told = dimension.get(path, 0)
        if path in dimension and told is not None and not -tensor.dim() <= told < tensor.dim():
            raise InvalidModel(f"{path} has shape {tuple(tensor.shape)}, no dimension {told}.", _REMEDY)
    else:
        told = 0 if dimension is None else dimension
    if told is None or not -tensor.dim() <= told < tensor.dim():
        return None
    return told % tensor.dim()


def _check_paths(dimension: Dimension, paths: list[str]) -> None:
    if not isinstance(dimension, Mapping):
        return
    for path in dimension:
        if path not in paths:
            raise InvalidModel(f"The example has no tensor {path!r}.", f"Its tensors: {', '.join(paths)}.")


def _agreed(sizes: dict[str, int]) -> int:
    if not sizes:
        raise InvalidModel("The example holds no tensor with a batch.", "Give at least one tensor with a batch.")
    first, size = next(iter(sizes.items()))
    for path, other in sizes.items():
        if other != size:
            raise InvalidModel(f"The example has two batch sizes: {first} has {size} and {path} has {other}.", _REMEDY)
    if size < 1:
        raise InvalidModel(f"The example's batch is empty: {first} has {size} items.", "Give 1 item or more.")
    return size


def _repeated(tensor: Tensor, batch: int, batch_size: int) -> Tensor:
    index = torch.arange(batch_size, device=tensor.device) % tensor.shape[batch]
    order = _stride_order(tensor)
    with torch.no_grad():
        dense = tensor.permute(order).index_select(order.index(batch), index)
        result = dense.permute([order.index(axis) for axis in range(tensor.dim())])
    return result.requires_grad_(tensor.requires_grad)


def _stride_order(tensor: Tensor) -> list[int]:
    """Dimensions from outermost to innermost; the plain order for an expanded tensor, whose strides say nothing."""
    axes = list(range(tensor.dim()))
    if tensor.layout != torch.strided or 0 in tensor.stride():
        return axes
    strides = tensor.stride()
    return sorted(axes, key=lambda axis: -strides[axis])


class _Walk:
    """One pass over a nested value: what to do with a tensor, and the copies made so far (objects may form cycles)."""

    def __init__(self, change: Change) -> None:
        self.change = change
        self.copies: dict[int, Any] = {}

    def __call__(self, path: str, value: Any) -> Any:
        """The same value around changed tensors, in new containers; what is no container is passed as it is."""
        if isinstance(value, Tensor):
            return self.change(path, value)
        if id(value) in self.copies:
            return self.copies[id(value)]
        rebuild = next((rebuild for matches, rebuild in _CONTAINERS if matches(value)), None)
        return value if rebuild is None else rebuild(self, path, value)


def _rebuilt_tuple(walk: _Walk, path: str, value: Any) -> Any:
    items = [walk(f"{path}[{index}]", item) for index, item in enumerate(value)]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _rebuilt_list(walk: _Walk, path: str, value: Any) -> Any:
    result = walk.copies[id(value)] = copy.copy(value)
    for index, item in enumerate(value):
        result[index] = walk(f"{path}[{index}]", item)
    return result


def _rebuilt_mapping(walk: _Walk, path: str, value: Any) -> Any:
    result = walk.copies[id(value)] = copy.copy(value)
    if isinstance(value, UserDict):
        result.data = dict(value.data)  # a subclass with its own __copy__ may share the inner dict
    for key, item in value.items():
        result[key] = walk(f"{path}[{key!r}]", item)
    return result


def _rebuilt_object(walk: _Walk, path: str, value: Any) -> Any:
    result = walk.copies[id(value)] = copy.copy(value)
    for name, item in _attributes(value).items():
        object.__setattr__(result, name, walk(f"{path}.{name}", item))
    return result


def _attributes(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dict(vars(value))


def _is_tuple(value: object) -> bool:
    return isinstance(value, tuple) and not isinstance(value, torch.Size)


def _is_plain_object(value: object) -> bool:
    """An instance of a data class or of a holder such as a key-value cache; never a module, class or function."""
    return hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type, ModuleType)) and not callable(value)


_CONTAINERS: tuple[tuple[Callable[[object], bool], Callable[[_Walk, str, Any], Any]], ...] = (
    (_is_tuple, _rebuilt_tuple),
    (lambda value: isinstance(value, list), _rebuilt_list),
    (lambda value: isinstance(value, MutableMapping), _rebuilt_mapping),
    (lambda value: dataclasses.is_dataclass(value) and not isinstance(value, type), _rebuilt_object),
    (_is_plain_object, _rebuilt_object),
)
