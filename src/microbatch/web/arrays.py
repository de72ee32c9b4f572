"""Arrays in bodies: numpy's own file form and safetensors, read without running or unpickling anything."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.lib import format as npy

from microbatch.errors import InvalidRequest

Array = np.ndarray[Any, np.dtype[Any]]

NUMERIC = "biufc"
"""Kinds of numpy's dtypes that are numbers; never objects, which would be pickles."""

_SAFETENSORS = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1",
}  # fmt: skip


def from_npy(body: bytes) -> Array:
    """The array of a .npy file, sharing the memory of the body. Its header is checked before anything is allocated.

    Raises:
        InvalidRequest: it is none, or one of objects.
    """
    try:
        return _from_npy(body)
    except Exception as error:
        raise _unreadable(".npy file", error) from None


def to_npy(array: Array) -> bytes:
    """The .npy file of an array."""
    file = io.BytesIO()
    npy.write_array(file, array, allow_pickle=False)
    return file.getvalue()


def from_safetensors(body: bytes) -> dict[str, Array]:
    """The named tensors of a safetensors file; those in bfloat16 are widened to float32, which is exact.

    Raises:
        InvalidRequest: it is none, or has a dtype that numpy has no word for.
    """
    from safetensors import deserialize

    try:
        return {name: _tensor(described) for name, described in deserialize(body)}  # type: ignore[no-untyped-call]
    except Exception as error:
        raise _unreadable("safetensors file", error) from None


def to_safetensors(arrays: Mapping[str, Array]) -> bytes:
    """The safetensors file of named arrays."""
    from safetensors.numpy import save

    return save({name: np.ascontiguousarray(array) for name, array in arrays.items()})


def as_array(value: Any) -> Array:
    """A tensor, an array, a number or nested lists of numbers as an array in the machine's byte order.

    Raises:
        TypeError: it is none of these.
    """
    if hasattr(value, "detach"):  # a tensor of torch, which is not imported for this
        value = value.detach().cpu()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    array = np.asarray(value)
    if array.dtype.kind not in NUMERIC:
        raise TypeError(f"a {type(value).__name__} of {array.dtype}")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _from_npy(body: bytes) -> Array:
    file = io.BytesIO(body)
    version = npy.read_magic(file)
    read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
    shape, by_columns, dtype = read_header(file)
    if dtype.kind not in NUMERIC:
        raise ValueError(f"dtype {dtype} holds no plain numbers")
    if any(side < 0 for side in shape):  # would be taken for "as many as there are"
        raise ValueError(f"shape {shape} has a side below zero")
    data = memoryview(body)[file.tell() :]
    array = np.frombuffer(data, dtype).reshape(shape, order="F" if by_columns else "C")
    return array.astype(dtype.newbyteorder("="), copy=False)


def _tensor(described: Mapping[str, Any]) -> Array:
    dtype, shape, data = described["dtype"], described["shape"], described["data"]
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return np.frombuffer(data, _SAFETENSORS[dtype]).reshape(shape)


def _unreadable(what: str, error: Exception) -> InvalidRequest:
    lines = str(error).splitlines() or [type(error).__name__]
    return InvalidRequest(f"The body is no {what} that can be read: {lines[0][:200]}.", "Send numbers, not objects.")
