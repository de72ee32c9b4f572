"""What a call takes beside its kernels: the gaps between them, and the host that launches them. No torch.

On a GPU the host runs ahead of the device. Launched one by one (``"eager"``) a call takes the longer of what the device
computes and what the host needs to launch; launched together (``"graph"``: CUDA graphs, engines, compiled decoding)
the host does not count. Either way the device rests for a moment between two kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from microbatch.errors import InvalidSettings
from microbatch.hardware.constants import constants_of
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.roofline.operator_time import OperatorTime
from microbatch.work.operators import Operator

LAUNCHES = ("eager", "graph")


def with_launches(
    operators: Sequence[Operator], times: Sequence[OperatorTime], spec: DeviceSpec, launches: str
) -> tuple[OperatorTime, ...]:
    """The operators' times with the gaps, and with what the device waits for the host spread evenly over all kernels.

    An exchange between devices has its own start and no gap. The host's time for one operator is the device's measured
    `launch_seconds`, else the constant ``host_seconds``. Only a ``gpu`` is launched kernel by kernel; other kinds keep
    their times.

    Raises:
        InvalidSettings: `launches` is none of `LAUNCHES`.
    """
    if launches not in LAUNCHES:
        raise InvalidSettings(f"There is no way {launches!r} to launch kernels.", f"Use {' or '.join(LAUNCHES)}.")
    kernels = sum(operator.repeat for operator in operators)
    if spec.kind != "gpu" or not kernels:
        return tuple(times)
    constants = constants_of(spec)
    gap = constants["gap_seconds"]
    if launches == "eager":
        host = spec.launch_seconds or constants["host_seconds"]
        busy = sum(o.repeat * time.seconds for o, time in zip(operators, times, strict=True)) / kernels
        gap = max(gap, host - busy)
    later = {id(time): _later(time, gap) for time in times}
    return tuple(
        time if operator.kind == "communication" else later[id(time)]
        for operator, time in zip(operators, times, strict=True)
    )


def _later(time: OperatorTime, gap: float) -> OperatorTime:
    return replace(time, seconds=time.seconds + gap, overhead_seconds=time.overhead_seconds + gap)
