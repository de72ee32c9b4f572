"""The engine: items come in one by one, from event loops and threads, and leave in batches.

Who asks only puts an item into the queue; each worker has a thread that decides, runs the batch and gives out the
answers. Nothing polls: threads sleep until an item comes, a policy's time is over or a deadline passes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

from microbatch.batch.exactness import ExactnessReport
from microbatch.curves.profile import Profile
from microbatch.errors import Draining, InvalidSettings
from microbatch.serving.decisions.limits import Limits, Wishes
from microbatch.serving.decisions.metrics import Metrics
from microbatch.serving.decisions.policies import DEFAULT
from microbatch.serving.decisions.queue import Entry, Reply
from microbatch.serving.decisions.view import NEVER, Policy, Waiting
from microbatch.serving.engine.answers import Announced, Told, first_error, only
from microbatch.serving.engine.facts import Describe, length_by_mask
from microbatch.serving.engine.gate import Gate
from microbatch.serving.engine.prepare import Plan, check_plan, is_module, prepare
from microbatch.serving.engine.service import Service
from microbatch.serving.engine.watching import Watch


class DynamicBatcher:
    """Runs a function or a module on single items, in batches that form by themselves.

    Each request gets exactly one answer: its result, its own error, or one of `microbatch.NotServed`. In a ``with``
    block it starts at the beginning and is closed at the end.
    """

    def __init__(
        self,
        run: Any,
        *,
        name: str = "",
        profile: str | Path | Profile | None = None,
        examples: Sequence[Any] = (),
        policy: str | Policy = DEFAULT,
        max_batch_size: int | None = None,
        max_queue_delay: float | None = None,
        latency_target: float | None = None,
        max_queue: int = 1024,
        max_queue_per_tenant: int | None = None,
        token_budget: Any = None,
        cost: Callable[[Any], int] | None = None,
        length: Callable[[Any], int] | None = None,
        key: Callable[[Any], object] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        workers: int = 1,
        processes: bool = False,
        devices: Sequence[str] = (),
        stateful: bool = False,
        check: str = "raise",
        fast: bool = True,
    ) -> None:
        """
        Args:
            run: a function from a list of items to a list of as many results (an exception in it is the failure of
                its item), or an nn.Module, whose items have no batch dimension. The module is not changed.
            name: for logs.
            profile: measured curve of the function or module; a path or a `Profile`.
            examples: items to warm up, measure and compare answers with. One is enough; without any the latency is
                learnt from the requests.
            policy: a name of `microbatch.serving.decisions.policies.POLICIES`, or a function of a `QueueView`.
            max_batch_size: most items in a batch; found from the latency if left out.
            max_queue_delay: seconds that an item waits beside a free worker, at most.
            latency_target: seconds from request to answer; bounds the batch.
            max_queue: most items that wait; whoever comes then is refused with `Overloaded`.
            max_queue_per_tenant: most of them of one tenant; without it a full queue makes room for who has less.
            token_budget: most padded work of a batch: a number, or a `TokenBudget`.
            cost: work of an item, as in tokens; 1 by default.
            length: of an item, where a batch is padded to its longest; then padded work is at most 1.5 times real work.
            key: items of different keys never share a batch; for a module without `collate` the shapes are the key.
            collate: from a list of items to the module's batch, as `microbatch.serving.engine.padded.Padded`; by
                default items are stacked.
            workers: batches that run at once, on each device.
            processes: each worker is a process, which is started again when it dies.
            devices: where copies of a module run; the CPU by default.
            stateful: the function must not run twice for an item: no measuring, no repeats after a failure.
            check: whether an item must get the same answer alone and in a batch: raise, warn or off.
            fast: linear layers of a module on the CPU may run in a faster form that is equal up to rounding.

        Raises:
            InvalidSettings: settings that contradict each other, all in one error.
        """
        self._settings = {key: value for key, value in locals().items() if key != "self"}
        tokens = getattr(token_budget, "tokens", token_budget)
        length = length or getattr(token_budget, "length", None) or getattr(collate, "length", None)
        by_form = is_module(run) and collate is None
        if by_form and length is None:
            length = length_by_mask(examples)
        self._describe = Describe(cost, length, key, by_form=by_form)
        wishes = Wishes(
            policy=policy, max_batch_size=max_batch_size, max_queue_delay=max_queue_delay,
            latency_target=latency_target, max_queue=max_queue, max_queue_per_tenant=max_queue_per_tenant,
            token_budget=tokens,
        )  # fmt: skip
        self._plan = Plan(
            run=run, profile=profile, examples=examples, wishes=wishes, facts=self._describe.facts,
            by_cost=self._describe.by_cost, collate=collate, workers=workers, processes=processes,
            devices=tuple(devices), stateful=stateful, check=check, fast=fast,
        )  # fmt: skip
        check_plan(self._plan)
        self.name = name or getattr(run, "__name__", type(run).__name__)
        self._starting = threading.Lock()
        self._service: Service | None = None
        self._watch: Watch | None = None
        self._gate: Gate | None = None
        self._closed = False
        self._numbers = count()

    def start(self) -> DynamicBatcher:
        """Be ready for requests; done by the first request otherwise.

        Raises:
            InvalidSettings, InvalidModel, InvalidOutput, ModelFailed: see `microbatch.serving.engine.prepare.prepare`.
            Draining: it was closed.
        """
        with self._starting:
            if self._closed:
                raise Draining(f"{self.name} has been closed.", "Make a new one.")
            if self._service is None:
                self._service = Service(self.name, prepare(self._plan), self._plan)
                self._service.watch, self._service.gate = self._watch, self._gate
                self._service.start()
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Sent to another process it is a new one there, with the same settings and not yet started."""
        return _anew, (self._settings,)

    def __enter__(self) -> DynamicBatcher:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def started(self) -> bool:
        """Whether it has begun to serve; `metrics` answers at once from then on."""
        return self._service is not None

    @property
    def ready(self) -> bool:
        """Whether requests are welcome: started and warm, not about to stop, and a worker is alive."""
        return self._service is not None and self._service.ready

    @property
    def report(self) -> ExactnessReport | None:
        """Of the comparison of answers alone and in a batch; None before the start, or where it was not made."""
        return None if self._service is None else self._service.prepared.report

    @property
    def limits(self) -> Limits | None:
        """What it keeps to, with the reason; None before the start."""
        return None if self._service is None else self._service.prepared.limits

    @property
    def run(self) -> Any:
        """The function or module, as it was given."""
        return self._plan.run

    @property
    def examples(self) -> tuple[Any, ...]:
        """Items as they were given to warm up with."""
        return tuple(self._plan.examples)

    def metrics(self) -> Metrics:
        """What has happened so far; starts the engine if need be."""
        return self._started().metrics()

    def watch(self, watch: Watch | None) -> None:
        """Let something look on at requests and batches, as `microbatch.web.tracing` does; None ends that."""
        self._watch = watch
        if self._service is not None:
            self._service.watch = watch

    @property
    def on_cpu(self) -> bool:
        """Whether batches run on the CPU of this machine, as far as is known."""
        return not self._plan.devices or "cpu" in self._plan.devices

    def share(self, gate: Gate) -> None:
        """Take turns with other engines; see `microbatch.serving.engine.gate.share_cpu`."""
        self._gate = gate
        if self._service is not None:
            self._service.gate = gate

    async def submit(self, item: Any, *, deadline: float | None = None, priority: int = 0, tenant: str = "") -> Any:
        """The result of one item.

        Args:
            item: as the function takes it, in a list.
            deadline: seconds from now, after which the answer is `DeadlineExceeded`.
            priority: larger goes first.
            tenant: whose it is; tenants that wait are served alike, however much one of them sends.

        Raises:
            Overloaded, DeadlineExceeded, RequestTooLarge, Draining, WorkerDied: see `microbatch.errors`.
            Exception: what the function, or a callback, raised for this item.
        """
        return only(await self.submit_many([item], deadline=deadline, priority=priority, tenant=tenant))

    async def submit_many(
        self, items: Sequence[Any], *, deadline: float | None = None, priority: int = 0, tenant: str = ""
    ) -> list[Any]:
        """The results of a request with several items, in order; the exception of an item in its place.

        Items count one by one: they may be spread over batches, and the queue takes all of them or none.

        Raises:
            Overloaded, RequestTooLarge, Draining: the request was not accepted.
        """
        service = self._service
        if service is None:
            service = await asyncio.to_thread(self._started)
        loop = asyncio.get_running_loop()
        reply = Reply(len(items), loop.create_future(), loop)
        entries = self._enter(service, items, reply, deadline, priority, tenant)
        if reply.left:
            try:
                await reply.future
            except asyncio.CancelledError:
                service.withdraw(entries)
                raise
        return reply.results

    async def submit_each(
        self, items: Sequence[Any], *, deadline: float | None = None, priority: int = 0, tenant: str = ""
    ) -> AsyncIterator[tuple[int, Any]]:
        """The place and the result, or exception, of each item of a request, as they are answered.

        Raises:
            Overloaded, RequestTooLarge, Draining: the request was not accepted.
        """
        service = self._service
        if service is None:
            service = await asyncio.to_thread(self._started)
        loop = asyncio.get_running_loop()
        reply, answered = Reply(len(items), loop.create_future(), loop), asyncio.Queue[tuple[int, Any]]()
        reply.results = Announced(reply.results, loop, answered.put_nowait)
        entries = self._enter(service, items, reply, deadline, priority, tenant)
        try:
            for _ in items:
                yield await answered.get()
        finally:  # nobody waits for the rest
            service.withdraw(entries)

    def post(self, item: Any, tell: Callable[[Any], None]) -> Callable[[], None] | None:
        """Hand an item over without waiting, in the thread of a running event loop.

        Args:
            item: as the function takes it, in a list.
            tell: called in this event loop with the result, or the exception; it must not raise.

        Returns:
            What withdraws the item, after which nobody is told; None, and nothing done, before the start.

        Raises:
            Overloaded, RequestTooLarge, Draining: the item was not accepted.
        """
        service = self._service
        if service is None:
            return None
        told = Told(tell)
        reply = told.reply = Reply(1, told, asyncio.get_running_loop())
        entries = self._enter(service, (item,), reply, None, 0)
        if not reply.left:  # a callback failed
            reply.loop.call_soon(told.set_result, None)

        def withdraw() -> None:
            told.reply = None
            service.withdraw(entries)

        return withdraw

    def call(self, item: Any, *, deadline: float | None = None, priority: int = 0, tenant: str = "") -> Any:
        """As `submit`, for a thread that may wait."""
        service = self._started()
        reply = Reply(1, concurrent.futures.Future())
        entries = self._enter(service, [item], reply, deadline, priority, tenant)
        return only(_wait(service, reply, entries))

    def map(self, items: Iterable[Any], *, return_errors: bool = False) -> list[Any]:
        """The results of many items, in order, for a thread that may wait. Never refused: it goes on as room comes.

        Args:
            items: any number; a generator is read as the queue has room.
            return_errors: put the exception of an item in its place; otherwise the first one is raised.
        """
        service = self._started()
        source, results = iter(items), list[Any]()
        under_way: deque[tuple[Reply, list[Entry]]] = deque()
        while part := list(islice(source, service.portion)):
            reply = Reply(len(part), concurrent.futures.Future())
            under_way.append((reply, self._enter(service, part, reply, None, 0, patient=True)))
            if len(under_way) > 1:  # one portion waits while another runs
                results += _wait(service, *under_way.popleft())
        for request in under_way:
            results += _wait(service, *request)
        if not return_errors and (error := first_error(results)) is not None:
            raise error
        return results

    async def drain(self, timeout: float | None = None) -> None:
        """Take no more requests, answer those that wait, and stop; see `close`."""
        await asyncio.to_thread(self.close, timeout)

    def close(self, timeout: float | None = None) -> None:
        """Take no more requests, answer those that wait, and stop the workers.

        Args:
            timeout: seconds after which what still waits is answered with `Draining`; None waits for all.
        """
        with self._starting:
            self._closed = True
            service = self._service
        if service is not None:
            service.close(timeout)

    def _started(self) -> Service:
        if self._service is None:
            self.start()
        assert self._service is not None
        return self._service

    def _enter(
        self,
        service: Service,
        items: Sequence[Any],
        reply: Reply,
        deadline: float | None,
        priority: int,
        tenant: object = "",
        *,
        patient: bool = False,
    ) -> list[Entry]:
        """Entries in the queue; items whose callbacks fail have their error already."""
        now = time.monotonic()
        due = now + _checked(deadline) if deadline is not None else NEVER
        if not isinstance(tenant, str):
            raise InvalidSettings(f"tenant={tenant!r} is not text.", "Give the name of whose request it is.")
        if self._watch is not None:
            reply.mark = self._watch.mark()
        entries = []
        for place, item in enumerate(items):
            try:
                facts = self._describe.facts(item, now, due, priority, tenant)
                service.check_size(facts)
            except Exception as error:
                Entry(item, Waiting(now), 0, reply, place).settle(error)
                continue
            entries.append(Entry(item, facts, next(self._numbers), reply, place))
        service.enter(entries, patient=patient)
        return entries


def _anew(settings: dict[str, Any]) -> DynamicBatcher:
    return DynamicBatcher(**settings)


def _wait(service: Service, reply: Reply, entries: list[Entry]) -> list[Any]:
    """The results of a request, for a thread; an interrupt takes its items out of the queue."""
    if reply.left:
        try:
            reply.future.result()
        except BaseException:
            service.withdraw(entries)
            raise
    return reply.results


def _checked(deadline: float) -> float:
    if not (isinstance(deadline, int | float) and deadline > 0):
        raise InvalidSettings(f"A deadline of {deadline!r} has passed already.", "Give seconds from now, above zero.")
    return deadline
