"""One device as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """A device's own figures, dense rates only.

    Attributes:
        name: lower case with dashes, as in ``a100-80gb-sxm``.
        flops: FLOP/s by dtype (``{"fp32": 8.1e12, "fp16": 65e12}``); a dtype that is not verified is left out.
        bandwidth: byte/s of the main memory.
        memory_bytes: bytes of the main memory, as the device reports them.
        multiprocessors: SMs, compute units or cores; None where the notion does not apply.
        cache_bytes: last-level cache.
        link_bandwidth: byte/s to a neighbour, one direction.
        launch_seconds: time from one kernel to the next at least; None when not measured.
        kind: gpu (multiprocessors that work off tiles), cpu, or accelerator (systolic arrays and the like).
        constants: of the time model, see `microbatch.hardware.constants`; what is missing has a default.
        sources: where each figure comes from, by field.
    """

    name: str
    flops: dict[str, float]
    bandwidth: float
    memory_bytes: int | None = None
    multiprocessors: int | None = None
    cache_bytes: int | None = None
    link_bandwidth: float | None = None
    launch_seconds: float | None = None
    kind: str = "gpu"
    constants: dict[str, float] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and numbers."""
        return asdict(self)
