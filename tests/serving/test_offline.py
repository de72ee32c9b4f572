"""`map` and `imap`: one pass's outputs, whatever the data, the size, and what fails on the way."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import microbatch
from microbatch.batch.token_budget import TokenBudget
from microbatch.serving.offline.mapping import imap
from microbatch.serving.offline.mapping import map as map_
from tests.serving.jobs import (
    LONGEST,
    WIDTH,
    PlantedOutOfMemory,
    branches,
    encoder,
    one_pass,
    padded,
    rows,
    sequences,
)

ITEMS = 45
SIZES: list[Any] = [1, 7, 16, 1000, "auto", TokenBudget(64)]
NEAR: Any = {"rtol": 0.0, "atol": 1e-12}

assert_close = torch.testing.assert_close


class Indexed(Dataset[Any]):
    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Several(Indexed):
    """As data sets that give a list of items at a time."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.items[index] for index in indices]


class Streamed(IterableDataset[Any]):
    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


@dataclasses.dataclass
class Record:
    x: Tensor


DATA: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x,
    "array": lambda x: x.numpy(),
    "dict": lambda x: {"x": x},
    "tuple": lambda x: (x,),
    "list": list,
    "list of arrays": lambda x: list(x.numpy()),
    "list of numbers": lambda x: x.tolist(),
    "list of dicts": lambda x: [{"x": row} for row in x],
    "data set": Indexed,
    "data set of lists": Several,
    "tensor data set": TensorDataset,
    "iterable data set": Streamed,
    "generator": iter,
}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("form", DATA)
def test_every_form_of_data_gives_what_one_pass_gives(form: str, size: Any) -> None:
    if isinstance(size, TokenBudget) and form in ("tensor", "array", "dict", "tuple"):
        size = TokenBudget(64, length=lambda item: 3)
    model, x = branches(), rows(ITEMS)
    expected = one_pass(model, lambda: model(x))
    found = map_(model, DATA[form](x), size, forward=as_x)
    assert type(found) is type(expected)
    assert type(found.both) is list
    assert_close(found, expected, check_dtype=False, rtol=0, atol=1e-6 if form == "list of numbers" else 1e-12)


def as_x(model: nn.Module, batch: Any) -> Any:
    """However the items came."""
    if isinstance(batch, dict):
        batch = batch["x"]
    return model((batch[0] if isinstance(batch, tuple) else batch).double())


