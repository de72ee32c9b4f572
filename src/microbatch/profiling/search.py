"""The search over batch sizes: how far to go, which sizes to fill in, which to repeat. Holds what was timed so far."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from microbatch.batch.oom import is_out_of_memory, release
from microbatch.curves.cliffs import find_shape
from microbatch.curves.levels import find_levels
from microbatch.curves.profile import Failure, MemoryCurve, Point
from microbatch.errors import ModelFailed
from microbatch.measure.load import LoadWatch
from microbatch.measure.timer import time_call, warm_up
from microbatch.profiling import grid
from microbatch.profiling.workload import Workload
from microbatch.units import format_bytes

Progress = Callable[[float, str], None]

LARGEST_BATCH = 1 << 20
FIRST_ROUNDS = 3
MOST_ROUNDS = 40
SURE = 0.012
"""Standard error of a size's time at which more rounds tell nothing new: its 90 % interval is then ±2 %."""
SHARE_OF_ONE_CALL = 1 / 150
"""No size whose single call takes more than this share of the budget: it is called some 15 times, and the sizes
below it together take as long again."""
SIZES_BEFORE_CARE, SHARE_BEFORE = 4, 1 / 40
"""Fewer sizes than that are no curve: until then a call may take longer, and each size is timed less often."""
SHARE_FOR_GRID = 0.6
MOST_GRID_ROUNDS = 8
SHARE_TO_VERIFY = 0.1
SHARE_FOR_TIMING = 0.8
"""The rest of the budget is for looking inside: memory, overhead, kernels, layers."""
MOST_CALLS, VISIT_SECONDS = 3, 0.01
"""A visit to a size times it up to three times while that takes less than 10 ms: short calls scatter most."""
ITEMS_FOR_GRID, MOST_ITEMS, LAST_ITEMS = 28, 44, 47
"""Timed items as multiples of the largest size: for the grid; in all; and in all where noise forbids an answer."""
GOOD_ENOUGH, MUST_KNOW = 0.025, 0.032
"""Standard error that a grid's sizes should reach, and the one (in the middle of all sizes) above which an answer is at
risk: `explain` refuses at 0.035."""
MOST_BISECTIONS = 24
SHARE_FOR_NARROWING = 0.15
FEWEST_FOR_A_CLIFF = 5
MOST_ROUNDS_TO_NARROW = 3
CLEARLY = 3.0
"""Standard errors above 1 at which a cliff is worth the price of finding its exact batch."""


@dataclass(slots=True)
class Samples:
    """What was timed at one size so far."""

    seconds: list[float] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    first_call_seconds: float | None = None


class Search:
    """The state of one measurement."""

    def __init__(
        self, workload: Workload, *, budget: float, memory: MemoryCurve | None, progress: Progress | None = None
    ) -> None:
        self.workload, self.budget, self.memory = workload, budget, memory
        self._progress, self._start = progress, time.perf_counter()
        self.samples: dict[int, Samples] = {}
        self.failures: list[Failure] = []
        self.round = 0

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    @property
    def timed_rows(self) -> int:
        """Items in all timed calls together."""
        return sum(size * len(found.seconds) for size, found in self.samples.items())

    @property
    def largest(self) -> int:
        """The largest size that ran."""
        return max(self.samples)

    def items_of_visit(self, batch_size: int) -> int:
        """Items that one visit to a size will time; short calls are timed more than once."""
        known = self.samples.get(batch_size)
        seconds = min(known.seconds) if known and known.seconds else VISIT_SECONDS
        return batch_size * min(MOST_CALLS, max(1, math.ceil(VISIT_SECONDS / seconds)))

    def say(self, text: str) -> None:
        """Tell the reader what is being done."""
        if self._progress is not None:
            self._progress(min(self.elapsed / self.budget, 0.99), text)

    def measure(self, batch_size: int) -> bool:
        """One untimed call at a size and up to three timed ones; False, with a Failure noted, when it does not run."""
        known = self.samples.get(batch_size)
        failure: Failure | None = None
        try:
            step = self.workload.prepare(batch_size)
            first = warm_up(step, self.workload.device)
            seconds, updates = self._time(step)
        except Exception as error:  # whatever the user's model raises ends the search, not the measurement
            failure = failure_of(batch_size, error)
        if failure is not None:  # outside the except block: the exception holds the frames, and so the memory
            release(self.workload.device)
            self.failures.append(failure)
            self.samples.pop(batch_size, None)
            return False
        if known is None:
            known = self.samples[batch_size] = Samples(first_call_seconds=first)
        known.seconds.extend(seconds)
        known.updates.extend(updates)
        known.rounds.extend([self.round] * len(seconds))
        known.times.extend([self.elapsed] * len(seconds))
        return True

    def _time(self, step: Callable[[], object]) -> tuple[list[float], list[float]]:
        """Up to three calls, and of each the seconds in which an optimizer updated, where there is one."""
        seconds: list[float] = []
        updates: list[float] = []
        while len(seconds) < MOST_CALLS and sum(seconds) < VISIT_SECONDS:
            seconds.append(time_call(step, self.workload.device))
            if (update := self.workload.update_seconds) is not None:
                updates.append(min(update, seconds[-1]))
        return seconds, updates

    def measure_round(self, sizes: Iterable[int], text: str) -> None:
        """Every size once, up in even rounds and down in odd ones, so that drift hits both directions alike."""
        self.round += 1
        ordered = sorted(sizes, reverse=self.round % 2 == 1)
        for size in ordered:
            self.say(f"{text}, round {self.round}: batch {size}")
            self.measure(size)

    def points(self) -> tuple[Point, ...]:
        """The samples as points, in ascending order."""
        return tuple(
            Point(
                batch_size=size,
                samples=tuple(found.seconds),
                rounds=tuple(found.rounds),
                times=tuple(found.times),
                update_samples=tuple(found.updates),
                first_call_seconds=found.first_call_seconds,
            )
            for size, found in sorted(self.samples.items())
            if found.seconds
        )


