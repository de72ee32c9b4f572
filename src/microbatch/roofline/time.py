"""Seconds of one call of a model on a device, operator by operator. No torch.

Each kind of device has its own way of timing one operator; `TIMERS` says which. A call takes the sum of its operators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from microbatch.hardware.device_spec import DeviceSpec
from microbatch.roofline import accelerator, cpu, gpu
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


def time_call(work: Work, spec: DeviceSpec, *, batch: float, sequence: float = 1.0) -> CallTime:
    """Predicted time of one call.

    Raises:
        InvalidDevice: the device has no rate for a dtype of the work.
    """
    timer = TIMERS[spec.kind]
    times = tuple(
        (time_communication if operator.kind == "communication" else timer)(operator, spec, batch, sequence)
        for operator in work.operators
    )
    total = sum(operator.repeat * time.seconds for operator, time in zip(work.operators, times, strict=True))
    return CallTime(seconds=total, operators=times)
