"""Engines that `microbatch serve benchmarks/peer_servers/fault_apps.py:NAME` serves for `serving_faults.py`."""

from __future__ import annotations

import time

from microbatch.serving.engine.batcher import DynamicBatcher


def double(items: list[int]) -> list[int]:
    """Two times each, in a millisecond."""
    time.sleep(1e-3)
    return [2 * item for item in items]


def sleep(items: list[float]) -> list[float]:
    """As long as the longest asks for."""
    time.sleep(max(items))
    return items


def slow(items: list[float]) -> list[float]:
    """A time with a fixed part, as models have it."""
    time.sleep(0.05 + 0.005 * len(items))
    return items


def killed() -> DynamicBatcher:
    """Two worker processes, to be killed."""
    return DynamicBatcher(double, processes=True, workers=2, max_batch_size=8, max_queue=10_000)


def busy() -> DynamicBatcher:
    """One worker process, to be kept busy."""
    return DynamicBatcher(sleep, processes=True, max_batch_size=1)


def narrow() -> DynamicBatcher:
    """Four may wait."""
    return DynamicBatcher(sleep, max_batch_size=1, max_queue=4)


def draining() -> DynamicBatcher:
    """A queue that takes seconds to drain, and a latency that is learnt from the first requests."""
    return DynamicBatcher(slow, max_batch_size=8, max_queue=400)


def left() -> DynamicBatcher:
    """Clients leave it while it sleeps."""
    return DynamicBatcher(sleep, max_batch_size=32)
