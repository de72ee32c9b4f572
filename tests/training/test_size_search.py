"""The search for a micro-batch size, driven by numbers: what it tries, how often, and what it takes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch.batch.size_limit import QUIET_STEPS, SizeLimit, smaller
from microbatch.curves.micro_batches import step_seconds
from microbatch.training.memory.size_search import (
    ITEMS_IN_BATCHES,
    MOST_PASSES,
    Probe,
    best_size,
    first_predictions,
    is_telling,
    largest_fitting,
    next_prediction,
    next_size,
    sizes_of,
)

BATCH = st.integers(1, 5000)


def search(
    batch_size: int, seconds_of: dict[int, float] | None, limit: int, largest: int | None, *, first: float = 0.0
) -> list[Probe]:
    """Every pass of a search on a machine where sizes above `limit` run out of memory; the first one of each size
    takes `first` seconds more."""
    probes: list[Probe] = []
    while (size := next_size(batch_size, probes, largest)) is not None:
        seconds = 1 + 0.1 * size if seconds_of is None else seconds_of[size]
        seconds += first * all(probe.micro_batch_size != size for probe in probes)
        kept = seconds if size <= limit else None
        probes.append(Probe(size, kept, counts=is_telling(probes, size, kept)))
        assert len(probes) < 100
    return probes


@pytest.mark.parametrize(
    ("batch_size", "largest", "sizes"),
    [
        (128, None, (1, 2, 4, 8, 16, 32, 64, 128)),
        (128, 20, (1, 2, 4, 8, 16, 19)),
        (100, 30, (1, 2, 4, 7, 13, 25)),
        (7, None, (1, 2, 4, 7)),
        (1, None, (1,)),
        (8, 0, (1,)),
    ],
)
def test_sizes_even_out_the_pieces(batch_size: int, largest: int | None, sizes: tuple[int, ...]) -> None:
    assert sizes_of(batch_size, largest) == sizes


def test_from_128_to_a_limit_of_20_without_knowing_it() -> None:
    probes = search(128, None, limit=20, largest=None)
    assert [probe.micro_batch_size for probe in probes] == [8, 8, 16, 32]
    assert sum(probe.seconds is None for probe in probes) == 1
    assert best_size(128, probes) == 16


def test_the_first_of_short_passes_at_a_size_is_not_believed() -> None:
    """A new size's kernels take longer to prepare than a short pass to run."""
    seconds = {size: 1e-3 + 1e-5 * size for size in range(1, 129)}
    assert best_size(128, search(128, seconds, 128, 128, first=20e-3)) == 128
    probes = search(128, seconds, 20, 20, first=20e-3)
    assert [probe.micro_batch_size for probe in probes[:6]] == [8, 8, 16, 16, 19, 19] and len(probes) <= MOST_PASSES
    assert best_size(128, probes) == 19


def test_from_128_to_a_limit_of_20_that_the_memory_model_knows() -> None:
    probes = search(128, None, limit=20, largest=20)
    assert len(probes) <= MOST_PASSES and all(probe.seconds for probe in probes)
    assert best_size(128, probes) == 19


@given(batch_size=BATCH, limit=st.integers(1, 5000), known=st.booleans())
def test_a_search_ends_with_at_most_one_failure_and_a_size_that_ran(batch_size: int, limit: int, known: bool) -> None:
    probes = search(batch_size, None, limit, min(limit, batch_size) if known else None)
    failures = sum(probe.seconds is None for probe in probes)
    assert failures <= (0 if known else 1)
    assert len(probes) <= MOST_PASSES or limit >= batch_size
    assert sum(probe.micro_batch_size for probe in probes) <= (ITEMS_IN_BATCHES + 1) * batch_size
    if any(probe.seconds for probe in probes[1:]):
        assert best_size(batch_size, probes) <= limit


@given(
    batch_size=st.integers(2, 1000),
    fixed=st.floats(0, 10),
    slope=st.floats(0.01, 1),
    bend=st.floats(0.1, 2000),
    steep=st.floats(0, 1),
)
def test_the_choice_is_the_best_of_all_sizes_on_smooth_curves(
    batch_size: int, fixed: float, slope: float, bend: float, steep: float
) -> None:
    """Time per piece: fixed + linear, steeper beyond a size (what no longer fits the cache)."""
    seconds = {b: fixed + slope * b + steep * max(0.0, b - bend) for b in range(1, batch_size + 1)}
    chosen = best_size(batch_size, search(batch_size, seconds, batch_size, batch_size))
    best = min(step_seconds(batch_size, size, seconds) for size in sizes_of(batch_size, None))
    assert step_seconds(batch_size, chosen, seconds) <= 1.15 * best


def test_the_fastest_is_taken_not_the_largest() -> None:
    seconds = {size: 1e-3 * size * (1 if size <= 16 else 1.4) + 1e-3 for size in range(1, 129)}
    assert best_size(128, search(128, seconds, 128, 128)) == 16


def test_small_pieces_are_tried_where_they_are_faster() -> None:
    seconds = {size: 1e-3 * size * (1 if size <= 2 else 1.3) for size in range(1, 129)}
    assert best_size(128, search(128, seconds, 128, 128)) == 1  # as fast as 2, in less memory


def test_a_tail_costs_its_share() -> None:
    assert step_seconds(100, 30, {10: 1.0, 30: 2.0}) == pytest.approx(3 * 2.0 + 1.0)
    assert step_seconds(100, 30, {20: 1.0, 30: 2.0}) == pytest.approx(3 * 2.0 + 1.0)
    assert step_seconds(64, 32, {16: 1.0, 32: 3.0}) == 6.0


@given(
    batch_size=BATCH,
    flat=st.integers(0, 10**6),
    fixed=st.integers(0, 10**6),
    slope=st.integers(1, 10**4),
    room=st.floats(0, 10**8),
)
def test_the_largest_that_fits_is_found_in_a_few_predictions(
    batch_size: int, flat: int, fixed: int, slope: int, room: float
) -> None:
    """Peaks are the larger of a flat part (the update) and a line (forward and backward)."""

    def peak(size: int) -> int:
        return max(flat, fixed + slope * size)

    known = {size: peak(size) for size in first_predictions(batch_size)}
    while (size := next_prediction(known, batch_size, room)) is not None and len(known) < 7:
        known[size] = peak(size)
    truth = max((size for size in range(1, batch_size + 1) if peak(size) <= room), default=1)
    found = largest_fitting(known, room)
    assert found <= truth
    if peak(min(known)) <= room:
        assert found >= 0.9 * truth - 1


@given(batch_size=BATCH, size=BATCH)
def test_smaller_pieces_end_at_one_item(batch_size: int, size: int) -> None:
    sizes = [size]
    while (following := smaller(batch_size, sizes[-1])) is not None:
        assert following < min(sizes[-1], batch_size)
        sizes.append(following)
    assert sizes[-1] == 1 or batch_size == 1
    assert len(sizes) <= math.log2(batch_size) + 3


def test_a_limit_grows_back_to_what_is_wanted() -> None:
    limit = SizeLimit().after_failure(4)
    for _ in range(QUIET_STEPS):
        assert limit.first_size(16) == 4
        limit = limit.after_success(16)
    assert limit.first_size(16) == 8
    failed = limit.after_failure(4)
    assert failed.patience == 2 * QUIET_STEPS
    for _ in range(QUIET_STEPS):
        limit = limit.after_success(16)
    assert limit.first_size(16) == 16
    assert limit.after_success(16).largest is None
