"""What generation would do on a machine whose steps take known times: the scheduler and the blocks, on a trace.

Nothing is computed and no time passes: a step takes what the model of the machine says, times a ratio drawn for it. The
budget follows as it does in an engine. No torch, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle, islice, pairwise

import numpy as np

from microbatch.errors import RequestTooLarge
from microbatch.llm.budget import BudgetFollower
from microbatch.llm.fairness import Served
from microbatch.llm.kv_blocks import BlockPool, Found, OutOfBlocks
from microbatch.llm.scheduler import SchedulerView, SequenceView, Step, admissible, schedule
from microbatch.llm.step_model import StepModel, StepSample, pairs_of

CONTEXT = 1 << 30
REFRESHED = 16
"""Waiting sequences whose share of the prefix cache is looked up again when a prompt has been computed."""


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request of a trace.

    Attributes:
        arrived: seconds.
        prompt_tokens: of its prompt.
        output_tokens: of its answer, however it ends.
        priority: larger goes first.
        tenant: whose it is.
        prefix: a name and a number: so many first tokens are those of all requests with that name.
    """

    arrived: float
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    tenant: str = ""
    prefix: tuple[str, int] = ("", 0)


@dataclass(frozen=True, slots=True)
class SimulatedAnswer:
    """What one request had.

    Attributes:
        request: it.
        times: when each of its tokens came, in seconds.
        waited: steps from its arrival to its first token, that one included.
        cached: tokens of its prompt that were found in the cache.
        preempted: how often it gave its blocks back.
    """

    request: SimulatedRequest
    times: tuple[float, ...]
    waited: int
    cached: int
    preempted: int

    @property
    def time_to_first_token(self) -> float:
        """Seconds from its arrival."""
        return self.times[0] - self.request.arrived

    @property
    def time_per_output_token(self) -> float:
        """Mean seconds between two tokens; NaN where there is one."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else float("nan")

    @property
    def largest_gap(self) -> float:
        """Longest seconds between two tokens; 0 where there is one."""
        return max([b - a for a, b in pairwise(self.times)], default=0.0)


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One step.

    Attributes:
        start, seconds: when, and how long.
        tokens, sequences: computed, and of how many.
        generating: sequences of them that generate.
        reason: of the scheduler.
        slow: why it was slow; None for a usual one.
    """

    start: float
    seconds: float
    tokens: int
    sequences: int
    generating: int
    reason: str
    slow: str | None


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What came of a trace.

    Attributes:
        answers: in the order of the trace, without those refused.
        refused: requests that can never be served, each with the reason.
        steps: all of them.
        preemptions: how often blocks were given back.
        computed: tokens computed, those computed again included.
        hits: tokens found in the cache.
        target: seconds that a step with generation should take at most; None without a target.
    """

    answers: tuple[SimulatedAnswer, ...]
    refused: tuple[tuple[SimulatedRequest, str], ...]
    steps: tuple[SimulatedStep, ...]
    preemptions: int
    computed: int
    hits: int
    target: float | None
    served: Mapping[str, int] = field(default_factory=dict)

    @property
    def within_target(self) -> float:
        """Share of the steps with generation that took no longer than the target; NaN where there are none."""
        steps = [step.seconds for step in self.steps if step.generating]
        return sum([each <= (self.target or 0.0) for each in steps]) / len(steps) if steps else float("nan")

    @property
    def largest_gap(self) -> float:
        """Longest seconds that any stream stood still."""
        return max([answer.largest_gap for answer in self.answers], default=0.0)

    @property
    def tokens_per_second(self) -> float:
        """Of answers, from the first step to the last."""
        if not self.steps:
            return 0.0
        wall = self.steps[-1].start + self.steps[-1].seconds - self.steps[0].start
        return sum([len(answer.times) for answer in self.answers]) / wall

    def to_json(self) -> dict[str, object]:
        """Numbers of it all; times in seconds."""
        firsts = [answer.time_to_first_token for answer in self.answers]
        means = [answer.time_per_output_token for answer in self.answers if len(answer.times) > 1]
        return {
            "requests": len(self.answers),
            "refused": len(self.refused),
            "steps": len(self.steps),
            "tokens_per_second": self.tokens_per_second,
            "time_to_first_token": _percentiles(firsts),
            "time_per_output_token": _percentiles(means),
            "largest_gap": self.largest_gap,
            "within_target": None if self.target is None or np.isnan(self.within_target) else self.within_target,
            "preemptions": self.preemptions,
            "computed_tokens": self.computed,
            "cached_tokens": self.hits,
            "slow_steps": sum([step.slow is not None for step in self.steps]),
        }


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    found = np.percentile(values, (50, 90, 99)).tolist() if len(values) else [None] * 3
    return dict(zip(("p50", "p90", "p99"), found))


def simulate(
    trace: Sequence[SimulatedRequest],
    model: StepModel,
    *,
    num_blocks: int,
    block_size: int = 16,
    time_per_output_token_target: float | None = None,
    time_to_first_token_target: float | None = None,
    max_tokens: int | None = None,
    max_sequences: int | None = None,
    prefix_caching: bool = True,
    context: int = CONTEXT,
    known: bool = True,
    ratios: Sequence[float] = (),
    slower: Callable[[float], float] | None = None,
    seed: int = 0,
) -> SimulatedRun:
    """Requests that come at given times.

    Args:
        trace: in any order.
        model: what steps take on the machine.
        num_blocks, block_size: of the cache.
        time_per_output_token_target, time_to_first_token_target, max_tokens, max_sequences: see `BudgetFollower`.
        prefix_caching: whether prefixes are found again.
        context: most tokens of a request.
        known: whether the budget begins with the model; else it learns it from the steps.
        ratios: a step takes one of these, drawn at random, times what the model says.
        slower: how many times slower the machine is at a time.
        seed: of the draws.
    """
    follower = BudgetFollower(
        time_per_output_token_target=time_per_output_token_target,
        time_to_first_token_target=time_to_first_token_target,
        max_tokens=max_tokens,
        max_sequences=max_sequences,
        model=model if known else None,
    )
    pool = BlockPool(num_blocks, block_size, prefix_caching=prefix_caching)
    run = _Run(pool, follower, model, _draws(ratios, seed), slower or (lambda _: 1.0))
    refused = run.all_of(trace, context)
    return run.result(refused, time_per_output_token_target)


def _draws(ratios: Sequence[float], seed: int) -> Iterator[float]:
    return cycle(np.random.default_rng(seed).choice(np.asarray(ratios), 9973).tolist() if len(ratios) else [1.0])


class _Sequence:
    """One request under way."""

    __slots__ = (
        "cached", "came_at", "computed", "first_at", "found", "ids", "key", "order", "preempted", "request", "skipped",
        "times",
    )  # fmt: skip

    def __init__(self, key: int, order: int, request: SimulatedRequest, ids: list[int], came_at: int) -> None:
        self.key, self.order, self.request, self.ids, self.came_at = key, order, request, ids, came_at
        self.computed = self.skipped = self.preempted = self.first_at = 0
        self.cached: int | None = None
        self.found = Found(0, 0)
        self.times: list[float] = []

    def view(self, *, copies: int = 0, blocks: int = 0, frees: int | None = None) -> SequenceView:
        request = self.request
        return SequenceView(
            self.key, len(self.ids), self.computed, self.found.tokens, request.arrived, request.priority,
            request.tenant, self.skipped, self.preempted, blocks, copies, frees, self.found.held,
        )  # fmt: skip


class _Run:
    """One trace on one machine."""

    def __init__(
        self,
        pool: BlockPool,
        follower: BudgetFollower,
        machine: StepModel,
        ratios: Iterator[float],
        slower: Callable[[float], float],
    ) -> None:
        self._pool, self._follower, self._machine, self._ratios, self._slower = pool, follower, machine, ratios, slower
        self._now, self._fresh = 0.0, count()
        self._running: dict[Hashable, _Sequence] = {}
        self._waiting: dict[Hashable, _Sequence] = {}
        self._served, self._by_tenant = Served(), Counter[str]()
        self._prefixes: dict[str, list[int]] = {}
        self._answers: dict[int, SimulatedAnswer] = {}
        self._steps: list[SimulatedStep] = []
        self._preemptions = self._computed = 0

    def all_of(self, trace: Sequence[SimulatedRequest], context: int) -> list[tuple[SimulatedRequest, str]]:
        """Until every request has its answer; those that can never have one."""
        refused, coming = [], sorted(enumerate(trace), key=lambda each: -each[1].arrived)
        while coming or self._waiting or self._running:
            if not (self._waiting or self._running):
                self._now = max(self._now, coming[-1][1].arrived)
            while coming and coming[-1][1].arrived <= self._now:
                order, request = coming.pop()
                try:
                    self._admit(order, request, context)
                except RequestTooLarge as error:
                    refused.append((request, str(error)))
            if self._waiting or self._running:
                self._step()
        return refused

    def result(self, refused: list[tuple[SimulatedRequest, str]], target: float | None) -> SimulatedRun:
        return SimulatedRun(
            answers=tuple([self._answers[order] for order in sorted(self._answers)]),
            refused=tuple(refused),
            steps=tuple(self._steps),
            preemptions=self._preemptions,
            computed=self._computed,
            hits=self._pool.hits,
            target=target,
            served=dict(self._by_tenant),
        )

    def _admit(self, order: int, request: SimulatedRequest, context: int) -> None:
        pool = self._pool
        admissible(request.prompt_tokens, request.output_tokens, pool.num_blocks, pool.block_size, context)
        name, shared = request.prefix
        prefix = self._prefixes.setdefault(name, [])
        prefix += islice(self._fresh, max(0, shared - len(prefix)))
        ids = prefix[: min(shared, request.prompt_tokens)]
        ids += islice(self._fresh, request.prompt_tokens - len(ids))
        self._served.came(request.tenant)
        self._wait(_Sequence(order, order, request, ids, len(self._steps)))

    def _wait(self, sequence: _Sequence) -> None:
        sequence.found = self._pool.look(sequence.ids)
        self._waiting[sequence.key] = sequence

    def _step(self) -> None:
        plan = schedule(self._view())
        generating = sum([len(each.ids) - each.computed == 1 and each.first_at > 0 for each in self._running.values()])
        for key in plan.preempted:
            self._preempt(self._running[key])
        for key in plan.skipped:
            self._waiting[key].skipped += 1
        shares = self._opened(plan)
        start, sample = self._now, self._sample(shares)
        self._now += sample.seconds
        slow = self._follower.observe(sample)
        self._steps.append(
            SimulatedStep(start, sample.seconds, sample.tokens, len(shares), generating, plan.reason, slow)
        )
        for sequence, end in shares:
            self._computed_until(sequence, end)

    def _view(self) -> SchedulerView:
        pool, follower = self._pool, self._follower
        scarce = pool.free_blocks < len(self._running)
        running = []
        for key, each in self._running.items():
            frees = pool.frees(key) if scarce else None
            running.append(each.view(copies=pool.copies(key), blocks=len(pool.table(key)), frees=frees))
        return SchedulerView(
            running=tuple(running),
            waiting=tuple([each.view() for each in self._waiting.values()]),
            free_blocks=pool.free_blocks,
            block_size=pool.block_size,
            num_blocks=pool.num_blocks,
            budget=follower.budget,
            model=follower.model,
            now=self._now,
            served=self._served.tokens,
        )

    def _opened(self, plan: Step) -> list[tuple[_Sequence, int]]:
        """Those that have their part in the step, each with how many of its tokens will be computed then."""
        shares = []
        for share in plan.shares:
            sequence = self._running.get(share.key) or self._begin(self._waiting.pop(share.key))
            end = min(len(sequence.ids), sequence.computed + share.tokens)
            try:
                self._pool.grow(sequence.key, end)
            except OutOfBlocks:  # the cache held less of it than it did when this was planned
                self._preempt(sequence)
            else:
                shares.append((sequence, end))
        return shares

    def _begin(self, sequence: _Sequence) -> _Sequence:
        sequence.computed = self._pool.open(sequence.key, sequence.ids)
        if sequence.cached is None:
            sequence.cached = sequence.computed
        self._running[sequence.key] = sequence
        return sequence

    def _preempt(self, sequence: _Sequence) -> None:
        self._pool.close(sequence.key)
        del self._running[sequence.key]
        sequence.computed, sequence.preempted = 0, sequence.preempted + 1
        self._preemptions += 1
        self._wait(sequence)

    def _sample(self, shares: list[tuple[_Sequence, int]]) -> StepSample:
        counts = [(end - each.computed, each.computed) for each, end in shares]
        tokens, cached = sum([new for new, _ in counts]), sum([old for _, old in counts])
        pairs = sum([pairs_of(new, old) for new, old in counts])
        seconds = (
            self._machine.seconds(tokens, cached, len(counts), pairs) * next(self._ratios) * self._slower(self._now)
        )
        prefill = sum([new for new, _ in counts if new > 1])
        return StepSample(tokens, cached, len(counts), seconds, pairs, prefill)

    def _computed_until(self, sequence: _Sequence, end: int) -> None:
        tokens, request = end - sequence.computed, sequence.request
        self._computed += tokens
        self._by_tenant[request.tenant] += tokens
        self._served.computed(request.tenant, tokens)
        sequence.computed = end
        self._pool.commit(sequence.key, sequence.ids[:end])
        if end == len(sequence.ids):
            sequence.first_at = sequence.first_at or len(self._steps)
            sequence.times.append(self._now)
            sequence.ids.append(next(self._fresh))
            if len(sequence.times) == request.output_tokens:
                self._finish(sequence)
        if tokens > 1:
            for each in islice(self._waiting.values(), REFRESHED):
                each.found = self._pool.look(each.ids)

    def _finish(self, sequence: _Sequence) -> None:
        self._pool.close(sequence.key)
        del self._running[sequence.key]
        self._served.left(sequence.request.tenant)
        waited = sequence.first_at - sequence.came_at
        self._answers[sequence.order] = SimulatedAnswer(
            sequence.request, tuple(sequence.times), waited, sequence.cached or 0, sequence.preempted
        )