def failure_of(batch_size: int, error: Exception) -> Failure:
    kind = "out_of_memory" if is_out_of_memory(error) else "error"
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return Failure(batch_size=batch_size, kind=kind, text=f"{type(error).__name__}: {text}")


def reach(search: Search, top: int) -> str:
    """Doubles the size until throughput stops rising or something stops it; returns what did."""
    fits = search.memory.predicted_largest if search.memory and search.memory.predicted_largest is not None else top
    if fits < 1:
        memory = search.memory
        assert memory is not None
        raise ModelFailed(
            f"Not even batch 1 fits: it needs {format_bytes(memory.fixed_bytes + memory.bytes_per_item)} and the "
            f"limit is {format_bytes(memory.limit_bytes)} ({memory.limit_source}).",
            "Raise the limit or use a smaller model.",
        )
    search.round += 1
    size = 1
    while size <= top:
        if size > fits:
            return _largest_that_fits(search, fits)
        search.say(f"finding the range: batch {size}")
        if not search.measure(size):
            stop = _after_failure(search, size)
            if stop:
                return stop
            size *= 2
            continue
        search.measure(size)
        if _is_saturated(search):
            return "saturated"
        share = SHARE_OF_ONE_CALL if len(search.samples) >= SIZES_BEFORE_CARE else SHARE_BEFORE
        if 2 * min(search.samples[size].seconds) > share * search.budget or search.elapsed > 0.4 * search.budget:
            return "budget"
        if size == top:
            break
        size = min(2 * size, top)
    return "limit"


def largest_that_fits(search: Search, stopped_by: str) -> int | None:
    """The largest batch within memory, itself run; None where memory is not what a user would meet first.

    Where throughput saturated before memory ended, the predicted largest is run once, if that is cheap.
    """
    if stopped_by == "memory":
        return search.largest
    fits = search.memory.predicted_largest if search.memory else None
    if fits is None or fits <= search.largest or stopped_by != "saturated":
        return None
    seconds = min(search.samples[search.largest].seconds) * fits / search.largest
    if 2 * seconds > SHARE_TO_VERIFY * search.budget:
        return None
    search.say(f"the largest that fits: batch {fits}")
    try:
        search.workload.prepare(fits)()
    except Exception as error:
        failure = failure_of(fits, error)
    else:
        return fits
    release(search.workload.device)
    search.failures.append(failure)
    return None


def _is_saturated(search: Search) -> bool:
    """Whether throughput has stopped rising; the last sizes are timed again before that is believed."""
    for again in (True, False):
        sizes = sorted(search.samples)
        if not grid.is_saturated(sizes, [min(search.samples[s].seconds) for s in sizes]):
            return False
        for _ in range(2 * again):
            search.measure_round(sizes[-3:], "making sure of the range")
    return True


def _after_failure(search: Search, size: int) -> str:
    """What a failed size means: the end of the search, or (before any size ran) only a size too small."""
    failure = search.failures[-1]
    if failure.kind == "out_of_memory":
        return _largest_below_failure(search, size)
    if search.samples:
        return "error"
    if size >= max(search.workload.batch_size, 2):
        raise ModelFailed(f"The model fails at batch {size}: {failure.text}", "Mend the model, or its example.")
    return ""


def _largest_that_fits(search: Search, fits: int) -> str:
    """Runs the predicted largest size, so that it is known and not only computed."""
    last = max(search.samples, default=0)
    if fits <= last:
        return "memory"
    seconds = min(search.samples[last].seconds) * fits / last if last else 0.0
    if 6 * seconds > search.budget - search.elapsed:
        return "budget"
    search.say(f"the largest that fits: batch {fits}")
    return "memory" if search.measure(fits) else _largest_below_failure(search, fits)


