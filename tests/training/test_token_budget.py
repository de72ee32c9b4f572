"""A step in pieces by length: the gradient of the whole batch, with less work, whatever runs out of memory."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from microbatch.batch.token_budget import TokenBudget
from microbatch.errors import DoesNotFit, InvalidBatch
from microbatch.training.step import TrainStep
from tests.training.jobs import (
    LONGEST,
    LOSSES,
    by_token,
    difference,
    forward,
    gradients_of,
    reference,
    sequences,
    tagger,
)

pytestmark = pytest.mark.alone


def clean(batch: dict[str, Tensor], side: str = "right") -> dict[str, Tensor]:
    """Padding is padding: one token, on either side."""
    batch = dict(batch, tokens=batch["tokens"].masked_fill(batch["padding"], 0))
    if side == "left":
        batch = {name: value.flip(1) if value.dim() > 1 else value for name, value in batch.items()}
    return batch


def step_of(model: nn.Module, loss: Any, budget: Any, **options: Any) -> TrainStep:
    options.setdefault("forward", forward)
    return TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, micro_batch_size=budget, **options)


@pytest.mark.parametrize("tokens", [1, LONGEST, 30, 1000])
@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_that_of_the_whole_batch(name: str, tokens: int) -> None:
    batch, loss = clean(sequences()), LOSSES[name]
    expected = reference(tagger(), loss, batch)
    model = tagger()
    step = step_of(model, loss, TokenBudget(tokens))
    for _ in range(2):
        step.accumulate(batch)
        assert difference(gradients_of(model), expected.gradients) <= 1e-13
    result = step(batch)
    assert abs(result.loss - expected.loss) <= 1e-13 * abs(expected.loss)
    assert difference({n: p.detach() for n, p in model.named_parameters()}, expected.weights) <= 1e-13


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["trimmed", "garbage"])
def test_padding_is_trimmed_on_either_side_where_it_is_padding(side: str, kind: str) -> None:
    batch = clean(sequences(), side) if kind == "trimmed" else sequences()
    widths: list[tuple[int, ...]] = []

    def seen(model: nn.Module, piece: dict[str, Tensor]) -> Any:
        widths.append(tuple(piece["tokens"].shape))
        return forward(model, piece)

    model = tagger()
    result = step_of(model, by_token, TokenBudget(24), forward=seen)(batch)
    lengths = (~batch["padding"]).sum(1)
    assert result.tokens == int(lengths.clamp(min=1).sum())
    widths = widths[-result.num_micro_batches :]  # before them a few items showed that padding does not matter
    assert sum(n for n, _ in widths) == len(lengths)
    if kind == "trimmed":
        assert all(n * width <= 24 for n, width in widths)
        assert result.padded_tokens == sum(n * width for n, width in widths)
    else:
        assert set(widths) <= {(2, LONGEST), (1, LONGEST)}
    expected = reference(tagger(), by_token, batch)
    assert difference({n: p.detach() for n, p in model.named_parameters()}, expected.weights) <= 1e-13


def spread_out(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """A loss that padding takes part in."""
    return output.square().sum(), len(output)


@pytest.mark.parametrize("loss", [spread_out, by_token])
@pytest.mark.parametrize("trim", [None, True, False])
def test_padding_stays_where_the_loss_depends_on_it(
    trim: bool | None, loss: Any, caplog: pytest.LogCaptureFixture
) -> None:
    batch = clean(sequences())
    widths: list[int] = []

    def seen(model: nn.Module, piece: dict[str, Tensor]) -> Any:
        widths.append(piece["tokens"].shape[1])
        return forward(model, piece)

    model = tagger()
    step = step_of(model, loss, TokenBudget(24, trim=trim), forward=seen)
    pieces = [step(batch).num_micro_batches for _ in range(2)]
    keeps = trim is False or (trim is None and loss is spread_out)
    assert ({LONGEST} == set(widths[-pieces[1] :])) == keeps
    shown = len(widths) - sum(pieces)
    assert 2 <= shown <= 8 if trim is None else shown == 0
    if keeps:
        assert pieces == [-(-13 // (24 // LONGEST))] * 2
    assert ("depends on padding" in caplog.text) == (trim is None and loss is spread_out)


def test_a_batch_norm_keeps_padding() -> None:
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4)).double()
    step = TrainStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda o, b: (o.sum(), len(o)),
        batch_norm="frozen",
        micro_batch_size=TokenBudget(4),
    )
    assert not step._can_show


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), items=st.integers(1, 20), tokens=st.integers(1, 200))
def test_any_lengths_and_budgets(seed: int, items: int, tokens: int) -> None:
    batch = clean(sequences(seed, items))
    if not (batch["targets"] != -100).any():
        return
    model = tagger()
    step_of(model, by_token, TokenBudget(tokens)).accumulate(batch)
    assert difference(gradients_of(model), reference(tagger(), by_token, batch).gradients) <= 1e-13


def test_a_ragged_list_of_samples() -> None:
    batch = clean(sequences())
    samples = [
        {name: value[row][~batch["padding"][row]] if value.dim() > 1 else value[row] for name, value in batch.items()}
        for row in range(len(batch["tokens"]))
    ]

    def padded(piece: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        values = {"tokens": 0, "padding": True, "targets": -100}
        made = {n: pad_sequence([s[n] for s in piece], True, float(v)) for n, v in values.items()}
        return made | {"advantages": torch.stack([sample["advantages"] for sample in piece])}

    model, widths = tagger(), []

    def run(model: nn.Module, piece: list[dict[str, Tensor]]) -> Any:
        widths.append(len(piece) * max(len(sample["tokens"]) for sample in piece))
        return forward(model, padded(piece))

    step = step_of(model, lambda o, p: by_token(o, padded(p)), TokenBudget(24), forward=run)
    step.accumulate(samples)
    assert max(widths) <= 24
    assert difference(gradients_of(model), reference(tagger(), by_token, batch).gradients) <= 1e-13


def test_sequences_end_to_end_keep_their_order() -> None:
    lengths = [3, 5, 2, 9, 1, 4]
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    batch = {"x": torch.randn(24, 4, dtype=torch.float64), "cu_seqlens": ends}
    model, seen = nn.Linear(4, 2).double(), []

    def run(model: nn.Module, piece: dict[str, Tensor]) -> Any:
        seen.append(piece["cu_seqlens"].diff().tolist())
        return model(piece["x"])

    result = step_of(model, lambda o, p: (o.square().sum(), len(o)), TokenBudget(10), forward=run)(batch)
    assert seen == [[3, 5, 2], [9, 1], [4]]
    assert result.tokens == result.padded_tokens == 24


def test_lengths_by_the_users_function() -> None:
    batch = clean(sequences())
    batch["how_many"] = (~batch["padding"]).sum(1)
    renamed = {("hidden" if name == "padding" else name): value for name, value in batch.items()}
    model = tagger()
    step = step_of(
        model,
        by_token,
        TokenBudget(24, length=lambda item: int(item["how_many"])),
        forward=lambda m, b: m(b["tokens"], b["hidden"]),
    )
    result = step(renamed)
    expected = reference(tagger(), by_token, batch)
    assert result.num_micro_batches > 2
    assert difference({n: p.detach() for n, p in model.named_parameters()}, expected.weights) <= 1e-13


def test_no_lengths_are_one_clear_error_and_weights_stay() -> None:
    model = nn.Linear(4, 2)
    before = model.weight.clone()
    with pytest.raises(InvalidBatch, match="length="):
        step_of(model, lambda o, _: (o.sum(), len(o)), TokenBudget(9), forward=None)(torch.randn(5, 4))
    assert torch.equal(model.weight, before)


def test_an_item_above_the_budget_is_alone_and_said(caplog: pytest.LogCaptureFixture) -> None:
    batch = clean(sequences())
    longest = int((~batch["padding"]).sum(1).max())
    result = step_of(tagger(), by_token, TokenBudget(longest - 1, trim=True))(batch)
    assert f"has {longest} tokens, more than the budget of {longest - 1}" in caplog.text
    assert result.batch_size == 13


class OutOfMemory:
    """Runs out above a number of tokens in a piece, or once at a call."""

    def __init__(self, *, above: int | None = None, at: int | None = None) -> None:
        self.above, self.at, self.calls = above, at, 0

    def __call__(self, model: nn.Module, piece: dict[str, Tensor]) -> Any:
        self.calls += 1
        if self.calls - 1 == self.at or (self.above and piece["tokens"].numel() > self.above):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(model, piece)


@pytest.mark.parametrize("at", range(3))
def test_out_of_memory_at_any_piece_halves_the_budget(at: int, caplog: pytest.LogCaptureFixture) -> None:
    batch = clean(sequences())
    model = tagger()
    result = step_of(model, by_token, TokenBudget(30, trim=True), forward=OutOfMemory(at=at))(batch)
    expected = reference(tagger(), by_token, batch)
    assert difference({n: p.detach() for n, p in model.named_parameters()}, expected.weights) <= 1e-13
    assert [attempt.token_budget for attempt in result.attempts] == [30, 15]
    assert "a budget of 30 tokens" in caplog.text
    assert result.attempts[1].micro_batch_size == result.micro_batch_size


def test_a_lasting_limit_is_kept_and_grows_back(caplog: pytest.LogCaptureFixture) -> None:
    step = step_of(tagger(), by_token, TokenBudget(96, trim=True, piece_cost=96), forward=OutOfMemory(above=30))
    results = [step(clean(sequences(seed, 40))) for seed in range(4)]
    assert len(results[0].attempts) == 3
    assert all(len(result.attempts) == 1 for result in results[1:])
    assert results[1].attempts[0].token_budget == 24
    step.forward = forward
    with caplog.at_level(logging.INFO):
        later = [step(clean(sequences(seed, 40))).attempts[-1].token_budget for seed in range(25)]
    assert later[-1] == 96
    assert "the next step tries" in caplog.text


def test_one_item_that_does_not_fit_is_said() -> None:
    model = tagger()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(DoesNotFit, match=r"longest item alone, \d+ tokens"):
        step_of(model, by_token, TokenBudget(48, trim=True), forward=OutOfMemory(above=2))(clean(sequences()))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_result_says_what_ran() -> None:
    result = step_of(tagger(), by_token, TokenBudget(48))(clean(sequences()))
    assert result.tokens is not None and result.padded_tokens is not None
    assert result.tokens <= result.padded_tokens < 13 * LONGEST
    assert json.loads(json.dumps(result.to_json()))["attempts"][0]["token_budget"] == 48
    assert step_of(tagger(), by_token, 4)(clean(sequences())).tokens is None


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found, see `token_budget_cases.py`."""
    folder, root = tmp_path_factory.mktemp("ranks"), Path(__file__).parents[2]
    tables = [f"tests.training.token_budget_cases:{name}" for name in ("replicas", "shards")]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.training.ranks"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), "2", str(folder), *tables],
            cwd=root,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], said
    found: list[dict[str, Any]] = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    for one in found:
        assert "error" not in one, one["error"]
    return found


@pytest.mark.parametrize("table", ["replicas", "shards"])
def test_ranks_with_different_numbers_of_pieces(ranks: list[dict[str, Any]], table: str) -> None:
    cases = ranks[0][f"token_budget:{table}"]
    assert len(cases) >= 4
    for case in cases:
        both = [one[f"token_budget:{table}"][case] for one in ranks]
        assert all(one["difference"] <= 1e-13 for one in both), case
        if "idle" not in case and "whole" not in case:
            assert len({one["pieces"] for one in both}) == 2, case
