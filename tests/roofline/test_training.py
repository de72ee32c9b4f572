"""What the optimizer adds to a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from microbatch.errors import InvalidSettings
from microbatch.hardware.catalogue import load_device
from microbatch.roofline.balance import weights_ridge_of
from microbatch.roofline.training import OPTIMIZERS, state_bytes, with_optimizer
from microbatch.work.operators import Operator, Work
from microbatch.work.polynomial import constant
from tests.roofline import works


def training_work(dtype: str = "fp32", size: int = 4) -> Work:
    """One Linear 512 → 512: forward, the gradient of its input, the gradient of its weight."""
    forward = works.linear(512, 512, dtype)
    of_weight = Operator(
        name="aten::mm", kind="matmul", layer="linear", dtype=dtype, flops=forward.flops, backward=True,
        read_bytes=works.per_item(2 * size * 512), written_bytes=constant(size * 512 * 512),
    )  # fmt: skip
    return Work(
        operators=(forward, replace(forward, backward=True), of_weight), mode="training", dtype=dtype,
        parameters=512 * 512, weight_bytes=size * 512 * 512,
    )  # fmt: skip


@pytest.mark.parametrize("k", [1, 2, 8, 64])
def test_the_ridge_of_training_with_adam(k: int) -> None:
    """b* = (16 + 28/k)/6 · F/BW in fp32."""
    spec = load_device("a100")
    found = weights_ridge_of(with_optimizer(training_work(), "adam", k), spec)
    assert found == pytest.approx((16 + 28 / k) / 6 * spec.flops["fp32"] / spec.bandwidth, rel=1e-3)


def test_adam_in_fp32_moves_28_bytes_a_parameter() -> None:
    step = with_optimizer(training_work(), "adam").operators[-1]
    assert (step.kind, step.read_bytes(1) + step.written_bytes(1)) == ("optimizer", 28 * 512 * 512)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_what_a_step_reads_beside_weight_and_gradient(name: str) -> None:
    rule = OPTIMIZERS[name]
    assert rule.reads == 2 + rule.states
    assert rule.writes == 1 + rule.states
    kept = state_bytes(training_work("bf16", 2), name)
    assert kept == {"gradients": 2 * 512 * 512, "optimizer": rule.states * 2 * 512 * 512}


def test_accumulation_shares_the_step_but_not_the_adding_up() -> None:
    one, many = (with_optimizer(training_work(), "adam", k).operators for k in (1, 8))
    assert many[-1].read_bytes(1) == one[-1].read_bytes(1) / 8
    assert many[-2] == one[-2]


def test_mistakes_are_named() -> None:
    with pytest.raises(InvalidSettings, match=r"'adamm'.*adam, adamw, sgd"):
        with_optimizer(training_work(), "adamm")
    with pytest.raises(InvalidSettings, match="0 micro-batches"):
        with_optimizer(training_work(), "adam", 0)
