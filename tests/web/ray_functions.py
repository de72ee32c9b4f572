"""What replicas on a local Ray serve: found there by name, so that it must lie at the top of a module."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import microbatch


@microbatch.batched(max_batch_size=8, max_queue=500)
def work(items: list[dict[str, Any]]) -> list[list[int]]:
    """Doubles, and says where; an item may make its batch slow, or fail, or have the process noted in a folder."""
    for item in items:
        if "folder" in item:
            Path(item["folder"], str(os.getpid())).touch()
    time.sleep(max(item.get("sleep", 0.0) for item in items))
    if any("fail" in item for item in items):
        raise ValueError("one of them cannot be done")
    return [[2 * item["value"], os.getpid()] for item in items]


@microbatch.batched(max_batch_size=1, max_queue=1)
def narrow(items: list[dict[str, Any]]) -> list[int]:
    """One waits, one runs."""
    time.sleep(0.5)
    return [item["value"] for item in items]
