"""Accelerate: inexact by itself, exact with `train_step` around the same prepared objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from microbatch.errors import InvalidSettings
from microbatch.training.integrations import accelerated
from tests.training.jobs import difference
from tests.training.taggers import (
    LR,
    ROWS,
    Items,
    Returning,
    as_pair,
    by_label,
    gradients_between,
    loader,
    made,
    token_sums,
    weights_of,
    whole_batch,
)

pytest.importorskip("accelerate", reason="the extra accelerate is not installed")

from accelerate import Accelerator  # type: ignore[import-untyped, unused-ignore]


def loss(output: Any, batch: dict[str, torch.Tensor]) -> Any:
    return token_sums(output["logits"], batch)


def run(model: Returning, size: int | str, accelerator: Any = None) -> Any:
    """The last result; every batch holds all items."""
    accelerator = accelerator or Accelerator(cpu=True)
    wrapped, optimizer, batches = accelerator.prepare(model, SGD(model.parameters(), lr=LR), loader(ROWS))
    step = accelerated.train_step(accelerator, wrapped, optimizer, loss, micro_batch_size=size)
    return [step(batch) for batch in batches][-1]


def test_the_original_is_off() -> None:
    model = made()
    expected = whole_batch(model, as_pair(by_label), Items().batch).gradients
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=8)
    wrapped, optimizer, batches = accelerator.prepare(model, SGD(model.parameters(), lr=LR), loader(4))
    before = weights_of(model)
    for batch in batches:
        with accelerator.accumulate(wrapped):
            accelerator.backward(wrapped(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    assert difference(gradients_between(before, weights_of(model)), expected) > 0.01


@pytest.mark.parametrize("size", [1, 5, ROWS, "auto"])
def test_steps_are_exact(size: int | str) -> None:
    model = made()
    expected = whole_batch(model, as_pair(by_label), Items().batch)
    before = weights_of(model)
    result = run(model, size)
    assert difference(gradients_between(before, weights_of(model)), expected.gradients) <= 1e-12
    assert result.loss == pytest.approx(expected.loss, rel=1e-12)


def test_clipping_schedule_and_out_of_memory() -> None:
    model = made()
    expected = whole_batch(model, as_pair(by_label), Items().batch, max_norm=0.05)
    model.memory = 7
    accelerator = Accelerator(cpu=True)
    optimizer = SGD(model.parameters(), lr=LR)
    wrapped, optimizer, schedule = accelerator.prepare(model, optimizer, StepLR(optimizer, 1, gamma=0.5))
    step = accelerated.train_step(
        accelerator, wrapped, optimizer, loss, micro_batch_size=ROWS, max_norm=0.05, scheduler=schedule
    )
    result = step(Items().batch)
    assert [attempt.micro_batch_size for attempt in result.attempts] == [32, 16, 8, 4]
    assert difference(weights_of(model), expected.weights) <= 1e-12
    assert schedule.get_last_lr() == [LR / 2]


def test_mixed_precision_is_the_accelerators() -> None:
    from accelerate.state import AcceleratorState  # type: ignore[import-untyped, unused-ignore]

    AcceleratorState._reset_state(True)
    seen = list[torch.dtype]()
    model = made().float()
    model.head.register_forward_hook(lambda _, args, output: seen.append(output.dtype))
    try:
        run(model, 8, Accelerator(cpu=True, mixed_precision="bf16"))
    finally:
        AcceleratorState._reset_state(True)
    assert set(seen) == {torch.bfloat16}


def test_accumulation_besides_is_refused() -> None:
    with pytest.raises(InvalidSettings, match=r"accumulates 4 batches per step\. Leave .* 4 times as large"):
        run(made(), 4, Accelerator(cpu=True, gradient_accumulation_steps=4))


@pytest.mark.parametrize(
    ("kind", "parallel", "words"),
    [
        ("DEEPSPEED", None, "DEEPSPEED runs backward"),
        ("MEGATRON_LM", None, "MEGATRON_LM runs backward"),
        ("MULTI_GPU", SimpleNamespace(tp_size=2, cp_size=1), "tp_size 2"),
    ],
)
def test_engines_that_cannot_be_exact_are_refused(kind: str, parallel: Any, words: str) -> None:
    accelerator = SimpleNamespace(
        distributed_type=SimpleNamespace(name=kind), parallelism_config=parallel, gradient_accumulation_steps=1
    )
    with pytest.raises(InvalidSettings, match=words) as caught:
        accelerated.check_accelerator(accelerator)
    assert caught.value.remedy
