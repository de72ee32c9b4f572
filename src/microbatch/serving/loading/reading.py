"""An engine for what clients send: it is read into the model's items first, and what cannot be read fails alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from microbatch.batch.exactness import ExactnessReport
from microbatch.errors import RequestTooLarge
from microbatch.serving.decisions.limits import Limits
from microbatch.serving.decisions.metrics import Metrics
from microbatch.serving.engine.answers import only
from microbatch.serving.engine.batcher import DynamicBatcher
from microbatch.serving.engine.gate import Gate
from microbatch.serving.engine.watching import Watch

Read = Callable[[Sequence[Any]], list[Any]]
"""``read(values) -> items``, in order; the exception of a value that is none in its place."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """What a client may know of an engine that answers with vectors.

    Attributes:
        dimensions: numbers in a vector.
        longest: tokens that the model takes.
        vocabulary: token ids are below it.
    """

    dimensions: int
    longest: int
    vocabulary: int


class Reading:
    """As `DynamicBatcher`, behind a reader. An item that is read already may go to `engine` directly.

    Attributes:
        engine: what batches.
        run: reads values, annotated with their form.
        embedding: set where the answers are vectors of texts.
        name: of the engine.
    """

    def __init__(
        self,
        engine: DynamicBatcher,
        read: Read,
        *,
        is_long: Callable[[Sequence[Any]], bool],
        form: Any = Any,
        embedding: Embedding | None = None,
    ) -> None:
        """
        Args:
            engine: takes what `read` returns.
            read: see `Read`.
            is_long: whether reading these values takes so long that no event loop should wait for it.
            form: type of a value, for documents and checks.
            embedding: of texts.
        """
        self.engine, self.embedding, self.name = engine, embedding, engine.name
        self._read, self._is_long = read, is_long

        def run(values: Any) -> list[Any]:
            return read(values)

        run.__annotations__ = {"values": list[form], "return": list[Any]}
        self.run = run

    async def read(self, values: Sequence[Any]) -> list[Any]:
        """The items that values stand for; the exception of one that is none in its place.

        Raises:
            RequestTooLarge: more than the queue takes; they are not read first.
        """
        most = self.limits.max_queue if self.limits else len(values)
        if len(values) > most:
            raise RequestTooLarge(
                f"The request has {len(values)} items; at most {most} may wait.", "Send fewer at a time."
            )
        if self._is_long(values):
            return await asyncio.to_thread(self._read, values)
        return self._read(values)

    async def submit(self, item: Any, *, deadline: float | None = None, priority: int = 0, tenant: str = "") -> Any:
        """As `DynamicBatcher.submit`.

        Raises:
            InvalidBatch, RequestTooLarge: the value is no item of this model.
        """
        return only(await self.submit_many([item], deadline=deadline, priority=priority, tenant=tenant))

    async def submit_many(
        self, items: Sequence[Any], *, deadline: float | None = None, priority: int = 0, tenant: str = ""
    ) -> list[Any]:
        """As `DynamicBatcher.submit_many`; the error of a value that cannot be read is in its place."""
        read = await self.read(items)
        good = [item for item in read if not isinstance(item, Exception)]
        answers: Iterator[Any] = iter(())
        if good:
            answers = iter(await self.engine.submit_many(good, deadline=deadline, priority=priority, tenant=tenant))
        return [item if isinstance(item, Exception) else next(answers) for item in read]

    async def submit_each(
        self, items: Sequence[Any], *, deadline: float | None = None, priority: int = 0, tenant: str = ""
    ) -> AsyncIterator[tuple[int, Any]]:
        """As `DynamicBatcher.submit_each`; what cannot be read comes first."""
        read = await self.read(items)
        places = [place for place, item in enumerate(read) if not isinstance(item, Exception)]
        for place, item in enumerate(read):
            if isinstance(item, Exception):
                yield place, item
        if not places:
            return
        good = [read[place] for place in places]
        each: Any = self.engine.submit_each(good, deadline=deadline, priority=priority, tenant=tenant)
        async with aclosing(each) as answers:
            async for place, answer in answers:
                yield places[place], answer

    def post(self, item: Any, tell: Callable[[Any], None]) -> Callable[[], None] | None:
        """As `DynamicBatcher.post`; None as well for a value that takes long to read.

        Raises:
            InvalidBatch, RequestTooLarge: the value is no item of this model.
        """
        if self._is_long([item]):
            return None
        (read,) = self._read([item])
        if isinstance(read, Exception):
            raise read
        return self.engine.post(read, tell)

    def start(self) -> Reading:
        """As `DynamicBatcher.start`."""
        self.engine.start()
        return self

    @property
    def ready(self) -> bool:
        """Whether requests are welcome."""
        return self.engine.ready

    @property
    def report(self) -> ExactnessReport | None:
        """Of the comparison at the start."""
        return self.engine.report

    @property
    def limits(self) -> Limits | None:
        """What it keeps to; None before the start."""
        return self.engine.limits

    def watch(self, watch: Watch | None) -> None:
        """As `DynamicBatcher.watch`."""
        self.engine.watch(watch)

    @property
    def on_cpu(self) -> bool:
        """As `DynamicBatcher.on_cpu`."""
        return self.engine.on_cpu

    def share(self, gate: Gate) -> None:
        """As `DynamicBatcher.share`."""
        self.engine.share(gate)

    def metrics(self) -> Metrics:
        """What has happened so far; what could not be read never came in."""
        return self.engine.metrics()

    async def drain(self, timeout: float | None = None) -> None:
        """As `DynamicBatcher.drain`."""
        await self.engine.drain(timeout)

    def close(self, timeout: float | None = None) -> None:
        """As `DynamicBatcher.close`."""
        self.engine.close(timeout)
