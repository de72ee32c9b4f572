"""A function from a list to a list, made into one that takes single items and batches them by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
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
    """

    def __init__(self, function: Callable[[list[Item]], Sequence[Result]], engine: DynamicBatcher) -> None:
        self.function = self.batched_function = function
        self.engine = engine
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        functools.update_wrapper(self, function)

    async def __call__(self, item: Item, *, deadline: float | None = None, priority: int = 0) -> Result:
        """The result of one item; see `DynamicBatcher.submit`."""
        result: Result = await self.engine.submit(item, deadline=deadline, priority=priority)
        return result

    def call(self, item: Item, *, deadline: float | None = None, priority: int = 0) -> Result:
        """The same from a thread that may wait; see `DynamicBatcher.call`."""
        result: Result = self.engine.call(item, deadline=deadline, priority=priority)
        return result

    def map(self, items: Iterable[Item]) -> list[Result]:
        """The results of many items, in order; see `DynamicBatcher.map`."""
        return self.engine.map(items)


def batched(
    *,
    profile: str | Path | Profile | None = None,
    examples: Sequence[Any] = (),
    policy: str | Policy = "marginal_gain",
    max_batch_size: int | None = None,
    max_queue_delay: float | None = None,
    latency_target: float | None = None,
    max_queue: int = 1024,
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
        return Batched(function, DynamicBatcher(function, name=getattr(function, "__name__", ""), **settings))

    return decorate
