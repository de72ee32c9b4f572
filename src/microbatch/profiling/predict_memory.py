"""The memory of a prediction, from the operators. No torch."""

from __future__ import annotations

from microbatch.curves.profile import MemoryCurve
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.profiling.predict_clock import Settings
from microbatch.roofline.footprint import memory_of_work
from microbatch.work.operators import Work


def work_memory(own: Work, spec: DeviceSpec, settings: Settings) -> MemoryCurve | None:
    """One device's memory by batch; None where the device does not say how much it has."""
    limit = settings.memory_limit or spec.memory_bytes
    if limit is None:
        return None
    return memory_of_work(
        own, limit, limit_source(spec, settings.memory_limit), sequence=float(settings.sequence or 1),
        optimizer=settings.optimizer if own.mode == "training" else None,
    )  # fmt: skip


def limit_source(spec: DeviceSpec, memory_limit: int | None) -> str:
    """Where the limit of the memory comes from."""
    return "your limit" if memory_limit else f"memory of {spec.name}"
