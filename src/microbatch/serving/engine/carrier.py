"""Values between two processes: the small parts through a pipe, tensors and arrays through shared memory.

Each end writes into a block of its own that grows and is used again; the other end copies out of it. The block has no
name, so that nothing is left behind however a process ends.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
import tempfile
from array import array
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

ALIGN = 64
SMALLEST = 1 << 20


class Carrier:
    """One end of a pipe to one other process; messages go one at a time, each answered before the next."""

    def __init__(self, connection: Connection, peer: int) -> None:
        """
        Args:
            connection: one end of a duplex pipe.
            peer: process id of the other end.
        """
        self.connection = connection
        self._peer = peer
        self._own: mmap.mmap | None = None
        self._other: mmap.mmap | None = None

    def send(self, value: Any) -> None:
        """Send a value.

        Raises:
            OSError: the other end is gone.
            Exception: whatever pickling the value raises.
        """
        buffers: list[pickle.PickleBuffer] = []
        stream = io.BytesIO()
        _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
        raw = [buffer.raw() for buffer in buffers]
        places, end = _places([part.nbytes for part in raw])
        grown = self._grow(end)
        self.connection.send((grown, [(place, part.nbytes) for place, part in zip(places, raw)]))
        if grown:
            self._send_block(grown)
        if raw:
            assert self._own is not None
            for place, part in zip(places, raw):
                self._own[place : place + part.nbytes] = part
        self.connection.send_bytes(stream.getbuffer())

    def receive(self) -> Any:
        """The next value.

        Raises:
            EOFError, OSError: the other end is gone.
        """
        grown, places = self.connection.recv()
        if grown:
            self._other = self._receive_block(grown)
        stream = self.connection.recv_bytes()
        other = self._other or b""
        return pickle.loads(stream, buffers=[bytearray(other[start : start + size]) for start, size in places])

    def close(self) -> None:
        """End the connection."""
        self.connection.close()

    def _grow(self, needed: int) -> int:
        """Bytes of the new block where the present one is too small; 0 where it is not."""
        if needed <= (len(self._own) if self._own is not None else 0):
            return 0
        return max(SMALLEST, 1 << (needed - 1).bit_length())

    def _send_block(self, size: int) -> None:
        handle = _anonymous(size)
        try:
            self._own = mmap.mmap(handle, size)
            send_handle(self.connection, handle, self._peer)
        finally:
            os.close(handle)

    def _receive_block(self, size: int) -> mmap.mmap:
        handle = recv_handle(self.connection)
        try:
            return mmap.mmap(handle, size)
        finally:
            os.close(handle)


class _Pickler(pickle.Pickler):
    """Arrays go out of band by themselves; tensors are told to."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(value) is not torch.Tensor or value.layout != torch.strided or value.is_nested:
            return NotImplemented
        if value.is_complex() or value.is_quantized:
            return NotImplemented
        dense = value.detach().cpu().contiguous()
        flat = dense.reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(flat), str(dense.dtype).removeprefix("torch."), tuple(dense.shape))


def _tensor(buffer: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    kind = getattr(torch, dtype)
    if 0 in shape:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(kind).reshape(shape)


def _places(sizes: list[int]) -> tuple[list[int], int]:
    places, end = array("q"), 0
    for size in sizes:
        places.append(end)
        end += -(-size // ALIGN) * ALIGN
    return list(places), end


def _anonymous(size: int) -> int:
    """A descriptor of memory without a name."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("microbatch")
    else:
        with tempfile.TemporaryFile() as file:
            handle = os.dup(file.fileno())
    os.ftruncate(handle, size)
    return handle
