"""Everything that happens before the first request: workers start, sizes are warmed and measured, answers compared."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from microbatch.batch.exactness import ExactnessReport
from microbatch.curves.profile import Profile
from microbatch.errors import InvalidSettings, MicrobatchError, ModelFailed
from microbatch.serving.decisions.choose import work_of
from microbatch.serving.decisions.isolate import check_count
from microbatch.serving.decisions.latency import Latency, latency_of
from microbatch.serving.decisions.limits import UNMEASURED, Limits, Wishes, settle
from microbatch.serving.decisions.view import Waiting
from microbatch.serving.engine.out_of_memory import ran_out
from microbatch.serving.engine.same_answer import check_same_answer, mates_of
from microbatch.serving.engine.undisturbed import undisturbed
from microbatch.serving.engine.workers import InProcess, InThread, Worker, spec_of

logger = logging.getLogger(__name__)

LARGEST_MEASURED = 256
RISES = 1.02
"""Sizes are doubled while that raises the throughput by 2 %."""
STALLS = 3
"""So many sizes in a row may fail to: a batch of 2, or of 4, can take longer than twice one item, for it runs other
kernels, and yet one of 8 hardly more than that."""
BUDGET = 10.0
"""Seconds that measuring at the start may take, about."""
CHECKS = ("raise", "warn", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be served and how; see `DynamicBatcher`."""

    run: Any
    profile: str | Path | Profile | None
    examples: Sequence[Any]
    wishes: Wishes
    facts: Callable[[Any], Waiting]
    by_cost: bool
    collate: Callable[[list[Any]], Any] | None
    workers: int
    processes: bool
    devices: tuple[str, ...]
    stateful: bool
    check: str
    fast: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a server works with.

    Attributes:
        workers: started and warm.
        latency: from the profile or measured; empty where there was neither profile nor example.
        limits: what it keeps to.
        report: of the comparison of answers; None where it was not made.
        classes: sizes that batches are filled up to, where each new size would cost a compilation; else empty.
    """

    workers: tuple[Worker, ...]
    latency: Latency
    limits: Limits
    report: ExactnessReport | None
    classes: tuple[int, ...]


def is_module(run: Any) -> bool:
    """Whether it is an nn.Module, asked without loading torch."""
    return any(kind.__module__ == "torch.nn.modules.module" and kind.__name__ == "Module" for kind in type(run).__mro__)


def check_plan(plan: Plan) -> None:
    """Refuses what contradicts itself before anything starts.

    Raises:
        InvalidSettings: with every contradiction.
    """
    problems = []
    if not callable(plan.run):
        problems.append(f"A {type(plan.run).__name__} cannot be called with a list of items.")
    if isinstance(plan.workers, bool) or not isinstance(plan.workers, int) or plan.workers < 1:
        problems.append(f"workers={plan.workers!r} is not a whole number of 1 or more.")
    if plan.check not in CHECKS:
        problems.append(f"check={plan.check!r} is none of {', '.join(CHECKS)}.")
    if plan.devices and not is_module(plan.run):
        problems.append("devices= places a module; a function places its work itself.")
    if plan.collate is not None and not is_module(plan.run):
        problems.append("collate= is for a module; a function gets the list itself.")
    if problems:
        raise InvalidSettings(" ".join(problems), "Change or leave out what is named.")
    settle(plan.wishes, Latency(), by_cost=plan.by_cost)
    if plan.processes and not is_module(plan.run):
        spec_of(plan.run)


def prepare(plan: Plan) -> Prepared:
    """Start, warm, measure, settle and compare, in this order.

    Raises:
        InvalidSettings: contradictions, now that the latency is known.
        InvalidOutput: not one result for each item.
        InvalidModel: an item alone and in a batch get different answers.
        ModelFailed: the function raises on an example.
    """
    workers = _workers(plan)
    try:
        for worker in workers:
            worker.start()
        latency = Latency() if plan.profile is None else latency_of(plan.profile, tokens=plan.by_cost)
        examples = _examples(plan)
        classes = _classes(plan)
        if examples:
            latency = _warmed(plan, workers, examples, latency, classes)
        limits = settle(plan.wishes, latency, by_cost=plan.by_cost)
        for note in limits.notes:
            logger.warning("%s", note)
        report = _compared(plan, workers[0], examples, classes) if examples and plan.check != "off" else None
    except BaseException:
        for worker in workers:
            worker.stop()
        raise
    return Prepared(workers=tuple(workers), latency=latency, limits=limits, report=report, classes=classes)


def _workers(plan: Plan) -> list[Worker]:
    if not is_module(plan.run):
        spec = spec_of(plan.run) if plan.processes else None
        return [InThread(plan.run) if spec is None else InProcess(spec) for _ in range(plan.workers)]
    from microbatch.serving.engine.module_runner import ModuleRunner, serving_copy

    per_token = getattr(plan.collate, "per_token", False)
    trim = plan.collate.length if per_token else None  # type: ignore[union-attr]  # what is per token has lengths
    found: list[Worker] = []
    for device in plan.devices or ("cpu",):
        runner = ModuleRunner(serving_copy(plan.run, device), device, plan.collate, trim, fast=plan.fast)
        found += [InProcess(runner) if plan.processes else InThread(runner) for _ in range(plan.workers)]
    return found


def _examples(plan: Plan) -> list[Any]:
    """Two or more, where there is one; none for what must not run twice."""
    if plan.stateful or not len(plan.examples):
        return []
    examples = list(plan.examples)
    return examples if len(examples) > 1 else [*examples, *mates_of(examples[0])]


def _classes(plan: Plan) -> tuple[int, ...]:
    if not is_module(plan.run):
        return ()
    from microbatch.serving.engine.module_runner import is_compiled

    return _doubling(plan.wishes.max_batch_size or UNMEASURED) if is_compiled(plan.run) else ()


def _doubling(most: int) -> tuple[int, ...]:
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return tuple(sizes)


def _warmed(
    plan: Plan, workers: Sequence[Worker], examples: list[Any], latency: Latency, classes: tuple[int, ...]
) -> Latency:
    """Every worker has run every size; measured on the first one, unless a profile tells."""
    known = latency.known
    most = settle(plan.wishes, latency, by_cost=plan.by_cost).max_batch_size if known else plan.wishes.max_batch_size
    table, best, stalled, start = {}, 0.0, 0, time.monotonic()
    for size in classes or _doubling(most or LARGEST_MEASURED):
        items = _repeated(examples, size)
        seconds = _timed(workers[0], items, repeats=0 if known else 3)
        if seconds is None:
            break
        for worker in workers[1:]:
            _timed(worker, items, repeats=0)
        cost = _cost(plan, items)
        table[cost] = seconds
        stalled = 0 if cost / seconds >= RISES * best else stalled + 1
        best = max(best, cost / seconds)
        over = time.monotonic() - start > BUDGET or seconds > (plan.wishes.latency_target or BUDGET)
        if not classes and (over or (most is None and stalled == STALLS)):
            break
    return latency if known else Latency(table)


def _cost(plan: Plan, items: list[Any]) -> int:
    return work_of([plan.facts(item) for item in items]) if plan.by_cost else len(items)


def _repeated(examples: list[Any], size: int) -> list[Any]:
    return [examples[place % len(examples)] for place in range(size)]


def _timed(worker: Worker, items: list[Any], repeats: int) -> float | None:
    """Least seconds of some calls after a first one; None where memory ran out with more than one item."""
    try:
        first = _seconds(worker, items)
        return min((_seconds(worker, items) for _ in range(repeats)), default=first)
    except MicrobatchError:
        raise
    except Exception as error:
        if ran_out(error) and len(items) > 1:
            return None
        raise ModelFailed(
            f"{type(error).__name__} on a batch of {len(items)} of the examples: {error}",
            "Give examples= that it can run, one item each, without a batch dimension.",
        ) from error


def _seconds(worker: Worker, items: list[Any]) -> float:
    results: list[Any] = []
    seconds = undisturbed(lambda: results.append(worker.run(items)))
    check_count(len(items), results[0])
    return seconds


def _compared(plan: Plan, worker: Worker, examples: list[Any], classes: tuple[int, ...]) -> ExactnessReport:
    keys = [plan.facts(item).key for item in examples]
    alike = [item for item, key in zip(examples, keys) if key == keys[0]]
    if len(alike) < 2:
        alike = [alike[0], *mates_of(alike[0])]
    if classes:
        alike = alike[: max(size for size in classes if size <= len(alike))]
    explain = _explain(plan) if is_module(plan.run) else None
    return check_same_answer(worker.run, alike, explain=explain, strict=plan.check == "raise")


def _explain(plan: Plan) -> Callable[[list[Any]], ExactnessReport]:
    def explain(examples: list[Any]) -> ExactnessReport:
        from microbatch.batch.independence import check_independence
        from microbatch.serving.engine.collating import collated

        return check_independence(plan.run, (plan.collate or collated)(examples), mode="inference")

    return explain
