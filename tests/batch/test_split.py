"""Any batch is cut into pieces that put together are the batch again; what cannot be cut is told with its sizes."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from transformers import BatchEncoding

from microbatch.batch.split import batch_size_of, is_list_of_samples, split, to_device
from microbatch.errors import InvalidBatch, InvalidBatchSizes, UserError

N = 7
X = torch.arange(float(N * 3)).view(N, 3)
Y = torch.arange(N)
RAGGED = [torch.arange(length) for length in (3, 1, 4, 1, 5, 9, 2)]
Pair = namedtuple("Pair", ["inputs", "targets"])


@dataclass(frozen=True)
class Frozen:
    inputs: Tensor
    names: tuple[str, ...]
    temperature: float = 0.5


class Readings(Mapping[str, Any]):
    """A mapping that can be read only."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def box(number: int) -> dict[str, Tensor]:
    return {"boxes": torch.ones(number, 4), "labels": torch.arange(number)}


NAMES = tuple("abcdefg")
BOXES = [box(number) for number in (0, 2, 1, 5, 3, 1, 4)]
IMAGES = [torch.full((3, 4, 4), float(index)) for index in range(N)]

# What the batch is, and where its items are numbered: (batch, item numbers of a piece).
BATCHES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "tensor": (X, lambda piece: piece[:, 0] / 3),
    "array": (X.numpy(), lambda piece: piece[:, 0] / 3),
    "tuple": ((X, Y), lambda piece: piece[1]),
    "list of members": ([X, Y], lambda piece: piece[1]),
    "named tuple": (Pair(X, Y), lambda piece: piece.targets),
    "dict": ({"x": X, "y": Y, "size": 3, "name": "train", "none": None}, lambda piece: piece["y"]),
    "nested": ({"a": ({"x": X}, Y), "b": {"c": [X, Y]}}, lambda piece: piece["b"]["c"][1]),
    "user dict": (UserDict({"x": X, "y": Y}), lambda piece: piece["y"]),
    "batch encoding": (BatchEncoding({"input_ids": X.long(), "labels": Y}), lambda piece: piece["labels"]),
    "mapping proxy": (MappingProxyType({"x": X, "y": Y}), lambda piece: piece["y"]),
    "read-only mapping": (Readings({"x": X, "y": Y}), lambda piece: piece["y"]),
    "frozen data class": (Frozen(Y, NAMES), lambda piece: piece.inputs),
    "text beside": ({"y": Y, "text": list(NAMES)}, lambda piece: [NAMES.index(text) for text in piece["text"]]),
    "ragged beside": ({"y": Y, "ids": RAGGED}, lambda piece: [find(RAGGED, ids) for ids in piece["ids"]]),
    "ragged": (RAGGED, lambda piece: [find(RAGGED, ids) for ids in piece]),
    "ragged in a dict": ({"ids": RAGGED}, lambda piece: [find(RAGGED, ids) for ids in piece["ids"]]),
    "texts": (list(NAMES), lambda piece: [NAMES.index(text) for text in piece]),
    "dicts": ([{"x": x, "y": int(y)} for x, y in zip(X, Y)], lambda piece: [item["y"] for item in piece]),
    "detection": ((tuple(IMAGES), tuple(BOXES)), lambda piece: [int(image[0, 0, 0]) for image in piece[0]]),
    "shared member": ({"y": Y, "bias": torch.ones(1, 4), "step": torch.tensor(3)}, lambda piece: piece["y"]),
    "sparse": ((X.to_sparse(), Y), lambda piece: piece[1]),
}


def find(items: list[Tensor], item: Tensor) -> int:
    return next(index for index, other in enumerate(items) if other is item)


def cuts(size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, size), min_size=1, max_size=size).map(lambda sizes: filled(sizes, size))


def filled(sizes: list[int], total: int) -> list[int]:
    kept: list[int] = []
    for size in sizes:
        kept.append(min(size, total - sum(kept)))
        if sum(kept) == total:
            return kept
    return [*kept, total - sum(kept)]


