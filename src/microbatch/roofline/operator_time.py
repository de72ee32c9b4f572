"""The time of one operator and what it is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorTime:
    """Predicted seconds of one run.

    Attributes:
        seconds: in all.
        compute_seconds: if only arithmetic took time, at the rate that the device reaches for this shape.
        memory_seconds: if only moving bytes took time.
        overhead_seconds: launching, or what the framework does around the kernel.
        evidence: how it was computed, in a few words, as in ``"86 tiles in 1 wave of 128x256"``.
    """

    seconds: float
    compute_seconds: float
    memory_seconds: float
    overhead_seconds: float
    evidence: str = ""

    @property
    def bound(self) -> str:
        """memory, compute or overhead: the largest of the three."""
        parts = {
            "compute": self.compute_seconds,
            "memory": self.memory_seconds,
            "overhead": self.overhead_seconds,
        }
        return max(parts, key=lambda name: parts[name])
