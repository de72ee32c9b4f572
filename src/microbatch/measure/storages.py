"""Storages that are alive while operators run, counted at the dispatcher."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from microbatch.measure.scratch import is_unknown, scratch_bytes


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind tensors: tied weights and views count once."""
    storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of every storage that an operator returns until that storage dies.

    Works on fake and on real tensors. What a kernel allocates and frees inside itself is not seen, so it is added
    from `scratch_bytes`.

    Attributes:
        now: bytes alive.
        peak: most bytes that were alive at once.
        unknown: operators whose own scratch is not known, so that `peak` is too low.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self.unknown: set[str] = set()
        self._alive: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        self.peak = max(self.peak, self.now + scratch_bytes(func, args, result))
        if is_unknown(func, args):
            self.unknown.add(func.name())
        return result

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of tensors that no operator has returned."""
        for tensor in tensors:
            self._note(tensor.untyped_storage())

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage in self._alive:
            return
        count = storage.nbytes()
        self._alive[storage] = count
        weakref.finalize(storage, self._forget, count)
        self.now += count
        self.peak = max(self.peak, self.now)

    def _forget(self, count: int) -> None:
        self.now -= count
