"""What an optimizer adds to a training step: bytes for each parameter, and nothing to share them with. No torch.

With k micro-batches to a step, every micro-batch reads the weights forward and backward and writes the gradients and
reads them again to add them up; the step itself is shared by k. In fp32 with Adam that is 16 + 28/k bytes for each
parameter against 6·b FLOPs, so that b* ≈ (16 + 28/k)/6 · F/BW: few small micro-batches are bound by the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from microbatch.errors import InvalidSettings
from microbatch.units import DTYPE_BYTES
from microbatch.work.operators import Operator, Work
from microbatch.work.polynomial import constant


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """An optimizer that keeps its state in the dtype of the weights, as torch's do.

    Attributes:
        states: numbers kept for each parameter.
        reads, writes: numbers that one step reads and writes for each parameter: weight, gradient and states.
        flops: arithmetic for each parameter.
    """

    states: int
    reads: int
    writes: int
    flops: int


OPTIMIZERS: dict[str, Rule] = {
    "adam": Rule(states=2, reads=4, writes=3, flops=12),
    "adamw": Rule(states=2, reads=4, writes=3, flops=14),
    "sgd": Rule(states=0, reads=2, writes=1, flops=2),
    "sgd-momentum": Rule(states=1, reads=3, writes=2, flops=4),
    "lion": Rule(states=1, reads=3, writes=2, flops=8),
}
"""By name. Adam in fp32 reads 16 and writes 12 bytes for each parameter: 28 in all."""


def with_optimizer(work: Work, optimizer: str, accumulation: int = 1) -> Work:
    """The work of one micro-batch out of `accumulation`: its share of the optimizer's step, and adding up gradients.

    Raises:
        InvalidSettings: an unknown optimizer, or an accumulation below 1.
    """
    rule = rule_of(optimizer)
    if accumulation < 1:
        raise InvalidSettings(f"{accumulation} micro-batches make no step.", "Give an accumulation of 1 or more.")
    count, size = work.parameters, DTYPE_BYTES[work.dtype]
    add_up = Operator(
        name="accumulate gradients", kind="optimizer", dtype=work.dtype, backward=True, layer="optimizer",
        read_bytes=constant(count * size), flops=constant(count),
    )  # fmt: skip
    step = Operator(
        name=optimizer, kind="optimizer", dtype=work.dtype, backward=True, layer="optimizer",
        flops=constant(rule.flops * count / accumulation),
        read_bytes=constant(rule.reads * count * size / accumulation),
        written_bytes=constant(rule.writes * count * size / accumulation),
    )  # fmt: skip
    return replace(work, operators=(*work.operators, add_up, step))


def rule_of(optimizer: str) -> Rule:
    """The rule of that name.

    Raises:
        InvalidSettings: there is none.
    """
    if optimizer not in OPTIMIZERS:
        raise InvalidSettings(f"There is no optimizer {optimizer!r}.", f"Known: {', '.join(OPTIMIZERS)}.")
    return OPTIMIZERS[optimizer]


def state_bytes(work: Work, optimizer: str) -> dict[str, int]:
    """Bytes of gradients and optimizer state."""
    each = work.parameters * DTYPE_BYTES[work.dtype]
    return {"gradients": round(each), "optimizer": round(rule_of(optimizer).states * each)}
