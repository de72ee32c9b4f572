"""What C libraries write straight to the process's standard streams, captured at the file descriptor."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


class Captured:
    """Text that was written while a stream was captured; empty until the ``with`` has ended."""

    text: str = ""


@contextmanager
def captured(descriptor: int) -> Iterator[Captured]:
    """Sends a stream (1 or 2) to a temporary file, and puts it back whatever happens.

    Whatever other threads write meanwhile lands in the text too: give back with `give_back` what is not yours.
    """
    result = Captured()
    _flush()
    saved = os.dup(descriptor)
    try:
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), descriptor)
            try:
                yield result
            finally:
                _flush()
                os.dup2(saved, descriptor)
                file.seek(0)
                result.text = file.read().decode(errors="replace")
    finally:
        os.close(saved)


@contextmanager
def without_lines(descriptor: int, start: str) -> Iterator[None]:
    """Drops the lines of a stream that begin with `start`; all others are written when the ``with`` has ended."""
    result = Captured()
    try:
        with captured(descriptor) as result:
            yield
    finally:
        give_back(descriptor, [line for line in result.text.splitlines(True) if not line.startswith(start)])


def give_back(descriptor: int, lines: list[str]) -> None:
    """Writes lines to a stream after its capture has ended."""
    if lines:
        os.write(descriptor, "".join(lines).encode())


def _flush() -> None:
    """Python's buffers, then those of C: text written before the switch must not come out after it."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    ctypes.CDLL(None).fflush(None)
