"""The batch of an example: found, told, contradicted, and changed."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from microbatch.batch.example import can_change, find_batch_size, tensors_in, with_batch_size
from microbatch.errors import InvalidModel


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class Fields:
    ids: Tensor
    scale: float = 2.0


class Encoding(UserDict[str, Any]):
    """Like the mapping that a Hugging Face tokenizer returns."""


class CacheLayer:
    def __init__(self, batch: int) -> None:
        self.keys = torch.arange(batch * 6.0).reshape(batch, 2, 3)
        self.values = -self.keys


class Cache:
    """Like a key-value cache: a plain object that holds a list of layers, one of which knows its owner."""

    def __init__(self, batch: int) -> None:
        self.layers = [CacheLayer(batch), CacheLayer(batch)]
        self.owner = self


def nested(batch: int) -> Any:
    rows = torch.arange(batch * 2).reshape(batch, 2)
    return {
        "pair": Pair(rows, rows.float()),
        "fields": Fields(rows),
        "encoding": Encoding(input_ids=rows),
        "list": [rows, (rows, "text", None, 3)],
        "cache": Cache(batch),
        "scalar": torch.tensor(1.5),
    }


@pytest.mark.parametrize("name", ["pair", "fields", "encoding", "list", "cache"])
def test_the_batch_is_found_in_every_container(name: str) -> None:
    assert find_batch_size((), {name: nested(3)[name]}) == 3
    assert find_batch_size((nested(3)[name],), {}) == 3


@given(st.integers(1, 7), st.integers(1, 40))
def test_items_are_repeated_in_order_in_every_container(before: int, after: int) -> None:
    example = nested(before)
    changed: Any = with_batch_size((), example, after)
    result = changed[1]
    assert find_batch_size((), result) == after
    wanted = example["pair"].left[torch.arange(after) % before]
    found = tensors_in(result)
    assert len(found) == len(tensors_in(example))
    for name, container in result.items():
        assert type(container) is type(example[name])
    assert torch.equal(result["encoding"]["input_ids"], wanted)
    assert torch.equal(result["fields"].ids, wanted)
    assert torch.equal(result["list"][1][0], wanted)
    assert result["list"][1][1:] == ("text", None, 3)
    assert result["cache"].layers[1].keys.shape[0] == after
    assert result["scalar"] is example["scalar"]
    assert find_batch_size((), example) == before, "the example itself was changed"


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    data=st.data(),
    after=st.integers(1, 12),
)
def test_dtype_device_and_stride_order_are_kept(shape: list[int], data: st.DataObject, after: int) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
    dimension = data.draw(st.integers(0, len(shape) - 1))
    dense = torch.zeros([shape[axis] for axis in order], dtype=dtype)
    tensor = dense.permute([order.index(axis) for axis in range(len(shape))])
    (result,), _ = with_batch_size((tensor,), {}, after, dimension=dimension)
    assert isinstance(result, Tensor)
    assert result.dtype == dtype
    assert result.shape == tuple(after if axis == dimension else size for axis, size in enumerate(shape))
    assert result.is_contiguous() or tensor.permute(order).shape == dense.shape
    strides = tensor.stride()
    by_stride = sorted(range(len(shape)), key=lambda axis: -strides[axis])
    assert result.permute(by_stride).is_contiguous()


def test_channels_last_stays_channels_last() -> None:
    images = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    (result,), _ = with_batch_size((images,), {}, 5)
    assert isinstance(result, Tensor)
    assert result.is_contiguous(memory_format=torch.channels_last)


def test_an_expanded_tensor_becomes_dense() -> None:
    (result,), _ = with_batch_size((torch.arange(3).expand(2, 3),), {}, 4)
    assert isinstance(result, Tensor)
    assert result.stride() == (3, 1)
    assert result.tolist() == [[0, 1, 2]] * 4


def test_a_leaf_that_wants_a_gradient_still_does() -> None:
    (result,), _ = with_batch_size((torch.zeros(2, 3, requires_grad=True),), {}, 4)
    assert isinstance(result, Tensor)
    assert result.requires_grad and result.is_leaf


def test_two_batch_sizes_are_named_with_their_paths() -> None:
    with pytest.raises(InvalidModel, match=r"args\[0\] has 2 and mask has 3.*batch_dimension") as caught:
        find_batch_size((torch.zeros(2, 5),), {"mask": torch.zeros(3)})
    assert "None" in caught.value.remedy


def test_the_dimension_can_be_told_for_all() -> None:
    args = (torch.zeros(7, 2, 3), torch.zeros(7), torch.zeros(1, 2, 4))
    assert find_batch_size(args, {}, dimension=1) == 2
    (sequence, lengths, state), _ = with_batch_size(args, {}, 5, dimension=1)
    assert isinstance(sequence, Tensor) and isinstance(state, Tensor)
    assert sequence.shape == (7, 5, 3) and state.shape == (1, 5, 4)
    assert lengths is args[1]


def test_the_dimension_can_be_told_by_path() -> None:
    kwargs = {"x": torch.zeros(2, 3), "states": [torch.zeros(9, 2)], "positions": torch.zeros(1, 3)}
    told = {"states[0]": 1, "positions": None}
    assert find_batch_size((), kwargs, dimension=told) == 2
    _, result = with_batch_size((), kwargs, 4, dimension=told)
    assert result["states"][0].shape == (9, 4)  # type: ignore[index]
    assert result["positions"] is kwargs["positions"]


@pytest.mark.parametrize(
    ("args", "dimension", "text"),
    [
        ((), None, "no tensor with a batch"),
        ((torch.tensor(1.0), "text"), None, "no tensor with a batch"),
        ((torch.zeros(0, 3),), None, "empty: args\\[0\\] has 0"),
        ((torch.zeros(2),), {"mask": 0}, "no tensor 'mask'.*args\\[0\\]"),
        ((torch.zeros(2),), {"args[0]": 1}, r"shape \(2,\), no dimension 1"),
    ],
)
def test_an_example_without_one_clear_batch_is_refused(args: tuple[Any, ...], dimension: Any, text: str) -> None:
    with pytest.raises(InvalidModel, match=text):
        find_batch_size(args, {}, dimension=dimension)


def test_a_batch_below_one_is_refused() -> None:
    with pytest.raises(InvalidModel, match="batch of 0"):
        with_batch_size((torch.zeros(2),), {}, 0)


def test_a_frozen_dataclass_is_copied_not_changed() -> None:
    fields = replace(Fields(torch.zeros(2)), scale=3.0)
    (result,), _ = with_batch_size((fields,), {}, 5)
    assert isinstance(result, Fields)
    assert result.ids.shape == (5,) and result.scale == 3.0 and fields.ids.shape == (2,)


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        (torch.zeros(2), False),
        ((torch.zeros(2), 3, "text", None), False),
        ([torch.zeros(2)], True),
        ({"a": torch.zeros(2)}, True),
        ((Cache(1),), True),
    ],
)
def test_what_a_call_could_change(value: object, answer: bool) -> None:
    assert can_change(value) is answer
