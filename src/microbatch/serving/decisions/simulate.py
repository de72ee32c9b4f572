"""What a server would do, before there is one: the policies themselves over simulated requests. No torch, no clock.

One loop over three kinds of event: a request comes, a batch is done, a policy wanted to look again. Alike requests are
two numbers in a line; only mixed ones (lengths, deadlines, priorities) are objects.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Protocol

import numpy as np

from microbatch.errors import InvalidSettings
from microbatch.serving.decisions.arrivals import Arrivals
from microbatch.serving.decisions.choose import work_of
from microbatch.serving.decisions.latency import Latency
from microbatch.serving.decisions.limits import Limits
from microbatch.serving.decisions.queue import Entry, Reply, RequestQueue
from microbatch.serving.decisions.tenants import TenantCounters, TenantMetrics
from microbatch.serving.decisions.traffic import Times
from microbatch.serving.decisions.view import NEVER, QueueView, Waiting

SEEN = 4
"""A policy sees so many batches of the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What came of it. Times in seconds, from the arrival of a request to its answer.

    Attributes:
        answered: requests that got their answer in time.
        refused: requests that found the queue full.
        expired: requests whose deadline passed, waiting or running.
        late: of those, the ones that were launched and had their answer too late.
        p50, p90, p99: latency; NaN when nothing was answered.
        mean_batch: items in a batch, on average.
        throughput: answered requests per second, from the first arrival to the last answer.
        padded_over_real: padded work over real work.
        reasons: launches by reason.
        tenants: what each had; empty where no request says whose it is.
    """

    answered: int
    refused: int
    expired: int
    late: int
    p50: float
    p90: float
    p99: float
    mean_batch: float
    throughput: float
    padded_over_real: float
    reasons: dict[str, int]
    tenants: dict[str, TenantMetrics] = field(default_factory=dict)


class _Source(Protocol):
    @property
    def coming(self) -> float:
        """When the next request comes; infinite when none does."""

    def until(self, now: float) -> list[float]:
        """When those came that came by now and were not told before."""

    def answered(self, count: int, now: float) -> None:
        """So many were answered: closed loops ask again."""


class _Open:
    """Requests that come whatever happens to those before."""

    def __init__(self, times: list[float]) -> None:
        self._times, self._next = times, 0

    @property
    def coming(self) -> float:
        return self._times[self._next] if self._next < len(self._times) else NEVER

    def until(self, now: float) -> list[float]:
        start, self._next = self._next, bisect_right(self._times, now, self._next)
        return self._times[start : self._next]

    def answered(self, count: int, now: float) -> None:
        """Nobody waits for an answer to ask again."""


class _Closed:
    """Clients that ask again some time after each answer, until enough has been asked."""

    def __init__(self, clients: int, count: int, think: float, stagger: float) -> None:
        self._times = [stagger * number for number in range(min(clients, count))]
        self._left = count - len(self._times)
        self._think = think

    @property
    def coming(self) -> float:
        return self._times[0] if self._times else NEVER

    def until(self, now: float) -> list[float]:
        came = []
        while self._times and self._times[0] <= now:
            came.append(heapq.heappop(self._times))
        return came

    def answered(self, count: int, now: float) -> None:
        for _ in range(min(count, self._left)):
            heapq.heappush(self._times, now + self._think)
        self._left -= min(count, self._left)


class _Alike(Sequence[Waiting]):
    """The waiting part of a list of arrival times, as policies see it."""

    def __init__(self, times: list[float], start: int, length: int) -> None:
        self._times, self._start, self._length = times, start, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place):  # type: ignore[no-untyped-def]  # a number or a slice
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(self._length))]
        return Waiting(self._times[self._start + place])


class _Line:
    """Requests that are all alike: served in the order of arrival."""

    uniform = True

    def __init__(self, most: int) -> None:
        self._times: list[float] = []
        self._head, self._most = 0, most
        self._batches: list[tuple[int, float]] = []
        self.real = self.padded = self.late = self.expired = self.pushed_out = 0

    def __len__(self) -> int:
        return len(self._times) - self._head

    def add(self, times: list[float]) -> list[float]:
        """Puts requests into the line; those that found room."""
        room = self._most - len(self)
        accepted = times if len(times) <= room else times[:room]
        self._times += accepted
        return accepted

    def oldest(self) -> float:
        return self._times[self._head]

    def first(self, count: int) -> Sequence[Waiting]:
        return _Alike(self._times, self._head, min(count, len(self)))

    def launch(self, places: Sequence[int]) -> int:
        """What the batch costs."""
        return len(places)

    def take(self, places: Sequence[int], finish: float) -> None:
        self._head += len(places)
        self.real += len(places)
        self.padded += len(places)
        self._batches.append((len(places), finish))

    def expire(self, now: float) -> None:
        """Nothing does."""

    def rest(self) -> None:
        """Nobody owes anything here."""

    def tenants(self) -> dict[str, TenantMetrics]:
        """Nobody says."""
        return {}

    def latencies(self) -> Times:
        counts, finished = zip(*self._batches) if self._batches else ((), ())
        answered: Times = np.repeat(np.array(finished, dtype=float), np.array(counts, dtype=int))
        came: Times = np.array(self._times[: self._head], dtype=float)
        return np.subtract(answered, came)


class _Mixed:
    """Requests with lengths, costs, keys, deadlines, priorities and tenants, in the queue of the real server."""

    uniform = False

    def __init__(self, requests: Sequence[Waiting], limits: Limits) -> None:
        self._queue = RequestQueue(limits.max_queue, limits.max_queue_per_tenant)
        self._requests = iter(sorted(requests, key=lambda request: request.arrived))
        self._number = 0
        self._latencies: list[float] = []
        self._deadlines: list[tuple[float, int, Entry]] = []
        self._tenants = TenantCounters(most=len(requests), kept=len(requests))
        self.real = self.padded = self.late = self.expired = self.pushed_out = 0

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, times: list[float]) -> list[float]:
        """As `_Line.add`; a deadline that passes makes room for who comes after it."""
        accepted = []
        for now in times:
            facts = next(self._requests)
            self.expire(now)
            if self._has_room(facts.tenant):
                self._enter(facts)
                accepted.append(now)
            else:
                self._tenants.came("refused", facts.tenant, 1)
        return accepted

    def _has_room(self, tenant: str) -> bool:
        if self._queue.room_for(tenant):
            return True
        gone = self._queue.make_room(tenant, 1)
        self._tenants.count("refused", gone)
        self.pushed_out += len(gone)
        return bool(gone)

    def _enter(self, facts: Waiting) -> None:
        self._number += 1
        entry = Entry(None, facts, self._number, Reply(1))
        self._queue.add(entry)
        self._tenants.came("accepted", facts.tenant, 1)
        if facts.deadline < NEVER:
            heapq.heappush(self._deadlines, (facts.deadline, self._number, entry))

    def oldest(self) -> float:
        return self._queue.oldest()

    def first(self, count: int) -> Sequence[Waiting]:
        return self._queue.first(count)

    def launch(self, places: Sequence[int]) -> int:
        waiting = self._queue.first(places[-1] + 1)
        return work_of([waiting[place] for place in places])

    def take(self, places: Sequence[int], finish: float) -> None:
        taken = self._queue.take(places)
        self._tenants.launched(taken)
        self.real += sum(entry.facts.length for entry in taken)
        self.padded += len(taken) * max(entry.facts.length for entry in taken)
        late = [entry for entry in taken if finish > entry.facts.deadline]
        self.late += len(late)
        self._has_expired(late)
        for entry in taken:
            if finish <= entry.facts.deadline:
                self._latencies.append(finish - entry.facts.arrived)
                self._tenants.answer(entry, None, finish - entry.facts.arrived)

    def expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            entry = heapq.heappop(self._deadlines)[2]
            if self._queue.remove(entry):
                self._has_expired([entry])

    def _has_expired(self, entries: list[Entry]) -> None:
        self.expired += len(entries)
        self._tenants.count("expired", entries)

    def rest(self) -> None:
        self._queue.rest()

    def tenants(self) -> dict[str, TenantMetrics]:
        return self._tenants.metrics({})

    def latencies(self) -> Times:
        return np.array(self._latencies)


def simulate(
    arrivals: Times | Sequence[float] | Sequence[Waiting],
    latency: Latency,
    limits: Limits,
    *,
    workers: int = 1,
    ratios: Sequence[float] = (),
    seed: int = 0,
) -> Simulated:
    """Requests that come at given times, whatever happens to those before (an open loop).

    Args:
        arrivals: seconds, ascending; or `Waiting` requests.
        latency: what batches cost. It is not corrected: the simulated machine is as the table says.
        limits: of the server.
        workers: batches that run at once, each as fast as alone.
        ratios: a batch takes one of these, drawn at random, times what the table says; see `spread_of`.
        seed: of the draws.
    """
    if len(arrivals) and isinstance(arrivals[0], Waiting):
        requests: list[Waiting] = [each for each in arrivals if isinstance(each, Waiting)]
        line: _Line | _Mixed = _Mixed(requests, limits)
        times: Sequence[float] = sorted(request.arrived for request in requests)
    else:
        line, times = _Line(limits.max_queue), np.asarray(arrivals, dtype=float).tolist()
    return _run(_Open(list(times)), line, latency, limits, workers, _draws(ratios, seed))


def simulate_clients(
    clients: int,
    count: int,
    latency: Latency,
    limits: Limits,
    *,
    think: float = 0.0,
    stagger: float = 0.0,
    workers: int = 1,
    ratios: Sequence[float] = (),
    seed: int = 0,
) -> Simulated:
    """`count` requests of clients that each ask again after their answer (a closed loop).

    Args:
        clients: how many.
        count: requests of all of them.
        latency: as in `simulate`, with those below.
        limits: of the server.
        think: seconds from an answer to the client's next request.
        stagger: seconds between the first requests of two clients.
        workers: batches that run at once.
        ratios: see `simulate`.
        seed: of the draws.
    """
    source = _Closed(clients, count, think, stagger)
    return _run(source, _Line(limits.max_queue), latency, limits, workers, _draws(ratios, seed))


def _draws(ratios: Sequence[float], seed: int) -> Iterator[float]:
    """Without an end; drawn in advance, since one draw at a time would cost more than all else."""
    return cycle(np.random.default_rng(seed).choice(np.asarray(ratios), 9973).tolist() if len(ratios) else [1.0])


def _run(
    source: _Source, line: _Line | _Mixed, latency: Latency, limits: Limits, workers: int, ratios: Iterator[float]
) -> Simulated:
    pace, reasons, decide = Arrivals(), Counter[str](), limits.decide
    seen = SEEN * limits.max_batch_size
    running: list[tuple[float, int]] = []
    free, free_since, refused, end = workers, 0.0, 0, 0.0
    now = start = source.coming
    while now < NEVER:
        if came := source.until(now):
            accepted = line.add(came)
            pace.arrived(*accepted)
            refused += len(came) - len(accepted)
        while running and running[0][0] <= now:
            end, count = heapq.heappop(running)
            free, free_since = free + 1, end
            pace.answered(count, end)
            source.answered(count, end)
        line.expire(now)
        if not running and not len(line):
            line.rest()
        until = NEVER
        if free and len(line):
            view = QueueView(
                now, line.first(seen), len(line), line.oldest(), free, free_since, limits.max_batch_size,
                limits.max_queue_delay, limits.token_budget, latency.seconds, latency.best_size, pace.pace(now),
                line.uniform,
            )  # fmt: skip
            decision = decide(view)
            if decision.launch:
                finish = now + latency.seconds(line.launch(decision.launch)) * next(ratios)
                line.take(decision.launch, finish)
                heapq.heappush(running, (finish, len(decision.launch)))
                reasons[decision.reason] += 1
                free -= 1
                continue
            until = decision.until
            _check_wait(until, now)
        done = running[0][0] if running else NEVER
        now = min(until, source.coming, done) if free else done  # nobody can act before a worker is free
    return _result(line, refused, dict(reasons), end - start)


def _check_wait(until: float, now: float) -> None:
    if not until > now:
        raise InvalidSettings(
            f"The policy wants to wait at {now} s until {until} s, which has passed.", "Launch, or give a later time."
        )


def _result(line: _Line | _Mixed, refused: int, reasons: dict[str, int], wall: float) -> Simulated:
    latencies = line.latencies()
    p50, p90, p99 = np.percentile(latencies, (50, 90, 99)).tolist() if len(latencies) else [float("nan")] * 3
    batches = sum(reasons.values())
    return Simulated(
        answered=len(latencies),
        refused=refused + line.pushed_out,
        expired=line.expired,
        late=line.late,
        p50=p50,
        p90=p90,
        p99=p99,
        mean_batch=(len(latencies) + line.late) / batches if batches else 0.0,
        throughput=len(latencies) / wall if wall > 0 else 0.0,
        padded_over_real=line.padded / line.real if line.real else 1.0,
        reasons=reasons,
        tenants=line.tenants(),
    )
