"""What makes a short command shorter."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collecting() -> Iterator[None]:
    """No search for garbage inside: while torch and transformers load, millions of new objects are looked at again and
    again, and none is garbage. Saves about 7 % of the time of `predict` on a large config for 10 MB of memory.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def leave(status: int) -> None:
    """Ends the process with that exit status, without taking apart what torch has loaded: that takes a second or more
    and frees what ends anyway. Exit functions run and streams are flushed; where a thread still works, Python waits for
    it as usual.
    """
    others = (thread for thread in threading.enumerate() if thread is not threading.main_thread())
    if "torch" not in sys.modules or any(not thread.daemon for thread in others):
        sys.exit(status)
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # nobody reads any more: Python says so as usual
        sys.exit(status)
    os._exit(status)
