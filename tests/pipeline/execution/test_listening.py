"""A rank that ends before another has looked at its process is missed all the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from torch._C._distributed_c10d import FileStore

from microbatch.pipeline.execution.listening import Listener, this_machine

SECONDS = 10


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(str(tmp_path / "store"), 2)


def has_ended() -> int:
    """The number of a process that is no more."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        return process.pid


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system gives no handles on processes")
@pytest.mark.parametrize("left", [False, True], ids=["was killed", "left in good order"])
def test_a_rank_that_ended_before_anybody_looked(store: FileStore, left: bool) -> None:
    heard = threading.Event()
    store.set("process/1", json.dumps([this_machine(), has_ended()]))
    if left:
        store.set("left/1", "1")
    listener = Listener(store, 0, 2, heard.set)
    listener.start()
    try:
        assert heard.wait(1 if left else SECONDS) != left
    finally:
        listener.stop()
    assert (listener.failure is None) == left
    assert [one.rank for one in listener.ended] == [1]
