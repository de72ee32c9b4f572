"""Functions from a list to a list that tests serve; at the top of a module, so that worker processes find them."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import microbatch


def double(items: list[Any]) -> list[Any]:
    return [2 * item for item in items]


def poisoned(items: list[Any]) -> list[Any]:
    """Fails as a whole for an item that is no number, as a stack of tensors does."""
    if wrong := [item for item in items if not isinstance(item, int | float)]:
        raise ValueError(f"{wrong[0]!r} is no number")
    return double(items)


def slow(items: list[float]) -> list[float]:
    """Sleeps as long as its longest item says."""
    time.sleep(max(items))
    return items


def deadly(items: list[Any]) -> list[Any]:
    """Ends its process for an item "kill"."""
    if "kill" in items:
        os.kill(os.getpid(), signal.SIGKILL)
    return double(items)


def arrays(items: list[Any]) -> list[Any]:
    """What comes back is of the kind that came, and as large."""
    return [item + 1 for item in items]


def lambdas(items: list[Any]) -> list[Any]:
    """Results that cannot be sent."""
    return [(lambda: 0) for _ in items]


def process_id(items: list[Any]) -> list[int]:
    return [os.getpid() for _ in items]


@microbatch.batched(processes=True, max_batch_size=4)
def decorated(items: list[int]) -> list[int]:
    """Doubles, in a process."""
    return [2 * item for item in items]
