"""Binary bodies: nothing is unpickled, nothing is allocated for a header's promise, numbers come through exactly."""

from __future__ import annotations

import io
import json
import struct
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from microbatch.errors import InvalidRequest
from microbatch.web.arrays import as_array, from_npy, from_safetensors, to_npy, to_safetensors

NUMBERS = hnp.scalar_dtypes().filter(lambda dtype: dtype.kind in "biufc" and dtype.itemsize <= 8)
ARRAYS = hnp.arrays(NUMBERS, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))


@given(ARRAYS)
def test_an_array_comes_back_as_it_went(array: np.ndarray[Any, Any]) -> None:
    found = from_npy(to_npy(array))
    assert found.dtype == array.dtype.newbyteorder("=")
    np.testing.assert_array_equal(found, array)


@given(hnp.arrays(NUMBERS, hnp.array_shapes(min_dims=2, max_dims=3, min_side=0, max_side=4)))
def test_an_array_by_columns_too(array: np.ndarray[Any, Any]) -> None:
    np.testing.assert_array_equal(from_npy(to_npy(np.asfortranarray(array))), array)


def header(text: str, data: bytes = b"") -> bytes:
    """A .npy file with a header of our own."""
    line = text.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(line)) + line + data


def pickled() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return file.getvalue()


HOSTILE = {
    "a pickle": pickled(),
    "texts": to_npy(np.array(["a", "b"])),
    "dates": to_npy(np.array(["2020-01-01"], dtype="datetime64[D]")),
    "records": to_npy(np.zeros(2, dtype=[("a", "f4")])),
    "a promise of petabytes": header("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000, 1000000, 1000)}"),
    "an overflow": header("{'descr': '<f8', 'fortran_order': False, 'shape': (9223372036854775807, 9)}"),
    "below zero": header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}", bytes(8)),
    "below zero twice": header("{'descr': '<f4', 'fortran_order': False, 'shape': (-2, -1)}", bytes(8)),
    "nothing below zero": header("{'descr': '<f4', 'fortran_order': False, 'shape': (0, -1)}"),
    "too short": header("{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}", bytes(8)),
    "too long": header("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}", bytes(8)),
    "code": header("{'descr': __import__('os').getcwd(), 'fortran_order': False, 'shape': (1,)}"),
    "deep": header("[" * 5000),
    "no header": b"\x93NUMPY\x01\x00",
    "version 3": b"\x93NUMPY\x03\x00" + bytes(8),
    "nothing": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_array_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        from_npy(HOSTILE[name])
    assert caught.value.status == 400


def test_tensors_come_back_as_they_went() -> None:
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array([1, 2], np.int64),
        "c": np.array(True),
    }
    found = from_safetensors(to_safetensors(arrays))
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=8))
def test_bfloat16_is_widened_exactly(values: list[float]) -> None:
    tensor = torch.tensor(values).bfloat16()
    found = from_safetensors(safetensors.torch.save({"x": tensor}))["x"]
    assert found.dtype == np.float32
    assert torch.equal(torch.from_numpy(found.copy()), tensor.float())


def described(**tensor: Any) -> bytes:
    """A safetensors file with a header of our own."""
    text = json.dumps({"x": tensor}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(8)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"12345678",
        struct.pack("<Q", 2**60) + b"{}",
        described(dtype="F32", shape=[10**9], data_offsets=[0, 8]),
        described(dtype="F32", shape=[2], data_offsets=[0, 80]),
        described(dtype="F32", shape=[-2], data_offsets=[0, 8]),
        described(dtype="F8_E4M3", shape=[8], data_offsets=[0, 8]),
        described(dtype="PICKLE", shape=[8], data_offsets=[0, 8]),
    ],
)
def test_hostile_tensors_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        from_safetensors(body)


def test_what_is_no_number_is_no_array() -> None:
    with pytest.raises(TypeError):
        as_array("text")
    with pytest.raises(TypeError):
        as_array([{"a": 1}])
    assert as_array(torch.ones(2, requires_grad=True)).tolist() == [1.0, 1.0]
    assert as_array(np.arange(2, dtype=">i4")).dtype == np.dtype("=i4")