@pytest.mark.parametrize("form", DATA)
def test_imap_gives_item_by_item_in_order(form: str) -> None:
    model, x = branches(), rows(ITEMS)
    expected = one_pass(model, lambda: model(x))
    found = list(imap(model, DATA[form](x), 7, forward=as_x))
    assert len(found) == ITEMS
    for row, one in enumerate(found):
        assert_close(one.mean, expected.mean[row], rtol=0, atol=1e-6)
        assert_close(one.both[1], expected.both[1][row], rtol=0, atol=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_padded_batches_give_one_pass_and_zeros_for_padding(size: Any, side: str) -> None:
    model = encoder()
    batch = padded(sequences(ITEMS), side, LONGEST + 5)
    expected = one_pass(model, lambda: model(**batch))
    found = map_(model, batch, size)
    shown = batch["attention_mask"].bool()
    assert found["tokens"].shape == expected["tokens"].shape
    assert_close(found["tokens"][shown], expected["tokens"][shown], **NEAR)
    assert_close(found["pooled"], expected["pooled"], **NEAR)
    assert_close(found["scores"][0], expected["scores"][0], **NEAR)
    assert found["scores"][1] is None
    assert found["version"] == "1"
    if not isinstance(size, int):
        assert not found["tokens"][~shown].any()


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("window", [5, 4096])
@pytest.mark.parametrize("form", ["list", "data set", "generator"])
def test_items_of_different_lengths_come_back_in_order(size: Any, window: int, form: str) -> None:
    model, items = encoder(), sequences(ITEMS)
    samples: Any = [{"input_ids": item, "attention_mask": torch.ones_like(item)} for item in items]
    found = map_(model, DATA[form](samples), size, window=window)
    assert len(found["tokens"]) == ITEMS
    for row, sample in enumerate(samples):
        alone = one_pass(model, lambda s=sample: model(**{name: value[None] for name, value in s.items()}))  # type: ignore[misc]
        assert_close(found["tokens"][row], alone["tokens"][0], **NEAR)
        assert_close(found["pooled"][row], alone["pooled"][0], **NEAR)


def test_the_form_of_outputs_does_not_depend_on_the_pieces() -> None:
    model, items = encoder(), sequences(9)
    samples = [{"input_ids": item, "attention_mask": torch.ones_like(item)} for item in items]
    sizes: list[Any] = [1, 4, 100]
    for size in sizes:
        assert [tuple(row.shape) for row in map_(model, samples, size)["tokens"]] == [(len(i), WIDTH) for i in items]
    batch = padded(items, width=LONGEST + 3)
    for size in [*sizes, TokenBudget(10_000), "auto"]:
        assert tuple(map_(model, batch, size)["tokens"].shape) == (9, LONGEST + 3, WIDTH)


def test_imap_of_different_lengths() -> None:
    model, items = encoder(), sequences(ITEMS)
    samples = [{"input_ids": item, "attention_mask": torch.ones_like(item)} for item in items]
    expected = map_(model, samples, 4)
    for row, one in enumerate(imap(model, iter(samples), TokenBudget(64), window=10)):
        assert_close(one["tokens"], expected["tokens"][row], **NEAR)
        assert one["version"] == "1"


def test_items_that_nobody_says_how_to_pad_only_run_with_their_like() -> None:
    seen = []

    def total(batch: Tensor) -> Tensor:
        seen.append(tuple(batch.shape))
        return batch.sum(1)

    items = [torch.full((n % 3 + 1,), float(n)) for n in range(20)]
    assert_close(map_(total, items, 4), torch.stack([item.sum() for item in items]))
    assert {shape[1] for shape in seen} == {1, 2, 3}
    assert_close(map_(total, items), torch.stack([item.sum() for item in items]))


def test_texts_with_a_collate() -> None:
    texts = ["a" * (n * 7 % 19 + 1) for n in range(30)]

    def collate(batch: list[str]) -> dict[str, Tensor]:
        return padded([torch.full((len(text),), 3) for text in batch])

    model = encoder()
    found = map_(model, texts, collate=collate, forward=lambda m, b: m(**b)["pooled"])
    for row, text in enumerate(texts):
        one = collate([text])
        assert_close(found[row], one_pass(model, lambda b=one: model(**b)["pooled"][0]), **NEAR)  # type: ignore[misc]


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=40),
    tokens=st.integers(1, 60),
    window=st.integers(1, 50),
    failing=st.sets(st.integers(0, 12)),
)
def test_order_is_kept_whatever_happens(lengths: list[int], tokens: int, window: int, failing: set[int]) -> None:
    items = [{"input_ids": torch.full((n,), row), "attention_mask": torch.ones(n)} for row, n in enumerate(lengths)]

    class Which(nn.Module):
        calls = 0

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            self.calls += 1
            if self.calls in failing and len(input_ids) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return input_ids.amax(1)

    sizes: list[Any] = [TokenBudget(tokens), "auto", tokens]
    for size in sizes:
        logging.disable(logging.WARNING)
        try:
            found = map_(Which(), iter(items), size, window=window)
        finally:
            logging.disable(logging.NOTSET)
        assert found.tolist() == list(range(len(lengths)))


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=40), tokens=st.integers(12, 100))
def test_no_piece_is_above_its_budget_and_none_runs_twice(lengths: list[int], tokens: int) -> None:
    pieces: list[Any] = []

    def first(batch: dict[str, Tensor]) -> Tensor:
        pieces.append(tuple(batch["input_ids"].shape))
        return batch["input_ids"][:, 0]

    items = [{"input_ids": torch.ones(n), "attention_mask": torch.ones(n)} for n in lengths]
    _, report = map_(first, items, TokenBudget(tokens), forward=lambda m, b: m(b), return_report=True)
    probes = len(pieces) - report.pieces  # one item with padding and without
    assert probes in (0, 2)
    assert all(n * width <= tokens for n, width in pieces)
    assert report.items == len(lengths)
    assert report.tokens == sum(lengths)
    assert report.padded_tokens >= report.tokens


