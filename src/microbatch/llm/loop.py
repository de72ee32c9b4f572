"""The steps of an engine, without a thread: who computes what is decided, computed, chosen and told.

Everything here is called by one thread. What a request does wrong ends that request only.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Pairs
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Protocol

import torch

from microbatch.batch.size_limit import SizeLimit
from microbatch.errors import DeadlineExceeded, ModelFailed
from microbatch.llm.budget import BudgetFollower
from microbatch.llm.choosing import choose_each
from microbatch.llm.compute import Computed, Steps, compute
from microbatch.llm.delivery import Deliveries, Emission
from microbatch.llm.detokenize import Detokenizer
from microbatch.llm.fairness import Served
from microbatch.llm.kv_blocks import BlockPool, Found, OutOfBlocks
from microbatch.llm.metrics import Counters
from microbatch.llm.observing import observe_answer, observe_token, sample_of
from microbatch.llm.row_pieces import Row
from microbatch.llm.sampling import Chosen, logprobs_of
from microbatch.llm.scheduler import SchedulerView, SequenceView, Share, Step, schedule
from microbatch.llm.sequence import Request, Sequence, StopText
from microbatch.llm.stop import StopFilter
from microbatch.llm.tokenizer import Tokenizer
from microbatch.units import format_seconds

REFRESHED = 16
"""Waiting sequences whose share of the prefix cache is looked up again when a prompt has been computed."""
COMPACT = 1024
"""Answered requests that may stay among the deadlines, beyond as many as there are open ones."""
NEVER = float("inf")
logger = logging.getLogger(__name__)
NOTHING = Found(0, 0)


class CachedModel(Steps, Protocol):
    """A model with a cache in blocks; `microbatch.llm.runner.Runner` is one."""

    def copy(self, pairs: Pairs[tuple[int, int]]) -> None:
        """Copy blocks, each from the first to the second of a pair."""
        ...


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part of a step."""

    sequence: Sequence
    row: Row
    samples: bool


