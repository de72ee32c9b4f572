"""What memory costs that the system hands out: it clears each page when it is touched first."""

from __future__ import annotations

import mmap
import time
from statistics import median

import torch

_ROUNDS = 7


def measure_fresh_bandwidth(size: int) -> float:
    """byte/s at which new pages come, their first write left out: what it takes longer to fill a mapping that is new.

    Args:
        size: bytes of the mapping.
    """
    later = [_fill_twice(size) for _ in range(_ROUNDS)]
    return size / max(median(later), 1e-9)


def _fill_twice(size: int) -> float:
    """Seconds that the first of two fills takes longer, with the threads that torch uses."""
    mapping = mmap.mmap(-1, size)
    numbers = torch.frombuffer(mapping, dtype=torch.float32)
    seconds = []
    for value in (1.0, 2.0):
        start = time.perf_counter()
        numbers.fill_(value)
        seconds.append(time.perf_counter() - start)
    del numbers  # a mapping with a tensor on it cannot be closed
    mapping.close()
    return seconds[0] - seconds[1]
