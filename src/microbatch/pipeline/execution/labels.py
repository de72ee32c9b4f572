"""Which units a value depends on, followed through the operators between units."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Names = frozenset[str]


class Labels(TorchDispatchMode):
    """Marks what is made from marked tensors. Marks belong to memory, so that views and changes in place have them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of: dict[int, Names] = {}
        self._kept: list[Tensor] = []  # memory that is freed could come back under another mark

    def mark(self, tensor: Tensor, names: Names) -> None:
        """A tensor depends on these."""
        self._of[_memory(tensor)] = names
        self._kept.append(tensor.detach())

    def of(self, values: Iterable[object]) -> Names:
        """What any of the values depends on."""
        found = [self._of.get(_memory(value), Names()) for value in values if isinstance(value, Tensor)]
        return Names().union(*found)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        names = self.of(given)
        if names:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    key = _memory(leaf)
                    self._of[key] = self._of.get(key, Names()) | names
                    self._kept.append(leaf)
        return result


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
