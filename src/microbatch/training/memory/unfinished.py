"""The rest of an update that ran out of memory half-way, when no copy of what it had changed was kept.

An optimizer's step is a fixed row of operators, some of which write into weights and state. Version counters say how
many of its writes each tensor has had. The update runs again from the top, and each tensor's first writes, as many as
it has had, are left out; so it goes on where it stopped.

What is read on the way may be wrong: a tensor whose missing writes have not been met yet has a value of later. Such
reads are marked, and what is computed from them; a write that is still to be made must not depend on one, nor may a
number or a new state. Where it does, the update cannot be finished, and that is said. Most of torch's optimizers read a
state after they have written it, so it does not happen to them; to Adadelta, ASGD and Adafactor it can.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class CannotFinish(Exception):
    """The rest of the update depends on values that are gone."""


def finish(optimizer: Optimizer, update: Callable[[], object], made: Counter[int]) -> None:
    """Make the writes of an update that are still missing.

    Args:
        optimizer: whose state the update changes.
        update: the whole update.
        made: writes that each tensor (by its id) has had; grows while the update goes on, also where it fails again.

    Raises:
        CannotFinish: see the module. Weights and state are then between two updates.
        Exception: what the update raises.
    """
    rest = _Rest(made)
    with rest:
        update()
    rest.check_end(value for state in optimizer.state.values() for value in state.values())


@dataclass(frozen=True, slots=True)
class _Row:
    """What an operator does by itself: all of an ordinary one, one place of the lists of a "foreach" or fused one.

    Attributes:
        place: in the lists; None for an ordinary operator.
        writes: tensors that it writes into.
        reads: every tensor that it gets, those too.
    """

    place: int | None
    writes: list[Tensor]
    reads: list[Tensor]


class _Rest(TorchDispatchMode):
    """Leaves out the writes that were made."""

    def __init__(self, made: Counter[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made = made
        self._met: Counter[int] = Counter()
        self._of_later = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        targets = _targets(func, args, given)
        rows = _rows(func, args, given, targets)
        left = [row for row in rows if not self._was_made(func, row)]
        for row in rows:
            self._met.update(key for key in map(self._key, row.writes) if key in self._made)
        if rows and not left:
            return targets[0] if len(func._schema.returns) == 1 else tuple(targets) if func._schema.returns else None
        of_later = [row for row in left if self._reads_of_later(func, row)]
        if len(left) < len(rows):
            args, given = _only(args, given, [row.place for row in left], len(rows))
        result = func(*args, **given)
        for key in [key for row in left for key in map(self._key, row.writes) if key in self._made]:
            self._made[key] = self._met[key]
        for row in of_later:
            self._mark(func, row, result)
        return result

    def _was_made(self, func: Any, row: _Row) -> bool:
        """
        Raises:
            CannotFinish: some of its writes were, others not.
        """
        made = [self._met[key] < self._made[key] for key in map(self._key, row.writes) if key in self._made]
        if not any(made):
            return False
        if not all(made) or len(made) < len(row.writes):
            raise CannotFinish(f"{func} was made for some of its tensors only")
        return True

    def _reads_of_later(self, func: Any, row: _Row) -> bool:
        """
        Raises:
            CannotFinish: it does, and writes into what is kept.
        """
        keys = {self._key(tensor) for tensor in row.writes}  # counted as met already
        found = any(self._is_of_later(t) for t in row.reads if self._key(t) not in keys)
        if found and any(key in self._made for key in keys):
            raise CannotFinish(f"{func} reads what was changed since")
        return found

    def _mark(self, func: Any, row: _Row, result: Any) -> None:
        results = _tensors(result if row.place is None or result is None else result[row.place])
        if not results and not row.writes:
            raise CannotFinish(f"{func} makes a number of what was changed since")
        for tensor in (*results, *row.writes):
            self._of_later[tensor] = True

    def _is_of_later(self, tensor: Tensor) -> bool:
        key = self._key(tensor)
        return self._met[key] < self._made[key] if key in self._made else tensor in self._of_later

    def _key(self, tensor: Tensor) -> int:
        """Of the tensor that is counted: a view counts as what it is a view of."""
        return id(tensor) if id(tensor) in self._made or tensor._base is None else id(tensor._base)

    def check_end(self, state: Iterable[object]) -> None:
        """Every write was met again, and nothing of later has become state."""
        if any(self._met[key] != made for key, made in self._made.items()):
            raise CannotFinish("the update did not go the same way again")
        if any(isinstance(value, Tensor) and self._is_of_later(value) for value in state):
            raise CannotFinish("a new state was made of what was changed since")


def _rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], targets: list[Any]) -> list[_Row]:
    if not func.overloadpacket.__name__.startswith(("_foreach_", "_fused_")):
        return [_Row(None, _tensors(targets), _tensors((args, kwargs)))]
    number = len(args[0])
    shared = [
        tensor for value in (*args, *kwargs.values()) if not _is_list(value, number) for tensor in _tensors(value)
    ]
    lists = [value for value in (*args, *kwargs.values()) if _is_list(value, number)]
    written = [value for value in targets if _is_list(value, number)]
    return [
        _Row(place, _tensors([one[place] for one in written]), [*_tensors([one[place] for one in lists]), *shared])
        for place in range(number)
    ]


def _only(args: Any, kwargs: Any, places: list[Any], number: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call for some places of its lists."""

    def some(value: Any) -> Any:
        return [value[place] for place in places] if _is_list(value, number) else value

    return tuple(map(some, args)), {name: some(value) for name, value in kwargs.items()}


def _is_list(value: object, number: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == number


def _targets(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operator writes into, each a tensor or a list of tensors."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return found


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
