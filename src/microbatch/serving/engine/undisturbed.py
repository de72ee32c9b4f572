"""Seconds of a call without those in which other processes had its core: a busy machine must not decide about batches.

A call shorter than a time slice is seldom interrupted, a longer one always is, so that on a busy machine larger batches
seem to take far longer than they do, and no batch would ever be formed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

SCHEDULER = Path("/proc/thread-self/schedstat")
"""Linux: nanoseconds that this thread ran, and those that it was ready to and had to wait for a core."""


def undisturbed(call: Callable[[], object]) -> float:
    """Seconds that a call takes, less those that this thread waited for a core."""
    start = time.perf_counter()
    before = _waited()
    call()
    after = _waited()
    return time.perf_counter() - start - (after - before)


def _waited() -> float:
    """Seconds so far; 0 where the system does not tell."""
    try:
        return 1e-9 * int(SCHEDULER.read_bytes().split()[1])
    except (OSError, ValueError, IndexError):
        return 0.0
