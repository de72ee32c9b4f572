"""Items that are arrays or tensors: nested lists of numbers, or arrays, made what the examples are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec
import numpy as np

from microbatch.errors import InvalidRequest
from microbatch.web.arrays import Array, as_array

_NUMBERS: dict[str, Any] = {"f": float, "i": int, "u": int, "b": bool}
"""What the numbers of JSON are to be, by the kind of the dtype."""
_WORDS = {"f": "number", "i": "integer", "u": "integer", "b": "boolean"}

Shape = tuple[int | None, ...]


def is_array(value: Any) -> bool:
    """Whether a value is an array of numpy or a tensor of torch."""
    return isinstance(value, np.ndarray) or (hasattr(value, "detach") and hasattr(value, "shape"))


def form_of_arrays(examples: Sequence[Any], free: Collection[int] = ()) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """The schema of items like these arrays, and how they are read. A side that differs among the examples is free.

    Args:
        examples: arrays or tensors.
        free: sides that may have any length.
    """
    arrays = [as_array(example) for example in examples]
    dtype, shape = np.result_type(*arrays), common_shape([array.shape for array in arrays], free)
    if shape is None or dtype.kind not in _NUMBERS:
        return {}, lambda value: value
    example = examples[0]

    def read(value: Any) -> Any:
        array = as_numbers(value, dtype, len(shape))
        check_shape(array.shape, shape)
        if isinstance(example, np.ndarray):
            return array
        return sys.modules["torch"].from_numpy(array).to(example.dtype)

    return schema_of(dtype, shape), read


def common_shape(shapes: Sequence[tuple[int, ...]], free: Collection[int] = ()) -> Shape | None:
    """The sides that all shapes share, None for the others; None when they differ in rank."""
    if len({len(shape) for shape in shapes}) > 1:
        return None
    sides = [set(lengths) for lengths in zip(*shapes)]
    return tuple(None if len(lengths) > 1 or lengths & set(free) else lengths.pop() for lengths in sides)


def as_numbers(value: Any, dtype: np.dtype[Any], rank: int) -> Array:
    """Nested lists of numbers, or an array, as a new array of a dtype.

    Raises:
        InvalidRequest: there is something else in it, or a number that the dtype cannot hold.
    """
    if isinstance(value, np.ndarray | np.generic):
        if not np.can_cast(value.dtype, dtype, "same_kind"):
            raise InvalidRequest(f"The item is an array of {value.dtype}.", f"Send {dtype}.")
        return np.array(value, dtype)
    kind: Any = _NUMBERS[dtype.kind]
    for _ in range(rank):
        kind = list[kind]
    try:
        array = np.array(msgspec.convert(value, kind), np.float64 if dtype.kind == "f" else dtype)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise InvalidRequest(f"The item is no array of {dtype}: {reason}.", "See /openapi.json for its form.") from None
    if dtype.kind == "f" and not (np.abs(array) <= np.finfo(dtype).max).all():
        raise InvalidRequest(f"A number in the item is too large for {dtype}.", f"At most {np.finfo(dtype).max:.4g}.")
    return array.astype(dtype, copy=False)


def check_shape(shape: tuple[int, ...], wanted: Shape) -> None:
    """Compare an item's shape with the one of the examples.

    Raises:
        InvalidRequest: a side that is not free has another length, or there are more or fewer sides.
    """
    if len(shape) == len(wanted) and all(w is None or side == w for side, w in zip(shape, wanted)):
        return
    expected = ", ".join("any" if side is None else str(side) for side in wanted)
    raise InvalidRequest(
        f"The item has shape {shape}; it should have ({expected}).",
        "Sides of which the server was given examples of several lengths may have any length.",
    )


def schema_of(dtype: np.dtype[Any], shape: Shape) -> dict[str, Any]:
    """The JSON Schema of nested lists of that shape."""
    schema: dict[str, Any] = {"type": _WORDS[dtype.kind]} | _range(dtype)
    for side in reversed(shape):
        schema = {"type": "array", "items": schema}
        if side is not None:
            schema |= {"minItems": side, "maxItems": side}
    return schema


def _range(dtype: np.dtype[Any]) -> dict[str, Any]:
    if dtype.kind == "b":
        return {}
    limits = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    number = float if dtype.kind == "f" else int
    return {"minimum": number(limits.min), "maximum": number(limits.max)}
