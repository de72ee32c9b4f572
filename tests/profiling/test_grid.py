"""Which sizes are measured: cliffs' neighbours first, within the budget of seconds and items."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from microbatch.profiling import grid


def test_doublings_end_at_the_top() -> None:
    assert grid.doublings(1) == [1]
    assert grid.doublings(64) == [1, 2, 4, 8, 16, 32, 64]
    assert grid.doublings(100) == [1, 2, 4, 8, 16, 32, 64, 100]


def test_saturation_needs_two_doublings_without_gain() -> None:
    sizes = grid.doublings(256)
    rising = [1e-3 + 1e-6 * b for b in sizes]
    assert not grid.is_saturated(sizes, rising)
    flat = [1e-3 * max(b, 64) / 64 for b in sizes]
    assert grid.is_saturated(sizes, flat)
    assert not grid.is_saturated(sizes[:-1], flat[:-1])
    assert not grid.is_saturated([1, 2, 4], [1.0, 2.0, 4.0])


@given(st.integers(1, 3000), st.floats(0.01, 100.0))
def test_chosen_sizes_stay_within_range_and_allowance(top: int, allowance: float) -> None:
    groups = grid.levels_of_detail(top)
    chosen = grid.choose_sizes(groups, lambda b: 1e-4 * (10 + b), allowance=allowance, rounds=3, largest_items=40 * top)
    assert chosen == sorted(set(chosen))
    assert set(groups[0]) <= set(chosen)
    assert chosen[0] >= 1 and chosen[-1] == top
    extra = set(chosen) - set(groups[0])
    assert sum(6e-4 * (10 + b) for b in extra) <= allowance


def test_more_budget_never_takes_sizes_away() -> None:
    groups = grid.levels_of_detail(512)
    small, large = (
        grid.choose_sizes(groups, lambda b: 1e-3 * b, allowance=a, rounds=3, largest_items=10**9) for a in (10.0, 40.0)
    )
    assert set(small) < set(large)


def test_the_grid_looks_at_both_sides_of_powers_of_two() -> None:
    chosen = grid.choose_sizes(grid.levels_of_detail(256), lambda _: 0.0, allowance=1.0, rounds=3, largest_items=10**9)
    assert {31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256} <= set(chosen)
    assert {176, 177} <= set(grid.choose_sizes(
        grid.levels_of_detail(256, edges=[176]), lambda _: 0.0, allowance=1.0, rounds=3, largest_items=10**9
    ))  # fmt: skip


def test_estimates_meet_the_measured_and_grow_in_proportion_beyond() -> None:
    seconds_of = grid.estimate([1, 10, 100], [1.0, 2.0, 4.0])
    assert seconds_of(10) == 2.0
    assert 2.0 < seconds_of(30) < 4.0
    assert abs(seconds_of(200) - 8.0) < 1e-9


def test_within_takes_the_cheapest_that_fit() -> None:
    assert grid.within([(3.0, 30), (1.0, 10), (2.0, 20)], 3.5) == [10, 20]
    assert grid.within([(3.0, 30)], 2.0) == []


def test_bisection_halves_at_tile_edges_and_ends_at_neighbours() -> None:
    assert grid.next_bisection([64, 128], [(64, 128)]) == [96]
    assert grid.next_bisection([128, 129], [(128, 129)]) == []
    assert grid.next_bisection([3, 6], [(3, 6)]) == [4]
    assert grid.next_bisection([64, 96, 128], [(64, 128)]) == []


@given(st.integers(1, 500), st.integers(1, 500))
def test_bisection_finds_any_edge(low: int, width: int) -> None:
    high, edge = low + width, low + 1 + width // 3
    sizes, steps = [low, high], 0
    while True:
        below, above = max(s for s in sizes if s < edge), min(s for s in sizes if s >= edge)
        new = grid.next_bisection(sizes, [(below, above)])
        if not new:
            break
        sizes, steps = sorted([*sizes, *new]), steps + 1
    assert above - below <= 1
    assert steps <= 2 * width.bit_length() + 2


def test_wide_gaps() -> None:
    assert grid.wide_gaps([1, 2, 4, 5, 6]) == [(2, 4)]


def test_sizes_that_are_wanted_come_right_after_the_powers_of_two() -> None:
    groups = grid.levels_of_detail(100, wanted=(13, 25, 50, 100, 200))
    assert groups[1] == [13, 25, 50, 100]
    costs_little = grid.choose_sizes(groups, lambda _: 1.0, allowance=18.0, rounds=1, largest_items=10**9)
    assert costs_little == [1, 2, 4, 8, 13, 16, 32, 64, 100]
