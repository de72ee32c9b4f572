"""What the web front asks of an engine, and the one way in which it asks."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from functools import lru_cache
from typing import Any, Protocol

from microbatch.web.options import NO_OPTIONS, Options


class Engine(Protocol):
    """Answers items one by one or several at a time; `microbatch.DynamicBatcher` is one.

    An engine may also have ``examples`` and ``run`` (see `microbatch.web.items`), take ``tenant=`` in its submit
    methods, and have ``submit_each``, by which a streamed answer begins before the last item is done.
    """

    @property
    def ready(self) -> bool:
        """Whether requests are welcome."""
        ...

    def start(self) -> Any:
        """Be ready for requests; may take long. A second call does nothing."""
        ...

    async def submit(self, item: Any, *, deadline: float | None = None, priority: int = 0) -> Any:
        """The result of one item."""
        ...

    async def submit_many(self, items: Sequence[Any], *, deadline: float | None = None, priority: int = 0) -> list[Any]:
        """The results of several, in order, an item's exception in its place."""
        ...

    def metrics(self) -> Any:
        """What has happened so far; has ``to_json()``."""
        ...

    async def drain(self, timeout: float | None = None) -> None:
        """Take no more requests, answer those that wait, and stop."""
        ...


def submit(engine: Engine, item: Any, options: Options = NO_OPTIONS) -> Awaitable[Any]:
    """The result of one item, to be awaited; raises what the engine raises."""
    if options is NO_OPTIONS:
        return engine.submit(item)
    return engine.submit(item, **arguments(engine, options))


async def submit_many(engine: Engine, items: Sequence[Any], options: Options = NO_OPTIONS) -> list[Any]:
    """The results of several items, an exception in the place of an item that failed."""
    return await engine.submit_many(items, **arguments(engine, options))


async def submit_each(
    engine: Engine, items: Sequence[Any], options: Options = NO_OPTIONS
) -> AsyncGenerator[tuple[int, Any], None]:
    """The place and the result, or exception, of each item as it is answered; all at the end for a plain engine."""
    each = getattr(engine, "submit_each", None)
    if each is None:
        for answered in enumerate(await submit_many(engine, items, options)):
            yield answered
        return
    async with aclosing(each(items, **arguments(engine, options))) as answers:
        async for answered in answers:
            yield answered


def arguments(engine: Any, options: Options) -> Mapping[str, Any]:
    """What a submit method of an engine is given of the options."""
    wanted: dict[str, Any] = {"deadline": options.deadline, "priority": options.priority}
    kind: type = type(engine)
    if options.tenant and _knows_tenants(kind):
        wanted["tenant"] = options.tenant
    return wanted


@lru_cache(maxsize=64)
def _knows_tenants(kind: type) -> bool:
    return "tenant" in inspect.signature(kind.submit).parameters  # type: ignore[attr-defined]
