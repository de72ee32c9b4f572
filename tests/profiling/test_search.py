"""The search over sizes, on a machine that exists only here: planted times, memory and failures, no waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from microbatch.curves.profile import MemoryCurve
from microbatch.errors import ModelFailed
from microbatch.profiling import search as search_module
from microbatch.profiling.search import LARGEST_BATCH, Search, reach, refine

OUT_OF_MEMORY = "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"


@dataclass
class Machine:
    """Stands in for a workload, the clock and the timer."""

    seconds_of: Callable[[int], float]
    largest: int = LARGEST_BATCH
    error_at: Callable[[int], Exception | None] = lambda _: None
    batch_size: int = 4
    update_seconds: float | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    now: float = 0.0
    calls: list[int] = field(default_factory=list)

    def prepare(self, batch_size: int) -> int:
        return batch_size

    def run(self, size: int, _: object = None) -> float:
        error = self.error_at(size)
        if size > self.largest:
            error = RuntimeError(OUT_OF_MEMORY)
        if error is not None:
            raise error
        self.calls.append(size)
        self.now += self.seconds_of(size)
        return self.seconds_of(size)


class Watch:
    """Counts how often the machine was looked at."""

    def sample(self) -> None:
        pass


def start(monkeypatch: pytest.MonkeyPatch, machine: Machine, memory: MemoryCurve | None = None, **kw: Any) -> Search:
    monkeypatch.setattr(search_module, "warm_up", machine.run)
    monkeypatch.setattr(search_module, "time_call", machine.run)
    monkeypatch.setattr(search_module, "time", SimpleNamespace(perf_counter=lambda: machine.now))
    return Search(cast(Any, machine), budget=kw.pop("budget", 60.0), memory=memory, **kw)


def memory_for(largest: int) -> MemoryCurve:
    return MemoryCurve(
        fixed_bytes=0, bytes_per_item=1.0, limit_bytes=largest, limit_source="x", margin=0.0, predicted_largest=largest
    )


def test_reach_ends_where_throughput_saturates(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda b: 1e-3 * max(b, 64) / 64)
    search = start(monkeypatch, machine)
    assert reach(search, LARGEST_BATCH) == "saturated"
    assert max(search.samples) == 256


def test_reach_keeps_the_limit_and_measures_it(monkeypatch: pytest.MonkeyPatch) -> None:
    search = start(monkeypatch, Machine(lambda b: 1e-3 + 1e-6 * b))
    assert reach(search, 100) == "limit"
    assert sorted(search.samples) == [1, 2, 4, 8, 16, 32, 64, 100]


def test_reach_stops_before_one_call_eats_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda b: 0.01 * (1 + b / 100))
    search = start(monkeypatch, machine, budget=5.0)
    assert reach(search, LARGEST_BATCH) == "budget"
    assert machine.now < 5.0


def test_the_predicted_largest_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    search = start(monkeypatch, Machine(lambda b: 1e-3 + 1e-6 * b, largest=77), memory_for(77))
    assert reach(search, LARGEST_BATCH) == "memory"
    assert max(search.samples) == 77
    assert not search.failures


@pytest.mark.parametrize("largest", [20, 77, 1000])
def test_out_of_memory_is_bisected_to_the_largest_that_ran(monkeypatch: pytest.MonkeyPatch, largest: int) -> None:
    search = start(monkeypatch, Machine(lambda b: 1e-3 + 1e-6 * b, largest=largest))
    assert reach(search, LARGEST_BATCH) == "memory"
    assert 0.95 * largest - 1 <= max(search.samples) <= largest
    assert {failure.kind for failure in search.failures} == {"out_of_memory"}


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelFailed, match="Not even batch 1 fits"):
        reach(start(monkeypatch, Machine(lambda _: 1e-3, largest=0)), 8)
    with pytest.raises(ModelFailed, match="Not even batch 1 fits"):
        reach(start(monkeypatch, Machine(lambda _: 1e-3), memory_for(0)), 8)


def test_an_error_ends_the_search_with_its_text_and_the_last_good_size(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda b: 1e-3 + 1e-6 * b, error_at=lambda b: ValueError("too wide\nmore") if b > 20 else None)
    search = start(monkeypatch, machine)
    assert reach(search, LARGEST_BATCH) == "error"
    assert max(search.samples) == 16
    assert (search.failures[0].batch_size, search.failures[0].text) == (32, "ValueError: too wide")


def test_a_model_that_needs_two_items_is_measured_from_two(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda b: 1e-3 + 1e-6 * b, error_at=lambda b: ValueError("one value") if b < 2 else None)
    search = start(monkeypatch, machine)
    assert reach(search, 16) == "limit"
    assert sorted(search.samples) == [2, 4, 8, 16]


def test_a_model_that_always_raises_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda _: 1e-3, error_at=lambda _: TypeError("needs a mask"))
    with pytest.raises(ModelFailed, match="TypeError: needs a mask"):
        reach(start(monkeypatch, machine), 64)


def test_refine_interleaves_alternates_and_narrows_a_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    edge = 149
    machine = Machine(lambda b: 1e-4 * (20 + b) * (1.3 if b >= edge else 1.0))
    search = start(monkeypatch, machine)
    reach(search, 256)
    before = len(machine.calls)
    refine(search, cast(Any, Watch()))
    assert {edge - 1, edge} <= set(search.samples)
    rounds = machine.calls[before:][::2]
    first = rounds[: rounds.index(max(rounds)) + 1]
    assert first == sorted(first) and rounds[len(first)] == max(rounds)
    assert all(len(found.seconds) >= 2 for found in search.samples.values())


def test_refine_stops_when_sure_and_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = start(monkeypatch, Machine(lambda b: 1e-4 * (20 + b)))
    reach(quiet, 256)
    refine(quiet, cast(Any, Watch()))
    assert quiet.elapsed < 10.0

    state = {"n": 0}

    def jumpy(b: int) -> float:
        state["n"] += 1
        return 1e-3 * (20 + b) * (1.0 + 0.4 * (state["n"] * 7919 % 13) / 13)

    noisy = start(monkeypatch, Machine(jumpy), budget=20.0)
    reach(noisy, 64)
    refine(noisy, cast(Any, Watch()))
    assert noisy.elapsed < 20.0


def test_progress_says_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[float, str]] = []
    search = start(monkeypatch, Machine(lambda b: 1e-3 * b), progress=lambda *news: said.append(news))
    reach(search, 8)
    assert said[0][1] == "finding the range: batch 1"
    assert all(0.0 <= fraction <= 1.0 for fraction, _ in said)


def test_the_update_is_kept_beside_each_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never longer than the call it is a part of: a call of a few microseconds is a mean over several."""
    machine = Machine(lambda b: 1e-3 * b, update_seconds=2e-3)
    search = start(monkeypatch, machine)
    for size in (1, 8):
        assert search.measure(size)
    points = search.points()
    assert [point.update_samples for point in points] == [(1e-3,) * len(points[0].samples), (2e-3,) * 2]
    assert [len(point.samples) for point in points] == [3, 2]


def test_sizes_that_are_wanted_are_measured_within_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    search = start(monkeypatch, Machine(lambda b: 1e-4 * (20 + b)))
    reach(search, 100)
    refine(search, cast(Any, Watch()), wanted=(13, 39, 200))
    assert {13, 39} <= set(search.samples) and max(search.samples) == 100
