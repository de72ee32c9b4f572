"""Constants of the time model that a GPU can be asked for: the time from one kernel to the next."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from microbatch.measure.findings import Findings
from microbatch.measure.rounds import time_rounds

_KERNELS = 200


def find_constants(found: Findings, device: torch.device, seconds: float) -> Iterator[tuple[float, str]]:
    """Adds ``launch_seconds``; what else the model of a GPU needs has defaults. Yields the share done and what next."""
    yield 0.0, "launches"
    tiny = torch.zeros(8, device=device)

    def many() -> None:
        for _ in range(_KERNELS):
            tiny.add_(1.0)

    times = time_rounds({"many": many}, min(seconds, 3.0), device)
    found.add("launch_seconds", times["many"] / _KERNELS, f"{_KERNELS} additions to 8 numbers, one after the other")