@pytest.mark.parametrize("name", BATCHES)
@given(data=st.data())
def test_the_pieces_are_the_batch(name: str, data: st.DataObject) -> None:
    batch, numbers = BATCHES[name]
    assert batch_size_of(batch) == N
    sizes = data.draw(cuts(N))
    pieces = list(split(batch, sizes))
    assert [len(numbers(piece)) for piece in pieces] == sizes
    assert [int(number) for piece in pieces for number in numbers(piece)] == list(range(N))
    assert all(type(piece) is type(batch) for piece in pieces)


@pytest.mark.parametrize("name", BATCHES)
def test_pieces_move_whole(name: str) -> None:
    batch, numbers = BATCHES[name]
    moved = to_device(next(iter(split(batch, [3, 4]))), torch.device("cpu"))
    assert type(moved) is type(batch)
    assert [int(number) for number in numbers(moved)] == [0, 1, 2]


def test_the_batch_stays_as_it_was_and_nothing_is_copied() -> None:
    batch = BatchEncoding({"x": X, "y": Y})
    first, second = split(batch, [3, 4])
    assert set(batch) == {"x", "y"} and batch["x"] is X
    assert first["x"].untyped_storage().data_ptr() == second["x"].untyped_storage().data_ptr() == X.data_ptr()
    assert next(split(X, [N])) is X


def test_what_has_no_batch_goes_whole_into_every_piece() -> None:
    batch = BATCHES["shared member"][0]
    for piece in split(batch, [5, 2]):
        assert piece["bias"] is batch["bias"] and piece["step"] is batch["step"]


def test_moving_to_a_device() -> None:
    moved = to_device(
        {"x": X, "deep": [Pair(X, "text")], "packed": pack_sequence([X[:2], X[:1]])}, torch.device("meta")
    )
    assert moved["x"].is_meta and moved["deep"][0].inputs.is_meta and moved["packed"].data.is_meta
    assert moved["packed"].batch_sizes.device.type == "cpu" and not X.is_meta