def _largest_below_failure(search: Search, failed: int) -> str:
    """Bisects between the largest size that ran and the smallest that did not, to within 5 %."""
    while True:
        low, high = max(search.samples, default=0), failed
        if low == 0 and failed == 1:
            text = search.failures[-1].text
            raise ModelFailed(f"Not even batch 1 fits: {text}", "Use a smaller model or raise the limit.")
        if high - low <= max(1, low // 20):
            return "memory"
        middle = (low + high) // 2
        search.say(f"the largest that fits: batch {middle}")
        if not search.measure(middle):
            if search.failures[-1].kind != "out_of_memory":
                return "error"
            failed = middle


def refine(search: Search, watch: LoadWatch, edges: Sequence[int] = (), wanted: Sequence[int] = ()) -> None:
    """Fills the grid, narrows what looks like a cliff, and repeats until every size is sure."""
    for _ in range(2):
        search.measure_round(list(search.samples), "the noise")
    chosen = _choose(search, edges, wanted)
    for _ in range(FIRST_ROUNDS):
        search.measure_round(chosen, "the grid")
        watch.sample()
    _narrow(search)
    _repeat(search, watch)


def _choose(search: Search, edges: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Sizes for the grid: many on a quiet machine, fewer and more often on a noisy one, for the same work."""
    sizes, top = sorted(search.samples), search.largest
    seconds_of = grid.estimate(sizes, [min(search.samples[size].seconds) for size in sizes])
    return grid.choose_sizes(
        grid.levels_of_detail(top, edges, wanted),
        seconds_of,
        allowance=SHARE_FOR_GRID * (search.budget - search.elapsed),
        rounds=_rounds_for(find_levels(search.points()).sigma, FIRST_ROUNDS, MOST_GRID_ROUNDS),
        largest_items=ITEMS_FOR_GRID * top - search.timed_rows,
    )


def _rounds_for(sigma: float | None, fewest: int, most: int) -> int:
    """Rounds after which a size's time is known well enough, when one call varies by `sigma`."""
    return min(max(round(((sigma or 0.0) / GOOD_ENOUGH) ** 2), fewest), most)


def _narrow(search: Search) -> None:
    """Bisects the intervals of the clearest cliffs until their exact batch is known.

    On a noisy machine the neighbours are timed again beside each new size, so that all three share its moment.
    """
    tried: set[int] = set()
    end = search.elapsed + SHARE_FOR_NARROWING * search.budget
    for _ in range(MOST_BISECTIONS):
        points = search.points()
        if len(points) < FEWEST_FOR_A_CLIFF:
            return
        sizes = [point.batch_size for point in points]
        levels = find_levels(points)
        shape = find_shape(levels)
        rounds = _rounds_for(levels.sigma, 2, MOST_ROUNDS_TO_NARROW)
        clear = [i for i in shape.cliffs if shape.log_excess[i] > CLEARLY * shape.standard_error[i]]
        new = [
            size for size in grid.next_bisection(sizes, [(sizes[i - 1], sizes[i]) for i in clear]) if size not in tried
        ]
        beside = (neighbour for size in new for neighbour in _around(sizes, size))
        visited = {*new, *beside} if (levels.sigma or 0.0) > GOOD_ENOUGH else set(new)
        cost = 2 * rounds * sum(min(search.samples[s].seconds) for s in visited if s in search.samples)
        items = search.timed_rows + rounds * sum(map(search.items_of_visit, visited))
        if not new or search.elapsed + cost > end or items > MOST_ITEMS * search.largest:
            return
        tried.update(new)
        for _ in range(rounds):
            search.measure_round(visited, "narrowing a jump")


def _around(sizes: list[int], size: int) -> tuple[int, int]:
    return max(s for s in sizes if s < size), min(s for s in sizes if s > size)


def _repeat(search: Search, watch: LoadWatch) -> None:
    """More rounds of the sizes whose time is not yet known well enough, the cheap ones first, while time is left."""
    for _ in range(MOST_ROUNDS):
        levels = find_levels(search.points())
        left = SHARE_FOR_TIMING * search.budget - search.elapsed
        unsure = [
            (2 * float(seconds), int(size))
            for size, seconds, error in zip(levels.batch_sizes, levels.seconds, levels.standard_error, strict=True)
            if error > SURE
        ]
        most = MOST_ITEMS if float(np.median(levels.standard_error)) < MUST_KNOW else LAST_ITEMS
        affordable = grid.within(
            [(float(search.items_of_visit(size)), size) for size in grid.within(unsure, left / 3)],
            most * search.largest - search.timed_rows,
        )
        if not affordable:
            return
        search.measure_round(affordable, "repeating")
        watch.sample()