class StepLoop:
    """The sequences of an engine and their blocks."""

    def __init__(
        self,
        runner: CachedModel,
        pool: BlockPool,
        tokenizer: Tokenizer,
        follower: BudgetFollower,
        counters: Counters,
        *,
        block_size: int,
        device: torch.device | str = "cpu",
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            runner: computes rows.
            pool: owns the blocks of its cache.
            tokenizer: for stop strings, and for the model's own ends.
            follower: says how much a step may hold.
            counters: what has happened.
            block_size: tokens of a block.
            device: where the model runs.
            clock: what tells seconds.
        """
        self._runner, self._pool, self._tokenizer, self.follower = runner, pool, tokenizer, follower
        self._counters, self._block_size, self._device, self._clock = counters, block_size, device, clock
        self._running: dict[Hashable, Sequence] = {}
        self._waiting: dict[Hashable, Sequence] = {}
        self._requests: set[Request] = set()
        self._keys = count()
        self._deadlines: list[tuple[float, int, Request]] = []
        self._memory = SizeLimit()
        self._served = Served()
        self._stale = False
        self._deliveries = Deliveries()

    @property
    def busy(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self._requests)

    @property
    def running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that hold none."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """A request enters; it has been found admissible."""
        self._requests.add(request)
        sequence = self._sequence(request, 0)
        self._wait(sequence)
        if request.deadline < NEVER:
            heapq.heappush(self._deadlines, (request.deadline, sequence.key, request))
            if len(self._deadlines) > 2 * len(self._requests) + COMPACT:
                self._deadlines = [row for row in self._deadlines if not row[2].settled]
                heapq.heapify(self._deadlines)

    def abort(self, request: Request) -> None:
        """Nobody wants the answer any more: its blocks are free at once."""
        if request in self._requests:
            self._end(request, "abort")

    def fail_all(self, error: Exception) -> None:
        """Everybody is told that there will be no answer."""
        for request in list(self._requests):
            self.fail(request, error)
        self._deliveries.send()

    def step(self) -> bool:
        """Compute once for whoever the scheduler picks, and tell what came of it. False where nothing could be done."""
        start = self._clock()
        self._expire(start)
        works = self._works(start) if self._requests else []
        if works:
            with torch.inference_mode():
                self._compute(works, start)
        self._deliveries.send()
        if works:
            self._counters.step_seconds += self._clock() - start
        return bool(works)

    # -- who computes what

    def _works(self, now: float) -> list[Work]:
        plan = schedule(self._view(now))
        self._note(plan, now)
        works, copies = [], list[tuple[int, int]]()
        for share in plan.shares:
            work = self._work(share, copies, now)
            if work is not None:
                works.append(work)
        if copies:
            self._runner.copy(copies)
        return works

    def _view(self, now: float) -> SchedulerView:
        budget, free = self.follower.budget, self._pool.free_blocks
        if self._memory.largest is not None:
            budget = replace(budget, max_tokens=self._memory.first_size(budget.max_tokens))
        if self._stale:
            self._look_again()
        short = free < 2 * len(self._running)
        return SchedulerView(
            running=tuple([self._running_view(each, short=short) for each in self._running.values()]),
            waiting=tuple([each.view or _waiting_view(each) for each in self._waiting.values()]),
            free_blocks=free,
            block_size=self._block_size,
            num_blocks=self._pool.num_blocks,
            budget=budget,
            model=self.follower.model,
            now=now,
            served=self._served.tokens,
        )

    def _running_view(self, sequence: Sequence, *, short: bool) -> SequenceView:
        """What it would free is counted only where blocks are short: it takes a look at each of them."""
        request, pool = sequence.request, self._pool
        return SequenceView(
            sequence.key, known=len(sequence.ids), computed=sequence.computed, arrived=request.arrived,
            answers=_answers(request),
            priority=request.priority, tenant=request.tenant, skipped=sequence.skipped, preempted=sequence.preempted,
            copies=pool.copies(sequence.key) if request.params.n > 1 else 0,
            frees=pool.frees(sequence.key) if short else None,
        )  # fmt: skip

    def _look_again(self) -> None:
        """A prompt has been computed: the first of those that wait may find more of theirs in the cache."""
        self._stale = False
        for sequence in islice(self._waiting.values(), REFRESHED):
            found = self._look(sequence)
            if found != sequence.found:
                sequence.found, sequence.view = found, None

    def _look(self, sequence: Sequence) -> Found:
        return NOTHING if sequence.request.scores_wanted else self._pool.look(sequence.ids)

    def _note(self, plan: Step, now: float) -> None:
        for key in plan.preempted:
            self._preempt(self._running[key], now, plan.reason)
        for key in plan.skipped:
            if (sequence := self._waiting.get(key)) is not None:
                sequence.skipped += 1
                sequence.view = None

    def _preempt(self, sequence: Sequence, now: float, reason: str) -> None:
        """It gives its blocks back and will be computed again, what it has generated included."""
        self._close(sequence)
        del self._running[sequence.key]
        sequence.preempted += 1
        self._wait(sequence)
        self._counters.num_preemptions += 1
        done = f"{len(sequence.output_ids)} of at most {sequence.request.max_tokens} tokens"
        self._counters.event(now, "preemption", f"A request of {sequence.request.tenant or 'nobody'} with {done} "
                             f"gave its blocks back: {reason}")  # fmt: skip

    def _wait(self, sequence: Sequence) -> None:
        sequence.found, sequence.view = self._look(sequence), None
        self._waiting[sequence.key] = sequence

    def _work(self, share: Share, copies: list[tuple[int, int]], now: float) -> Work | None:
        """A row for a share, its blocks taken; None where they do not suffice after all."""
        sequence = self._running.get(share.key) or self._waiting[share.key]
        if not sequence.opened:
            self._open(sequence, now)
        known, start = len(sequence.ids), sequence.computed
        end = min(known, start + share.tokens)
        try:
            copies += self._pool.grow(sequence.key, end)
        except OutOfBlocks:  # the cache held less of it than it did when this was planned
            self._preempt(sequence, now, "the blocks that were free have been taken")
            return None
        samples, request = end == known, sequence.request
        scored = request.scores_wanted and start < len(request.prompt_ids) - 1
        row = Row(
            ids=sequence.ids[start:end], start=start, table=self._pool.table(sequence.key), all_logits=scored,
            wants_logits=samples,
        )  # fmt: skip
        return Work(sequence, row, samples)

    def _open(self, sequence: Sequence, now: float) -> None:
        request = sequence.request
        sequence.computed = self._pool.open(sequence.key, sequence.ids, share=not request.scores_wanted)
        sequence.committed, sequence.opened = sequence.computed // self._block_size, True
        if sequence.started_at is None:
            sequence.started_at = now
        if request.cached_tokens is None:
            request.cached_tokens = sequence.computed
            self._counters.prompt_tokens += len(request.prompt_ids)
        self._running[sequence.key] = self._waiting.pop(sequence.key)

    # -- what comes of it

    def _compute(self, works: list[Work], start: float) -> None:
        before = self._clock()
        computed = compute(self._runner, [work.row for work in works], self._device)
        after = self._clock()
        self._remember_memory(works, computed, after)
        for place, error in computed.failed.items():
            self.fail(works[place].sequence.request, error)
        for place, logits in computed.every.items():
            self._score(works[place], logits)
        self._commit(works)  # before anything ends: what was computed is counted, and others find it in the cache
        if computed.last is not None:
            self._counters.generation_tokens += self._sample(works, computed)
        self._observe_step(works, start, after - before)

    def _observe_step(self, works: list[Work], start: float, model_seconds: float) -> None:
        end, counters = self._clock(), self._counters
        sample = sample_of([work.row for work in works], end - start)
        counters.steps += 1
        counters.model_seconds += model_seconds
        counters.observe("iteration_tokens_total", sample.tokens)
        try:
            slow = self.follower.observe(sample)
        except Exception:  # who learns from steps must never end what they answer: the budget stays as it was
            logger.exception("The budget could not follow %s.", sample)
            return
        if slow:
            counters.event(end, "slow_step", slow)

    def _remember_memory(self, works: list[Work], computed: Computed, now: float) -> None:
        """After a step that ran out of memory the next ones are smaller, and after some time larger again."""
        wanted = self.follower.budget.max_tokens
        if not computed.out_of_memory:
            self._memory = self._memory.after_success(wanted)
            return
        self._memory = self._memory.after_failure(max(1, computed.largest))
        tokens = sum([len(work.row.ids) for work in works])
        self._counters.event(now, "out_of_memory", f"A step of {tokens} tokens ran out of memory; "
                             f"{computed.largest} tokens went through.")  # fmt: skip

    def _score(self, work: Work, logits: torch.Tensor) -> None:
        """Probabilities of the prompt's tokens: those at a place come from the logits of the place before."""
        request, start = work.sequence.request, work.row.start
        if request.settled:
            return
        first, last = len(request.prompt_scores), min(start + len(logits), len(request.prompt_ids) - 1)
        if first < last:
            ids = request.prompt_ids[first + 1 : last + 1]
            assert request.params.prompt_logprobs is not None
            try:
                request.prompt_scores += logprobs_of(
                    logits[first - start : last - start], ids, request.params.prompt_logprobs
                )
            except Exception as error:  # memory, most likely
                self.fail(request, error)

    def _sample(self, works: list[Work], computed: Computed) -> int:
        """Choose the next tokens and tell them; how many there were."""
        assert computed.last is not None
        before = self._clock()
        sequences, rows = self._samplers(works, computed)
        whole = rows == list(range(len(computed.last)))
        logits = computed.last if whole else computed.last[rows]
        chosen = choose_each(logits, [each.choosing for each in sequences])
        now = self._clock()
        self._counters.sampling_seconds += now - before
        for sequence, choice in zip(sequences, chosen):
            if isinstance(choice, Exception):
                self.fail(sequence.request, choice)
            elif not sequence.request.settled:
                self._add(sequence, choice, now)
        return len(sequences)

    def _samplers(self, works: list[Work], computed: Computed) -> tuple[list[Sequence], list[int]]:
        """Sequences that choose a token, and the row of the logits that each has; answers to one prompt share one."""
        assert computed.last is not None
        sequences, rows = [], []
        for row, place in enumerate(computed.sampled):
            sequence = works[place].sequence
            if sequence.request.settled:
                continue
            answers = (
                self._fork(sequence) if len(sequence.request.sequences) < sequence.request.params.n else [sequence]
            )
            sequences += answers
            rows += [row] * len(answers)
        return sequences, rows

    def _fork(self, first: Sequence) -> list[Sequence]:
        """The prompt has been computed: the other answers to it begin, with the same blocks."""
        request = first.request
        for index in range(1, request.params.n):
            child = self._sequence(request, index)
            self._pool.fork(first.key, child.key)
            child.computed, child.committed, child.opened = first.computed, first.committed, True
            child.started_at = first.started_at
            self._running[child.key] = child
        return request.sequences

    def _add(self, sequence: Sequence, chosen: Chosen, now: float) -> None:
        request = sequence.request
        text = sequence.add(chosen)
        observe_token(self._counters, sequence, now)
        if request.reply.streams:
            scores = None if request.params.logprobs is None else chosen
            own = None if sequence.stop_text is None else text
            self._deliveries.add(request.reply, Emission(sequence.index, chosen.token_id, scores, own,
                                                         sequence.finish_reason, sequence.stop_reason))  # fmt: skip
        if sequence.finish_reason is not None:
            self._finish(sequence, now)

    def _commit(self, works: list[Work]) -> None:
        """Blocks that have become full can be found by others."""
        for work in works:
            sequence = work.sequence
            if sequence.request.settled:
                continue
            self._served.computed(sequence.request.tenant, len(work.row.ids))
            sequence.computed = work.row.start + len(work.row.ids)
            full = sequence.computed // self._block_size
            if full > sequence.committed:
                self._pool.commit(sequence.key, sequence.ids[: sequence.computed])
                sequence.committed = full
                self._stale = self._stale or not sequence.output_ids or len(work.row.ids) > 1

    # -- the end of sequences and requests

    def _finish(self, sequence: Sequence, now: float) -> None:
        request = sequence.request
        self._drop(sequence)
        observe_answer(self._counters, sequence, now)
        if request.finished:
            for each in request.sequences:
                self._counters.request_success[each.finish_reason or ""] += 1
            self._settle(request)
            self._deliveries.add(request.reply, None)

    def fail(self, request: Request, error: Exception) -> None:
        """A request ends with an error, which it is told at the end of the step."""
        if request not in self._requests:
            return
        self._end(request, "error")
        self._deliveries.add(request.reply, error)
        if isinstance(error, ModelFailed):
            self._counters.event(self._clock(), "failure", str(error))

    def _end(self, request: Request, how: str) -> None:
        self._counters.request_success[how] += 1
        for sequence in request.sequences:
            self._drop(sequence)
        self._settle(request)

    def _settle(self, request: Request) -> None:
        request.settled = True
        for _ in request.sequences:
            self._served.left(request.tenant)
        self._requests.discard(request)

    def _drop(self, sequence: Sequence) -> None:
        self._running.pop(sequence.key, None)
        self._waiting.pop(sequence.key, None)
        self._close(sequence)

    def _close(self, sequence: Sequence) -> None:
        if sequence.opened:
            self._pool.close(sequence.key)
            sequence.opened, sequence.computed, sequence.committed = False, 0, 0

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            due, _, request = heapq.heappop(self._deadlines)
            if request.settled:
                continue
            self._counters.expired += 1
            allowed, took = due - request.arrived, now - request.arrived
            done = sum(len(each.output_ids) for each in request.sequences)
            self.fail(request, DeadlineExceeded(
                f"The deadline of {format_seconds(allowed)} passed after {format_seconds(took)}, "
                f"with {done} of at most {request.max_tokens * request.params.n} tokens.",
                "Give it more time, or ask for fewer tokens.",
            ))  # fmt: skip

    # -- small parts

    def _sequence(self, request: Request, index: int) -> Sequence:
        params, stop_text = request.params, None
        if params.stop:
            detokenizer = Detokenizer(self._tokenizer, request.prompt_ids)
            stop_text = StopText(detokenizer, StopFilter(params.stop, params.include_stop_in_output))
        sequence = Sequence(next(self._keys), index, request, stop_text)
        request.sequences.append(sequence)
        self._served.came(request.tenant)
        return sequence


def _waiting_view(sequence: Sequence) -> SequenceView:
    """Made once, for it stays as it is while nothing happens to the sequence."""
    request = sequence.request
    sequence.view = SequenceView(
        sequence.key, known=len(sequence.ids), cached=sequence.found.tokens, held=sequence.found.held,
        arrived=request.arrived, priority=request.priority, tenant=request.tenant, skipped=sequence.skipped,
        preempted=sequence.preempted, answers=_answers(request),
    )  # fmt: skip
    return sequence.view


def _answers(request: Request) -> int:
    """Sequences that one of this request stands for: all answers until they part."""
    return 1 if len(request.sequences) == request.params.n else request.params.n
