"""Times of several calls beside each other, so that a slow moment of the machine hits all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from microbatch.measure.timer import time_call, warm_up

QUANTILE = 0.25
"""Of a call's times this one counts: noise only adds, and a minimum of few rounds is a lucky one."""
FEWEST_ROUNDS = 5

Call = Callable[[], object]


def time_rounds(
    calls: Mapping[str, Call], seconds: float, device: torch.device | str = "cpu", *, at_least: int = FEWEST_ROUNDS
) -> dict[str, float]:
    """Seconds of each call: the lower quartile over rounds in alternating order.

    Args:
        calls: by name.
        seconds: how long to measure, about.
        device: where they run.
        at_least: rounds, however long they take.
    """
    end = time.perf_counter() + seconds
    for call in calls.values():
        warm_up(call, device)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    turn = 0
    while turn < at_least or time.perf_counter() < end:
        for name in calls if turn % 2 == 0 else reversed(list(calls)):
            samples[name].append(time_call(calls[name], device))
        turn += 1
    return {name: _quantile(times) for name, times in samples.items()}


def _quantile(times: list[float]) -> float:
    return sorted(times)[int(QUANTILE * len(times))]