REFUSED: dict[str, tuple[Any, list[str]]] = {
    "different lengths": ({"x": X, "y": Y[:6]}, ["x has 7", "y has 6"]),
    "different lengths, nested": ({"x": X, "more": {"y": Y[:6]}}, ["x has 7", "more.y has 6"]),
    "different lengths in a tuple": ((X, Y[:6]), ["batch[0] has 7", "batch[1] has 6"]),
    "different lengths in a list": ([X, Y[:6]], ["batch[0] has 7", "batch[1] has 6"]),
    "different lengths in a list beside": ({"x": X, "pair": [X, Y[:6]]}, ["x has 7", "pair[1] has 6"]),
    "too few texts": ({"x": X, "text": ["a", "b"]}, ["text has 2", "7"]),
    "empty": ({"x": X[:0]}, ["x has 0"]),
    "empty list": ([], ["empty"]),
    "empty dict": ({}, ["dict"]),
    "a number": (3, ["int"]),
    "text": ("text", ["str"]),
    "no dimension": (torch.tensor(3.0), ["Tensor"]),
    "none": (None, ["NoneType"]),
    "two ways to read": ([X, X], ["2 samples", "7 items"]),
    "two ways to read, one": ([X], ["1 samples", "7 items"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_names_and_sizes(name: str) -> None:
    batch, words = REFUSED[name]
    with pytest.raises(InvalidBatch) as caught:
        batch_size_of(batch)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize("sizes", [[], [3], [3, 5], [0, 7], [-1, 8], [8]])
def test_sizes_that_are_not_the_batch(sizes: list[int]) -> None:
    with pytest.raises(InvalidBatchSizes, match="batch of 7"):
        split(X, sizes)


def test_a_list_is_read_as_it_is_told() -> None:
    assert batch_size_of([X, X], list_of_samples=True) == 2
    assert batch_size_of([X, X], list_of_samples=False) == 7
    assert [len(piece) for piece in split([X, X, X], [2, 1], list_of_samples=True)] == [2, 1]
    assert [piece[1].shape[0] for piece in split([X, X], [2, 5], list_of_samples=False)] == [2, 5]
    assert [is_list_of_samples(batch) for batch in (RAGGED, [X, Y], (X, Y), X)] == [True, False, None, None]


def packed(lengths: list[int], **more: Any) -> dict[str, Any]:
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return {"ids": ids, "wide": ids[None], "cu_seqlens": offsets, "max_seqlen": max(lengths), **more}


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9), data=st.data())
def test_packed_sequences_are_cut_at_their_borders(lengths: list[int], data: st.DataObject) -> None:
    number = len(lengths)
    batch = packed(lengths, label=torch.arange(number), scale=torch.ones(()), max_length=torch.tensor(99))
    assert batch_size_of(batch) == number
    start = 0
    for size, piece in zip(sizes := data.draw(cuts(number)), split(batch, sizes)):
        own = lengths[start : start + size]
        assert piece["cu_seqlens"].tolist() == np.cumsum([0, *own]).tolist()
        assert piece["ids"].tolist() == [start + i for i, length in enumerate(own) for _ in range(length)]
        assert torch.equal(piece["wide"], piece["ids"][None])
        assert piece["label"].tolist() == list(range(start, start + size))
        assert piece["max_seqlen"] == max(own)
        assert piece["scale"] is batch["scale"]
        start += size


def test_packed_queries_and_keys_have_borders_of_their_own() -> None:
    batch = {
        "q": torch.arange(5), "memory": torch.arange(6),
        "cu_seqlens_q": torch.tensor([0, 2, 5]), "max_seqlen_q": 3,
        "cu_seqlens_k": torch.tensor([0, 5, 6]), "max_seqlen_k": 5,
    }  # fmt: skip
    assert batch_size_of(batch) == 2
    second = list(split(batch, [1, 1]))[1]
    assert second["q"].tolist() == [2, 3, 4] and second["memory"].tolist() == [5]
    assert (second["max_seqlen_q"], second["max_seqlen_k"]) == (3, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"cu_seqlens": torch.tensor([1, 3])},
        {"cu_seqlens": torch.tensor([0, 3, 2])},
        {"cu_seqlens": torch.tensor([0])},
        {"other": torch.arange(5)},
        {"cu_seqlens_k": torch.tensor([0, 1, 2, 6])},
    ],
)
def test_packed_batches_that_make_no_sense(change: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        list(split({**packed([2, 4]), **change}, [1, 1]))


@pytest.mark.parametrize("lengths", [(3, 2, 2, 1), (1, 3, 2, 2)])
def test_packed_sequence_of_torch(lengths: tuple[int, ...]) -> None:
    rows = [torch.full((length, 2), float(index)) for index, length in enumerate(lengths)]
    batch = {"rows": pack_sequence(rows, enforce_sorted=False), "y": torch.arange(4)}
    assert batch_size_of(batch) == 4
    found = []
    for piece in split(batch, [3, 1]):
        assert isinstance(piece["rows"], PackedSequence)
        padded, own = pad_packed_sequence(piece["rows"], batch_first=True)
        assert own.tolist() == [lengths[i] for i in piece["y"].tolist()]
        found += padded[:, 0, 0].tolist()
    assert found == [0, 1, 2, 3]


def test_nested_tensors() -> None:
    rows = [torch.full((length, 2), float(index)) for index, length in enumerate((3, 1, 2))]
    batch = (torch.nested.nested_tensor(rows, layout=torch.jagged), torch.arange(3))
    first, second = split(batch, [2, 1])
    assert first[0].is_nested and [len(row) for row in first[0].unbind()] == [3, 1]
    assert [row[0, 0].item() for row in second[0].unbind()] == [2.0]