def test_padding_stays_where_outputs_depend_on_it(caplog: pytest.LogCaptureFixture) -> None:
    class Unmasked(nn.Module):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return torch.cos(input_ids.double()).mean(1)

    items = sequences(ITEMS)
    batch = padded(items, width=LONGEST)
    for size in (TokenBudget(100), "auto"):
        found, report = map_(Unmasked(), batch, size, return_report=True)
        assert_close(found, Unmasked()(**batch), **NEAR)
        assert "depend on how far it is padded" in caplog.text
        caplog.clear()
        assert not isinstance(size, TokenBudget) or report.pieces == -(-ITEMS // (100 // LONGEST))
    samples = [{"input_ids": item, "attention_mask": torch.ones_like(item)} for item in items]
    map_(Unmasked(), samples, 8)
    assert "depend on how far it is padded" in caplog.text
    caplog.clear()
    map_(encoder(), batch, TokenBudget(100))
    map_(encoder(), samples, 8)
    assert caplog.text == ""


def test_lengths_save_work() -> None:
    items = [{"input_ids": torch.ones(n), "attention_mask": torch.ones(n)} for n in [1, 64] * 64]
    run = lambda m, b: b["input_ids"].sum(1)  # noqa: E731
    _, report = map_(nn.Identity(), items, TokenBudget(512), forward=run, return_report=True)
    assert report.padding < 0.01
    assert report.padded_tokens < 0.6 * 128 * 64


@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize("size", [6, "auto", TokenBudget(48)], ids=str)
def test_a_piece_that_runs_out_of_memory_runs_again_in_smaller_ones(
    at: int, size: Any, caplog: pytest.LogCaptureFixture
) -> None:
    inner = encoder()
    batch = padded(sequences(ITEMS))
    expected = one_pass(inner, lambda: inner(**batch))
    model = PlantedOutOfMemory(inner, at=(at,))
    found, report = map_(model, batch, size, return_report=True)
    assert_close(found["pooled"], expected["pooled"], **NEAR)
    if at < report.pieces and model.calls[at] > 1:
        assert report.out_of_memory == 1
        assert "run again in smaller pieces" in caplog.text
        assert "CUDA out of memory" in caplog.text


@pytest.mark.parametrize("size", [32, "auto", TokenBudget(10_000)], ids=str)
def test_a_lasting_limit_is_remembered(size: Any) -> None:
    inner, x = branches(), rows(300)
    model = PlantedOutOfMemory(inner, above=10)
    if isinstance(size, TokenBudget):
        size = TokenBudget(100, length=lambda item: 3)
    found, report = map_(model, x, size, return_report=True)
    assert_close(found.mean, one_pass(inner, lambda: inner(x)).mean, **NEAR)
    assert report.out_of_memory <= 5
    assert max(n for n in model.calls if n <= 10) >= 4


@pytest.mark.parametrize("size", [32, "auto"])
def test_memory_that_others_take_meanwhile(size: Any) -> None:
    class Shrinking(PlantedOutOfMemory):
        def forward(self, x: Tensor) -> Any:
            self.above = 1000 if len(self.calls) < 7 else 3
            return super().forward(x)

    inner, x = branches(), rows(200)
    model = Shrinking(inner)
    assert_close(map_(model, x, size).mean, one_pass(inner, lambda: inner(x)).mean, **NEAR)
    assert len(model.calls) < 120


def test_one_item_that_does_not_fit_says_what_fills_the_memory() -> None:
    model = PlantedOutOfMemory(branches(), above=0)
    model.eval()
    with pytest.raises(microbatch.DoesNotFit, match=r"one item alone, item 0 \(CUDA: CUDA out of memory"):
        map_(model, rows(4), 2)
    small = PlantedOutOfMemory(encoder(), above=11)
    items = [torch.ones(n, dtype=torch.long) for n in (3, 12, 4)]
    samples = [{"input_ids": item, "attention_mask": torch.ones_like(item)} for item in items]
    with pytest.raises(microbatch.DoesNotFit, match=r"item 1 .* needs weights"):
        map_(small, samples)


def test_the_model_is_left_as_it_was_found() -> None:
    model = branches()
    model.train()
    model.norm.eval()
    model.line.weight.grad = torch.ones_like(model.line.weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    map_(model, rows(10), 3)
    with pytest.raises(RuntimeError):
        map_(model, rows(10)[:, :2], 3)
    stream = imap(model, rows(10), 3)
    next(stream)
    assert not model.training
    stream.close()  # type: ignore[attr-defined]
    assert [model.training, model.norm.training, model.drop.training] == [True, False, True]
    assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert bool((model.line.weight.grad == 1).all())


def test_outputs_can_be_trained_on() -> None:
    for data, size in ((rows(10), 3), (iter(rows(10)), 3), (rows(4), 100)):
        found = map_(branches(), data, size).mean
        (found * torch.ones((), dtype=torch.float64, requires_grad=True)).sum().backward()
    one = next(iter(imap(branches(), rows(10), 3))).mean
    (one * torch.ones((), dtype=torch.float64, requires_grad=True)).backward()


def test_an_interruption_leaves_the_model_as_it_was() -> None:
    model = branches()

    def interrupted(m: nn.Module, batch: Tensor) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        map_(model, rows(10), forward=interrupted)
    assert model.training
    assert not torch.is_inference_mode_enabled()


def test_an_error_of_the_model_says_at_which_items() -> None:
    def fails(batch: Tensor) -> Tensor:
        if float(batch.max()) >= 6:
            raise ValueError("seven is wrong")
        return batch

    with pytest.raises(ValueError, match="seven") as caught:
        map_(fails, torch.arange(10.0), 4)
    assert "items 4 to 7" in caught.value.__notes__[0]
