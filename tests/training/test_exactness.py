"""The gradient of the pieces is the gradient of the whole batch: losses × splits × dtypes × orders of lengths."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from microbatch.training.step import TrainStep
from tests.training.jobs import ITEMS, LOSSES, by_token, difference, forward, gradients_of, reference, sequences, tagger

SPLITS = (1, 5, ITEMS - 1, 100)


def step_of(model: nn.Module, loss: Any, **options: Any) -> TrainStep:
    return TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, forward=forward, **options)


@pytest.mark.parametrize("order", ["as drawn", "sorted"])
@pytest.mark.parametrize("size", SPLITS)
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_in_float64(name: str, size: int, order: str) -> None:
    model, batch, loss = tagger(), sequences(order=order), LOSSES[name]
    expected = reference(model, loss, batch)
    step = step_of(model, loss, micro_batch_size=size)
    for _ in range(2):  # the second step of a loss with several weights takes another way
        step.accumulate(batch)
        assert difference(gradients_of(model), expected.gradients) <= 1e-13
    result = step(batch)
    assert result.loss == pytest.approx(expected.loss, rel=1e-13)
    assert difference({n: p.detach() for n, p in model.named_parameters()}, expected.weights) <= 1e-14
    assert result.num_micro_batches == -(-ITEMS // min(size, ITEMS))


@pytest.mark.parametrize("size", SPLITS)
@pytest.mark.parametrize("name", LOSSES)
def test_float32_is_as_good_as_its_full_batch(name: str, size: int) -> None:
    model, batch, loss = tagger(torch.float32), sequences(1), LOSSES[name]
    exact = reference(copy.deepcopy(model).double(), loss, batch).gradients
    full = difference(reference(model, loss, batch).gradients, exact)
    step_of(model, loss, micro_batch_size=size).accumulate(batch)
    assert difference(gradients_of(model), exact) <= 4 * full


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6), items=st.integers(1, 17), size=st.integers(1, 20), name=st.sampled_from(sorted(LOSSES))
)
def test_any_split_of_any_batch(seed: int, items: int, size: int, name: str) -> None:
    model, batch, loss = tagger(seed=seed), sequences(seed, items), LOSSES[name]
    assume(has_weight(loss(forward(model, batch), batch)))
    expected = reference(model, loss, batch)
    step_of(model, loss, micro_batch_size=size).accumulate(batch)
    assert difference(gradients_of(model), expected.gradients) <= 1e-13


def has_weight(result: Any) -> bool:
    pairs = result.values() if isinstance(result, dict) else [result]
    return any(float(weight) > 0 for _, weight in pairs)


def test_the_reported_loss_does_not_depend_on_the_split() -> None:
    losses = [step_of(tagger(), LOSSES["own_weights"], micro_batch_size=size)(sequences()) for size in SPLITS]
    for result in losses:
        assert result.losses == pytest.approx(losses[0].losses, rel=1e-14)
        assert result.weights == losses[0].weights
        assert result.loss == pytest.approx(sum(result.losses.values()))


def test_weights_given_first_save_the_forward_passes_of_terms_with_own_weights() -> None:
    def weight(batch: dict[str, Tensor]) -> dict[str, Any]:
        return {"samples": len(batch["tokens"]), "tokens": (batch["targets"] != -100).sum()}

    passes: dict[bool, int] = {}
    for given_first in (False, True):
        model, batch, loss = tagger(), sequences(), LOSSES["some_terms"]
        expected = reference(model, loss, batch)
        step = step_of(model, loss, micro_batch_size=4, weight=weight if given_first else None)
        step.accumulate(batch)
        calls: list[int] = []
        model.head.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        step.accumulate(batch)
        assert difference(gradients_of(model), expected.gradients) <= 1e-13
        passes[given_first] = len(calls)
    assert passes == {False: 8, True: 4}


def test_one_weight_known_first_divides_as_a_hand_written_loop_does() -> None:
    model, batch = tagger(torch.float32), sequences()
    by_hand = copy.deepcopy(model)
    number = (batch["targets"] != -100).sum()
    for start in range(0, ITEMS, 4):
        piece = {name: value[start : start + 4] for name, value in batch.items()}
        if (piece["targets"] != -100).any():
            (by_token(forward(by_hand, piece), piece)[0] / number).backward()
    step_of(model, by_token, micro_batch_size=4, weight=lambda b: (b["targets"] != -100).sum()).accumulate(batch)
    assert difference(gradients_of(model), gradients_of(by_hand)) == 0.0


def test_an_unsplit_batch_is_the_ordinary_step_to_the_last_bit() -> None:
    for name, loss in LOSSES.items():
        model, batch = tagger(torch.float32), sequences()
        expected = reference(model, loss, batch)
        step_of(model, loss, micro_batch_size=ITEMS).accumulate(batch)
        assert difference(gradients_of(model), expected.gradients) == 0.0, name


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("size", [2, ITEMS])
def test_clipping_by_the_global_norm(size: int, max_norm: float) -> None:
    model, batch = tagger(), sequences()
    expected = reference(model, by_token, batch, max_norm=max_norm, lr=10.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    result = TrainStep(model, optimizer, by_token, forward=forward, micro_batch_size=size, max_norm=max_norm)(batch)
    norm = torch.stack([g.square().sum() for g in expected.gradients.values()]).sum().sqrt().item()
    assert result.grad_norm == pytest.approx(norm, rel=1e-13)
    assert difference({n: p.detach() for n, p in model.named_parameters()}, expected.weights) <= 1e-13
