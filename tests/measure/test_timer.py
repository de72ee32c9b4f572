"""Seconds, against a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from microbatch.measure.timer import SHORTEST_SECONDS, Stopwatch, time_call, warm_up

pytestmark = pytest.mark.alone


class Clock:
    """Nanoseconds that pass only when a call says so; reading the clock itself takes `reading`."""

    def __init__(self, reading: int = 0) -> None:
        self.now, self.reading, self.calls = 0, reading, 0

    def __call__(self) -> int:
        self.now += self.reading
        return self.now

    def work(self, *nanoseconds: int) -> Callable[[], None]:
        durations = iter(nanoseconds)
        last = nanoseconds[-1]

        def call() -> None:
            self.calls += 1
            self.now += next(durations, last)

        return call


def test_a_long_call_is_timed_once() -> None:
    clock = Clock()
    assert time_call(clock.work(3_000_000), clock=clock) == pytest.approx(3e-3)
    assert clock.calls == 1


def test_a_short_call_is_repeated_inside_one_reading() -> None:
    clock = Clock(reading=400)
    seconds = time_call(clock.work(1000), clock=clock)
    assert clock.calls >= SHORTEST_SECONDS / 1.4e-6
    assert seconds == pytest.approx(1e-6, rel=0.02), "the clock's own 0.4 µs must not count as the call's"


def test_a_call_of_no_time_ends() -> None:
    clock = Clock()
    assert time_call(clock.work(0), clock=clock) == 0
    assert clock.calls <= 2 + SHORTEST_SECONDS / 1e-7


def test_the_first_call_is_timed_apart() -> None:
    clock = Clock()
    call = clock.work(9_000_000, 2_000_000)
    assert warm_up(call, clock=clock) == pytest.approx(9e-3)
    assert time_call(call, clock=clock) == pytest.approx(2e-3)


def test_the_real_clock_sees_real_work() -> None:
    assert 1e-6 < time_call(lambda: sum(range(10_000))) < 1.0


def test_what_the_call_raises_passes_through() -> None:
    def fails() -> None:
        raise KeyError("mask")

    with pytest.raises(KeyError, match="mask"):
        time_call(fails)


def test_a_stopwatch_takes_a_part_of_a_call() -> None:
    clock = Clock()
    watch = Stopwatch(clock=clock)
    before, part, after = (clock.work(ns) for ns in (5_000_000, 2_000_000, 1_000_000))

    def call() -> None:
        before()
        watch.start()
        assert watch.seconds is None, "the part is not over"
        part()
        watch.stop()
        after()

    assert watch.seconds is None
    for _ in range(2):
        assert time_call(call, clock=clock) == pytest.approx(8e-3)
        assert watch.seconds == pytest.approx(2e-3)
