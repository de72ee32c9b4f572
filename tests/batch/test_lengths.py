"""How long items are, whatever the batch is, and batches without padding that all of their items have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from microbatch.batch.lengths import lengths_of, trimmed
from microbatch.batch.split import batch_size_of, split, take
from microbatch.errors import InvalidBatch

WIDTH = 7
LENGTHS = [3, 1, 5, 2]


def mask_of(lengths: list[int], side: str = "right", width: int = WIDTH) -> Tensor:
    places = torch.arange(width)
    if side == "left":
        places = width - 1 - places
    return (places[None] < torch.tensor(lengths)[:, None]).long()


def padded(lengths: list[int], side: str = "right", width: int = WIDTH) -> dict[str, Tensor]:
    mask = mask_of(lengths, side, width)
    ids = torch.arange(1, mask.numel() + 1).reshape(mask.shape)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}


RAGGED = [torch.ones(n, 2) for n in LENGTHS]
FORMS: dict[str, Any] = {
    "mask": padded(LENGTHS),
    "left": padded(LENGTHS, "left"),
    "padding mask": {"x": torch.ones(4, WIDTH, 3), "src_key_padding_mask": mask_of(LENGTHS) == 0},
    "array": {"x": np.ones((4, WIDTH)), "attention_mask": mask_of(LENGTHS).numpy()},
    "packed": {"ids": torch.arange(11), "cu_seqlens": torch.tensor([0, 3, 4, 9, 11])},
    "nested": torch.nested.nested_tensor(RAGGED, layout=torch.jagged),
    "packed sequence": pack_sequence(RAGGED, enforce_sorted=False),
    "tensors": RAGGED,
    "texts": ["abc", "d", "efghi", "jk"],
    "ids": [[1, 2, 3], [4], [5, 6, 7, 8, 9], [1, 2]],
    "dicts": [{"input_ids": list(range(n)), "label": n} for n in LENGTHS],
    "pairs": [(tensor, torch.tensor(1)) for tensor in RAGGED],
}
END_TO_END = {"packed", "nested", "packed sequence"}


@pytest.mark.parametrize("form", FORMS)
def test_lengths_are_read_off(form: str) -> None:
    batch = FORMS[form]
    samples = True if isinstance(batch, list) else None
    found = lengths_of(batch, batch_size_of(batch, list_of_samples=samples), list_of_samples=samples)
    assert found.values == LENGTHS
    assert found.padded == (form not in END_TO_END)


def test_the_users_function_wins() -> None:
    batch = padded(LENGTHS) | {"n": torch.tensor([9, 8, 7, 6])}
    assert lengths_of(batch, 4, lambda item: int(item["n"])).values == [9, 8, 7, 6]
    assert lengths_of(FORMS["texts"], 4, lambda item: 2 * len(item), list_of_samples=True).values == [6, 2, 10, 4]


def test_token_ids_without_a_mask_are_all_as_long() -> None:
    assert lengths_of({"ids": torch.zeros(3, 5, dtype=torch.long)}, 3).values == [5, 5, 5]


@pytest.mark.parametrize("batch", [torch.ones(4, 3, 8, 8), {"x": torch.ones(4, 6), "loss_mask": mask_of(LENGTHS)}])
def test_what_tells_no_length_is_an_error_with_a_remedy(batch: Any) -> None:
    if isinstance(batch, dict):
        batch["loss_mask"] = batch["loss_mask"].float()
    with pytest.raises(InvalidBatch, match=r"TokenBudget\(8192, length="):
        lengths_of(batch, 4)


@pytest.mark.parametrize("value", [2.5, None, -1, "long"])
def test_a_length_is_a_whole_number(value: Any) -> None:
    with pytest.raises(InvalidBatch, match="for item 0"):
        lengths_of(torch.ones(2, 3), 2, lambda item: value)


@pytest.mark.parametrize("side", ["left", "right"])
@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, WIDTH), min_size=1, max_size=6))
def test_nothing_but_padding_is_trimmed(side: str, lengths: list[int]) -> None:
    batch = padded(lengths, side)
    cut = trimmed(batch)
    assert cut["input_ids"].shape[1] == max(1, *lengths)
    for name, value in batch.items():
        kept = batch["attention_mask"].bool()
        assert torch.equal(cut[name][cut["attention_mask"].bool()], value[kept])


def test_every_member_with_tokens_is_trimmed() -> None:
    mask = mask_of([2, 3])
    batch = {
        "attention_mask": mask,
        "embedded": torch.randn(2, WIDTH, 4),
        "position_ids": torch.arange(WIDTH)[None].expand(2, -1),
        "attention_mask_2d": torch.ones(2, 1, WIDTH, WIDTH),
        "label": torch.tensor([0, 1]),
        "nested": (torch.randn(2, WIDTH, WIDTH + 1), None),
    }
    cut = trimmed(batch)
    assert [tuple(cut[n].shape) for n in batch if n != "nested"] == [(2, 3), (2, 3, 4), (2, 3), (2, 1, 3, 3), (2,)]
    assert tuple(cut["nested"][0].shape) == (2, 3, WIDTH + 1)


def test_targets_that_happen_to_have_as_many_columns_keep_the_batch_whole() -> None:
    batch = {"attention_mask": mask_of([2, 3]), "classes": torch.randint(2, 9, (2, WIDTH))}
    assert trimmed(batch) is batch


def test_pairs_of_tokens_keep_the_batch_whole() -> None:
    batch = {"attention_mask": mask_of([2, 3]), "relations": torch.zeros(2, WIDTH, WIDTH)}
    assert trimmed(batch) is batch


def test_padding_on_the_right_is_trimmed_by_the_users_lengths() -> None:
    ids = padded([2, 4])["input_ids"]
    assert torch.equal(trimmed({"ids": ids}, lambda item: int((item["ids"] != 0).sum()))["ids"], ids[:, :4])


@pytest.mark.parametrize("form", sorted(set(FORMS) - END_TO_END))
def test_items_are_taken_in_any_order(form: str) -> None:
    batch = FORMS[form]
    samples = True if isinstance(batch, list) else None
    singles = list(split(batch, [1] * 4, list_of_samples=samples))
    chosen = take(batch, [2, 0, 3], list_of_samples=samples)
    assert type(chosen) is type(batch)
    for place, single in zip([2, 0, 3], split(chosen, [1] * 3, list_of_samples=samples), strict=True):
        assert repr(single) == repr(singles[place])


def test_all_items_in_their_order_are_the_batch_itself() -> None:
    batch = padded(LENGTHS)
    assert take(batch, [0, 1, 2, 3]) is batch
    assert take(batch, range(1, 3))["input_ids"].data_ptr() == batch["input_ids"][1:].data_ptr()  # a view


@pytest.mark.parametrize("form", sorted(END_TO_END - {"packed"}))
def test_sequences_end_to_end_are_cut_in_order_only(form: str) -> None:
    with pytest.raises(InvalidBatch, match="in their order"):
        take(FORMS[form], [1, 0])
