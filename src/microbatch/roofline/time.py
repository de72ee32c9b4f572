"""Seconds of one call of a model on a device, operator by operator. No torch.

Each kind of device has its own way of timing one operator; `TIMERS` says which. A call takes the sum of its operators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from microbatch.hardware.device_spec import DeviceSpec
from microbatch.roofline import accelerator, cpu, gpu
from microbatch.roofline.launches import with_launches
from microbatch.roofline.operator_time import OperatorTime
from microbatch.roofline.parallel import time_communication
from microbatch.work.operators import Operator, Work

Timer = Callable[[Operator, DeviceSpec, float, float], OperatorTime]

TIMERS: dict[str, Timer] = {
    "gpu": gpu.time_operator,
    "cpu": cpu.time_operator,
    "accelerator": accelerator.time_operator,
}
"""By `DeviceSpec.kind`: the seconds of one run of an operator at a batch and a sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallTime:
    """One call at one batch: its seconds, and those of each operator in the order of `Work.operators`."""

    seconds: float
    operators: tuple[OperatorTime, ...]


def time_call(
    work: Work, spec: DeviceSpec, *, batch: float, sequence: float = 1.0, launches: str = "eager"
) -> CallTime:
    """Predicted time of one call.

    Args:
        launches: how a GPU's kernels are launched, ``"eager"`` one by one or ``"graph"`` together: `roofline.launches`.

    Raises:
        InvalidDevice: the device has no rate for a dtype of the work.
        InvalidSettings: an unknown way to launch.
    """
    if spec.kind == "cpu":
        spec = cpu.after_last_call(work, spec, batch, sequence)
    alike: dict[tuple[object, ...], OperatorTime] = {}
    kernels = [_timed(operator, spec, batch, sequence, alike) for operator in work.operators]
    times = with_launches(work.operators, kernels, spec, launches)
    total = sum(operator.repeat * time.seconds for operator, time in zip(work.operators, times, strict=True))
    return CallTime(seconds=total, operators=times)


def _timed(
    operator: Operator, spec: DeviceSpec, batch: float, sequence: float, alike: dict[tuple[object, ...], OperatorTime]
) -> OperatorTime:
    """The operator's time, or that of one like it: layers repeat, and comparing sizes is faster than timing."""
    key = _likeness(operator)
    if key not in alike:
        timer = time_communication if operator.kind == "communication" else TIMERS[spec.kind]
        alike[key] = timer(operator, spec, batch, sequence)
    return alike[key]


def _likeness(o: Operator) -> tuple[object, ...]:
    """Equal for operators that take equally long, wherever they are; sizes as plain tuples, which compare fast."""
    gemm = o.gemm and (o.gemm.m.terms, o.gemm.n.terms, o.gemm.k.terms, o.gemm.count.terms)
    routed = o.routed and (o.routed.experts, o.routed.top_k, o.routed.tokens.terms, id(o.routed.probabilities))
    sizes = o.flops.terms, o.weight_bytes.terms, o.read_bytes.terms, o.written_bytes.terms
    return o.name, o.kind, o.dtype, o.weight_dtype, o.backward, sizes, gemm, routed
