"""Runs a deep model through the first of each kind of its blocks: what the others would do has the same shapes.

A language model of 126 blocks has one or a few kinds of them. To learn what each keeps in the cache, one of each kind
is enough, and seconds become a fraction of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_POSITION = frozenset({"layer_idx", "layer_index", "layer_id", "layer_number", "block_idx", "idx", "training"})
"""What tells equal blocks apart and changes no shape."""
_PLAIN = (bool, int, float, str, type(None))


@contextmanager
def first_of_each_kind(model: nn.Module, count: int) -> Iterator[tuple[int, ...] | None]:
    """Inside, the model has only the first block of each kind.

    Args:
        model: with one list of `count` blocks somewhere inside.
        count: of the blocks.

    Yields:
        for each of the `count` blocks the number of the one that stands for it; None, and the model as it is, where
        no such list is found or every block is of its own kind.
    """
    found = _blocks(model, count)
    if found is None:
        yield None
        return
    parent, name, blocks = found
    kinds: dict[Any, int] = {}
    stands_for = tuple(kinds.setdefault(_kind(block), number) for number, block in enumerate(blocks))
    if len(kinds) == count:
        yield None
        return
    setattr(parent, name, nn.ModuleList([blocks[number] for number in kinds.values()]))
    try:
        yield stands_for
    finally:
        setattr(parent, name, blocks)


def _blocks(model: nn.Module, count: int) -> tuple[nn.Module, str, nn.ModuleList] | None:
    """The only list of so many modules, where it is and what it is called there."""
    lists = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]
    return lists[0] if len(lists) == 1 else None


def _kind(block: nn.Module) -> Any:
    """Names, classes and plain attributes of everything inside."""
    return tuple((name, type(module), _plain_attributes(module)) for name, module in block.named_modules())


def _plain_attributes(module: nn.Module) -> Any:
    values = ((key, value) for key, value in vars(module).items() if key not in _POSITION)
    shapes = ((key, tuple(tensor.shape)) for key, tensor in module.named_parameters(recurse=False))
    return (*sorted((key, repr(value)) for key, value in values if isinstance(value, _PLAIN)), *sorted(shapes))
