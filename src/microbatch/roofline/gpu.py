"""Seconds of one operator on a device of kind ``gpu``. No torch."""

from __future__ import annotations

from microbatch.hardware.device_spec import DeviceSpec
from microbatch.roofline.operator_time import OperatorTime
from microbatch.roofline.ridge import rate_of
from microbatch.work.operators import Operator


def time_operator(operator: Operator, spec: DeviceSpec, batch: float, sequence: float) -> OperatorTime:
    """Seconds of one run: the longer of computing and moving, and the launch."""
    moved = sum(part(batch, sequence) for part in (operator.weight_bytes, operator.read_bytes, operator.written_bytes))
    compute, memory = operator.flops(batch, sequence) / rate_of(spec, operator.dtype), moved / spec.bandwidth
    launch = spec.launch_seconds or 0.0
    return OperatorTime(
        seconds=max(compute, memory) + launch, compute_seconds=compute, memory_seconds=memory, overhead_seconds=launch
    )
