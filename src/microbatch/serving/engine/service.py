"""A running engine: the queue under one lock, and a thread for each worker that decides, runs and answers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from microbatch.errors import DeadlineExceeded, Draining, Overloaded, RequestTooLarge
from microbatch.serving.decisions.arrivals import Arrivals
from microbatch.serving.decisions.choose import work_of
from microbatch.serving.decisions.isolate import SizeLimit, check_count, run_isolated
from microbatch.serving.decisions.metrics import Counters, LaunchRecord, Metrics
from microbatch.serving.decisions.policies import launch_when_free
from microbatch.serving.decisions.queue import Entry, Reply, RequestQueue
from microbatch.serving.decisions.view import NEVER, Decision, QueueView, Waiting
from microbatch.serving.engine.alarm import Alarm
from microbatch.serving.engine.answers import deliver
from microbatch.serving.engine.gate import Gate, Ticket
from microbatch.serving.engine.influx import Influx
from microbatch.serving.engine.out_of_memory import free_again, ran_out
from microbatch.serving.engine.prepare import Plan, Prepared, is_module
from microbatch.serving.engine.watching import Watch, unwatched, watched
from microbatch.serving.engine.workers import Worker
from microbatch.units import format_seconds

logger = logging.getLogger(__name__)

SEEN = 4
"""A policy sees so many batches of the queue."""
SHORTEST_WAIT = 1e-4
"""Seconds; a policy that asks for less would only keep the processor busy."""


@dataclass(slots=True)
class _Batch:
    """One launch under way.

    Attributes:
        entries: its items.
        reason: why it was launched.
        launched: when.
        waited: how long its oldest item had waited then.
        expected: seconds that it should take.
        done: answered requests that are still to be woken up: before the next call, or when all is counted.
        ticket: of the gate that engines on one CPU share; None without one.
    """

    entries: list[Entry]
    reason: str
    launched: float
    waited: float
    expected: float
    done: list[Reply] = field(default_factory=list)
    ticket: Ticket | None = None


class Service:
    """The state of a started engine; every method may be called from any thread."""

    def __init__(self, name: str, prepared: Prepared, plan: Plan) -> None:
        """
        Args:
            name: for logs and errors.
            prepared: workers, latency and limits, from `plan`.
            plan: what the user asked for.
        """
        self.name, self.prepared = name, prepared
        self.watch: Watch | None = None
        self.gate: Gate | None = None
        self._limits, self._latency = prepared.limits, prepared.latency
        self._stateful, self._by_cost = plan.stateful, plan.by_cost
        self._latency_target = plan.wishes.latency_target
        self._fills_up = is_module(plan.run) and not plan.by_cost and not plan.stateful
        self._lock = threading.Lock()
        self._work, self._room = threading.Condition(self._lock), threading.Condition(self._lock)
        self._queue = RequestQueue(self._limits.max_queue, self._limits.max_queue_per_tenant)
        self._pace, self._counters = Arrivals(), Counters()
        self._size_limit = SizeLimit(self._limits.max_batch_size)
        self._running: dict[Worker, _Batch] = {}
        self._alarm = Alarm(self._expire)
        self._influx = Influx(self._all_read)
        self._free = 0
        self._draining = False
        self._largest_request = self._limits.max_queue_per_tenant or self._limits.max_queue
        self._policy_failed = False
        self._born = time.monotonic()
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), name=f"microbatch-{name}-{number}", daemon=True)
            for number, worker in enumerate(prepared.workers)
        ]

    def start(self) -> None:
        """Begin to serve."""
        for worker in self.prepared.workers:
            worker.watch(self._look_again)
        for thread in self._threads:
            thread.start()

    @property
    def ready(self) -> bool:
        """Whether requests are welcome."""
        return not self._draining and any(worker.alive for worker in self.prepared.workers)

    @property
    def portion(self) -> int:
        """Items that a caller with many should hand over at a time."""
        return min(self._largest_request, SEEN * self._limits.max_batch_size)

    def check_size(self, facts: Waiting) -> None:
        """Refuse an item that no batch may hold.

        Raises:
            RequestTooLarge: with both numbers.
        """
        budget, work = self._limits.largest_item, max(facts.cost, facts.length)
        if budget is not None and work > budget:
            raise RequestTooLarge(
                f"The item costs {work}; a batch may have {budget}.", "Cut it, or raise token_budget="
            )

    def enter(self, entries: Sequence[Entry], *, patient: bool = False) -> None:
        """Put the entries of one request into the queue, all of them or none.

        Args:
            entries: of the request.
            patient: wait until there is room, rather than be refused.

        Raises:
            RequestTooLarge: more than the queue can ever take.
            Overloaded: more than it can take now.
            Draining: the engine is about to stop.
        """
        count, tenant = len(entries), entries[0].facts.tenant if entries else ""
        if count > self._largest_request:
            raise RequestTooLarge(
                f"The request has {count} items; at most {self._largest_request} may wait.",
                "Send fewer at a time, or raise max_queue=",
            )
        with self._lock:
            while patient and self._queue.room_for(tenant) < count and not self._draining:
                self._room.wait()
            if self._draining:
                raise self._stopping()
            pushed_out = [] if self._queue.room_for(tenant) >= count else self._make_room(tenant, count)
            self._pace.arrived(*[entry.facts.arrived for entry in entries])
            for entry in entries:
                entry.patient = patient
                self._queue.add(entry)
                if entry.facts.deadline < NEVER:
                    self._alarm.add(entry)
            self._counters.accepted += count
            self._counters.tenants.came("accepted", tenant, count)
            loop = entries[0].reply.loop if entries else None
            if loop is not None:
                self._influx.came(loop)
            if self._free and (loop is None or len(self._queue) >= self._size_limit.now):
                self._work.notify(min(count, self._free))
        if pushed_out:
            deliver(pushed_out)

    def _all_read(self) -> None:
        """No loop hands in requests any more: a batch that waited for them may form."""
        with self._lock:
            if self._free and len(self._queue):
                self._work.notify(self._free)

    def withdraw(self, entries: Sequence[Entry]) -> None:
        """Nobody waits for these any more: what has not run will not run."""
        with self._lock:
            for entry in entries:
                if not entry.settled:
                    entry.settle(None)
                    self._queue.remove(entry)
                    self._counters.cancelled += 1
                    self._counters.tenants.count("cancelled", (entry,))
            self._room.notify_all()

    def metrics(self) -> Metrics:
        """What has happened so far."""
        with self._lock:
            now, counters, workers = time.monotonic(), self._counters, self.prepared.workers
            gap = self._pace.pace(now).mean_gap
            under_way = sum(now - batch.launched for batch in self._running.values())
            return Metrics(
                **counters.totals(),
                busy_seconds=counters.busy_seconds + under_way,
                worker_restarts=sum(worker.restarts for worker in workers),
                waiting=len(self._queue),
                running=sum(len(batch.entries) for batch in self._running.values()),
                ready=self.ready,
                workers_alive=sum(worker.alive for worker in workers),
                max_batch_size=self._limits.max_batch_size,
                size_limit=self._size_limit.now,
                arrival_gap=gap if gap < NEVER else None,
                retry_after=self._seconds_to_drain(),
                latency=counters.quantiles(),
                reasons=dict(counters.reasons),
                batch_sizes=dict(sorted(counters.batch_sizes.items())),
                curve=self._latency.curve(),
                launches=tuple(counters.launches),
                notes=self._limits.notes,
                tenants=counters.tenants.metrics(self._queue.waiting_by_tenant()),
                uptime=now - self._born,
                draining=self._draining,
                workers=len(workers),
                max_queue=self._limits.max_queue,
                policy=self._limits.policy,
                latency_target=self._latency_target,
                latency_counts=tuple(counters.latency_counts),
            )

    def close(self, timeout: float | None) -> None:
        """Answer what waits, then stop; see `DynamicBatcher.close`."""
        with self._lock:
            self._draining = True
            self._work.notify_all()
            self._room.notify_all()
        end = NEVER if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(None if end == NEVER else max(0.0, end - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            self._give_up()
        for worker in self.prepared.workers:
            worker.stop()
        self._alarm.stop()

    def _give_up(self) -> None:
        """Whoever still waits, in the queue or for a batch that runs, is told that there will be no answer."""
        with self._lock:
            left = self._queue.take(range(len(self._queue)))
            left += [entry for batch in self._running.values() for entry in batch.entries]
            open_ = [entry for entry in left if not entry.settled]
            self._counters.failed += len(open_)
            self._counters.tenants.count("failed", open_)
            done = [entry.reply for entry in open_ if entry.settle(self._stopping())]
            self._work.notify_all()
        deliver(done)

    def _stopping(self) -> Draining:
        return Draining(f"{self.name} is about to stop.", "Send the request to another server.")

    def _serve(self, worker: Worker) -> None:
        """What the thread of a worker does all its life."""
        while True:
            self._revive(worker)
            with self._lock:
                batch = self._next(worker)
                if batch is None:
                    if self._draining:
                        return
                    continue
                self._running[worker] = batch
            try:
                self._run(worker, batch)
            except Exception as error:  # nothing may end the thread, and nobody may be left without an answer
                logger.exception("%s: a batch could not be run", self.name)
                self._give(batch, batch.entries, [error] * len(batch.entries))
            _left(batch.ticket)
            with self._lock:
                self._running.pop(worker, None)
            deliver(batch.done)

    def _run(self, worker: Worker, batch: _Batch) -> None:
        watch = self.watch
        with watched(watch, batch.entries, batch.reason) if watch else nullcontext(unwatched) as told:
            calls = run_isolated(
                batch.entries, partial(self._call, worker, batch), partial(self._give, batch), self._size_limit,
                stateful=self._stateful, out_of_memory=partial(self._is_memory, worker),
            )  # fmt: skip
            with self._lock:
                record = self._record(batch, calls)
                self._counters.launched(record)
                del self._running[worker]  # its seconds are counted: together with those under way never twice
            told(record)

    def _look_again(self) -> None:
        """A worker died: if it was idle, its thread must wake up to start it again, for no request may come."""
        with self._lock:
            self._work.notify_all()

    def _revive(self, worker: Worker) -> None:
        """Start a dead worker again. As long as others are alive it takes no requests; else they get its error."""
        while not worker.alive and not self._draining:
            try:
                worker.start()
            except Exception as error:
                logger.error("%s: a worker cannot be started: %s", self.name, error)
                if not any(each.alive for each in self.prepared.workers):
                    return

    def _next(self, worker: Worker) -> _Batch | None:
        """The next batch for a worker that is free from now on; None when it is to stop, or died meanwhile.

        Under the lock. Where engines share a CPU the batch is formed when its turn has come, not before.
        """
        free_since = time.monotonic()
        ticket: Ticket | None = None
        self._free += 1
        try:
            while True:
                if not len(self._queue):
                    if self._draining or not worker.alive:
                        return None
                    _left(ticket)
                    ticket = None
                    if not self._running:
                        self._queue.rest()
                    self._work.wait()
                    continue
                view = self._view(free_since)
                decision = self._decide(view)
                if decision.launch and ticket is None and self.gate is not None and worker.device == "cpu":
                    ticket = self._turn(self.gate)
                elif decision.launch:
                    batch = self._taken(view, decision)
                    batch.ticket, ticket = ticket, None
                    return batch
                else:
                    _left(ticket)
                    ticket = None
                    self._work.wait(max(decision.until - view.now, SHORTEST_WAIT))
        finally:
            _left(ticket)
            self._free -= 1
            if self._free and len(self._queue):
                self._work.notify()

    def _turn(self, gate: Gate) -> Ticket:
        """Wait for the turn of this engine, without the lock."""
        self._lock.release()
        try:
            return gate.enter()
        finally:
            self._lock.acquire()

    def _view(self, free_since: float) -> QueueView:
        most, known = self._most(), self._latency.known
        now, queue = time.monotonic(), self._queue
        return QueueView(
            now, queue.first(SEEN * most), len(queue), queue.oldest(), self._free, free_since, most,
            self._limits.max_queue_delay, self._limits.token_budget, self._latency.seconds if known else None,
            self._latency.best_size if known else None, self._pace.pace(now), queue.uniform,
            bool(self._influx),
        )  # fmt: skip

    def _most(self) -> int:
        """Items in a batch, within memory and within the target as far as the latency is known by now."""
        target = self._limits.batch_target
        if target is None or self._by_cost or not self._latency.known:
            return self._size_limit.now
        return min(self._size_limit.now, self._latency.cost_within(target))

    def _decide(self, view: QueueView) -> Decision:
        if self._draining or self._policy_failed:
            return launch_when_free(view)
        try:
            return self._limits.decide(view)
        except Exception:
            self._policy_failed = True
            logger.exception("The policy %s failed; batches are launched when a worker is free.", self._limits.policy)
            return launch_when_free(view)

    def _taken(self, view: QueueView, decision: Decision) -> _Batch:
        entries = self._queue.take(decision.launch)
        self._counters.tenants.launched(entries)
        self._room.notify_all()
        expected = self._latency.seconds(self._cost(entries)) if self._latency.known else 0.0
        oldest = min(entry.facts.arrived for entry in entries)
        return _Batch(entries, decision.reason, view.now, view.now - oldest, expected)

    def _cost(self, entries: Sequence[Entry]) -> int:
        return work_of([entry.facts for entry in entries]) if self._by_cost else len(entries)

    def _call(self, worker: Worker, batch: _Batch, entries: list[Entry]) -> Any:
        """One call of the function or module, its time noted when it succeeds."""
        deliver(batch.done)
        batch.done.clear()
        items = [entry.item for entry in entries]
        size = self._filled_up(len(items))
        start = time.perf_counter()
        results = worker.run(items + items[-1:] * (size - len(items)))
        check_count(size, results)
        seconds = time.perf_counter() - start
        with self._lock:
            self._counters.ran(entries, size)
            self._latency.observe(size if size > len(items) else self._cost(entries), seconds)
        return results[: len(items)] if size > len(items) else results

    def _filled_up(self, count: int) -> int:
        """Size to run at: where a new size costs a compilation, the next one that was warmed; else a faster one."""
        classes = self.prepared.classes
        if classes:
            return next((size for size in classes if size >= count), count)
        if not self._fills_up:
            return count
        with self._lock:
            return self._latency.padded_size(count, self._size_limit.now)

    def _give(self, batch: _Batch, entries: Sequence[Entry], results: Sequence[Any]) -> None:
        """Answers to those who still wait for one."""
        now, given = time.monotonic(), 0
        with self._lock:
            for entry, result in zip(entries, results):
                if entry.settled:
                    continue
                given += 1
                self._counters.answer(entry, result, now - entry.facts.arrived)
                if entry.settle(result):
                    batch.done.append(entry.reply)
            if given:
                self._pace.answered(given, now)

    def _is_memory(self, worker: Worker, error: BaseException) -> bool:
        if not ran_out(error):
            return False
        self._counters.out_of_memory += 1
        free_again(worker.device)
        return True

    def _expire(self, entries: list[Entry]) -> None:
        now, done = time.monotonic(), list[Reply]()
        with self._lock:
            for entry in entries:
                if entry.settled:
                    continue
                waited = self._queue.remove(entry)
                self._counters.expired += 1
                self._counters.tenants.count("expired", (entry,))
                if entry.settle(_too_late(entry, now, waited)):
                    done.append(entry.reply)
            self._room.notify_all()
        deliver(done)

    def _record(self, batch: _Batch, calls: int) -> LaunchRecord:
        return LaunchRecord(
            at=batch.launched - self._born,
            size=len(batch.entries),
            cost=self._cost(batch.entries),
            reason=batch.reason,
            waited=batch.waited,
            seconds=time.monotonic() - batch.launched,
            calls=calls,
        )

    def _make_room(self, tenant: str, count: int) -> list[Reply]:
        """Let a request into a full queue if that is fair; requests that are answered thereby. Under the lock.

        Raises:
            Overloaded: there is no room, nor should there be.
        """
        queue, bound = self._queue, self._limits.max_queue_per_tenant
        gone = queue.make_room(tenant, count)
        if not gone:
            self._counters.refused += count
            self._counters.tenants.came("refused", tenant, count)
            if bound is not None and queue.room_for(tenant) < queue.room:
                raise self._overloaded(f"{queue.waiting_of(tenant)} of at most {bound} items of {tenant!r} wait.")
            raise self._overloaded(f"{len(queue)} of at most {self._limits.max_queue} items wait.")
        self._counters.refused += len(gone)
        self._counters.tenants.count("refused", gone)
        error = self._overloaded("The queue is full, and another tenant has less than its share of it.")
        return [entry.reply for entry in gone if entry.settle(error)]

    def _overloaded(self, text: str) -> Overloaded:
        seconds = self._seconds_to_drain()
        return Overloaded(text, f"Try again in {format_seconds(max(1.0, seconds))}.", retry_after=seconds)

    def _seconds_to_drain(self) -> float:
        """Until what waits now has been answered, from what batches take here as measured."""
        now, waiting, most = time.monotonic(), len(self._queue), self._size_limit.now
        ahead = sum(max(0.0, batch.launched + batch.expected - now) for batch in self._running.values())
        if self._latency.known and not self._by_cost:
            full, rest = divmod(waiting, most)
            own = full * self._latency.seconds(most) + (self._latency.seconds(rest) if rest else 0.0)
        else:
            own = waiting * self._counters.seconds_per_item
        return (ahead + own) / len(self.prepared.workers)


def _left(ticket: Ticket | None) -> None:
    """The turn is over, if it was one."""
    if ticket is not None:
        ticket.leave()


def _too_late(entry: Entry, now: float, waited: bool) -> DeadlineExceeded:
    allowed, took = entry.facts.deadline - entry.facts.arrived, now - entry.facts.arrived
    where = "while it waited" if waited else "while it ran"
    return DeadlineExceeded(
        f"The deadline of {format_seconds(allowed)} passed {where}, after {format_seconds(took)}.",
        "Give it more time, or send less.",
    )
