"""A function from a list to a list, made into one that takes single items and batches them by itself."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from microbatch.curves.profile import Profile
from microbatch.serving.decisions.view import Policy
from microbatch.serving.engine.batcher import DynamicBatcher

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batched(Generic[Item, Result]):
    """One engine behind one function, in three ways: ``await f(x)``, ``f.call(x)``, ``f.map(items)``.

    Attributes:
        engine: what batches; it starts with the first request, or with ``engine.start()``.
        function: as it was written, for those who have a list.
        settings: of the decorator.
    """

    def __init__(
        self,
        function: Callable[[list[Item]], Sequence[Result]],
        engine: DynamicBatcher,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.function = self.batched_function = function
        self.engine, self.settings = engine, dict(settings or {})
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        functools.update_wrapper(self, function)

    def __reduce__(self) -> tuple[Any, ...]:
        """Sent to another process it is found again by its name, or made anew where its module cannot be imported."""
        module, name = self.function.__module__, getattr(self.function, "__qualname__", "")
        if module != "__main__" and _part(sys.modules.get(module), name) is self:
            return _imported, (module, name)
        return Batched, (self.function, self.engine, self.settings)

    async def __call__(
        self, item: Item, *, deadline: float | None = None, priority: int = 0, tenant: str = ""
    ) -> Result:
        """The result of one item; see `DynamicBatcher.submit`."""
        result: Result = await self.engine.submit(item, deadline=deadline, priority=priority, tenant=tenant)
        return result

    def call(self, item: Item, *, deadline: float | None = None, priority: int = 0, tenant: str = "") -> Result:
        """The same from a thread that may wait; see `DynamicBatcher.call`."""
        result: Result = self.engine.call(item, deadline=deadline, priority=priority, tenant=tenant)
        return result

    def map(self, items: Iterable[Item]) -> list[Result]:
        """The results of many items, in order; see `DynamicBatcher.map`."""
        return self.engine.map(items)


def _imported(module: str, name: str) -> Any:
    return _part(importlib.import_module(module), name)


def _part(found: Any, name: str) -> Any:
    """What something holds by a name as in ``Class.method``; None when it holds nothing."""
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def batched(
    *,
    profile: str | Path | Profile | None = None,
    examples: Sequence[Any] = (),
    policy: str | Policy = "marginal_gain",
    max_batch_size: int | None = None,
    max_queue_delay: float | None = None,
    latency_target: float | None = None,
    max_queue: int = 1024,
    max_queue_per_tenant: int | None = None,
    token_budget: Any = None,
    cost: Callable[[Any], int] | None = None,
    length: Callable[[Any], int] | None = None,
    key: Callable[[Any], object] | None = None,
    workers: int = 1,
    processes: bool = False,
    stateful: bool = False,
    check: str = "raise",
) -> Callable[[Callable[[list[Item]], Sequence[Result]]], Batched[Item, Result]]:
    """Decorates a function from a list of items to a list of results; see `DynamicBatcher` for every setting.

    Raises:
        InvalidSettings: settings that contradict each other.
    """
    settings = dict(locals())

    def decorate(function: Callable[[list[Item]], Sequence[Result]]) -> Batched[Item, Result]:
        name = getattr(function, "__name__", "")
        return Batched(function, DynamicBatcher(function, name=name, **settings), settings)

    return decorate
