"""Tests in several workers at once, except those marked `alone`: what times, fills memory or opens a browser.

Two locks in the temporary folder of one run: every test holds `room` shared, one that is alone holds it exclusively.
Who wants to be alone keeps `door` meanwhile, so that no further test slips in while those that run come to their end.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID")


@contextmanager
def turn(*, alone: bool) -> Iterator[None]:
    """Inside, the test may run; at once where there is only one worker."""
    if RUN is None:
        yield
        return
    with _locked("door", fcntl.LOCK_EX) as door, _locked("room", fcntl.LOCK_EX if alone else fcntl.LOCK_SH):
        if not alone:
            fcntl.flock(door, fcntl.LOCK_UN)
        yield


@contextmanager
def _locked(name: str, kind: int) -> Iterator[int]:
    path = Path(tempfile.gettempdir()) / f"microbatch-tests-{RUN}-{name}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, kind)
        yield descriptor
    finally:
        os.close(descriptor)
