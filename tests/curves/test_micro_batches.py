"""A global batch in micro-batches: times by hand, one update a step, memory of one piece, and what is chosen."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch.curves.micro_batch_choice import choose_micro_batches, peak_bytes, step_times
from microbatch.curves.micro_batches import (
    MicroBatch,
    MicroBatches,
    StepTimes,
    between,
    even_sizes,
    micro_batches_document,
    step_seconds,
)
from microbatch.curves.prediction import OptimizerShare, Prediction
from microbatch.curves.profile import MemoryCurve, Point, Profile
from microbatch.errors import InvalidBatchSizes, InvalidProfile
from microbatch.sizes import BatchSizes

UPDATE, ADDING = 5.0, 0.5


def planted(
    pieces: dict[int, float], update: float = UPDATE, adding: float = ADDING, noise: float = 1.0, **more: Any
) -> Profile:
    """Each size in three samples, the middle one as planted: a piece and an update."""
    points = tuple(
        Point(
            batch_size=size,
            samples=tuple((seconds + update) * share for share in (1 / noise, 1.0, noise)),
            update_samples=tuple(update * share for share in (1 / noise, 1.0, noise)),
        )
        for size, seconds in pieces.items()
    )
    return Profile(points=points, mode="training", adding_samples=(adding,) * 3, **more)


def row(found: MicroBatches, size: int) -> MicroBatch:
    return next(row for row in found.rows if row.micro_batch_size == size)


PIECES = {1: 2.0, 2: 2.5, 4: 3.0, 8: 4.0, 16: 6.0, 32: 12.0, 64: 26.0, 128: 60.0}
STEPS = {
    1: 128 * 2.0 + 127 * 0.5 + 5,
    2: 64 * 2.5 + 63 * 0.5 + 5,
    4: 32 * 3.0 + 31 * 0.5 + 5,
    8: 16 * 4.0 + 15 * 0.5 + 5,
    16: 8 * 6.0 + 7 * 0.5 + 5,
    32: 4 * 12.0 + 3 * 0.5 + 5,
    64: 2 * 26.0 + 0.5 + 5,
    128: 60.0 + 5,
}
"""128 items in pieces of each size, by hand."""


def test_a_step_is_its_pieces_and_one_update() -> None:
    found = choose_micro_batches(planted(PIECES), 128)
    assert [row.micro_batch_size for row in found.rows] == list(PIECES)
    assert {row.micro_batch_size: row.step_seconds for row in found.rows} == pytest.approx(STEPS)
    assert [row.num_micro_batches for row in found.rows] == [128, 64, 32, 16, 8, 4, 2, 1]
    assert all(row.tail == 0 and row.measured for row in found.rows)
    assert row(found, 16).samples_per_second == pytest.approx(128 / 56.5)


def test_the_smallest_within_two_percent_is_chosen_and_the_reason_told() -> None:
    """32 takes 54.5, the least; 16 takes 56.5, 3.7 % more."""
    found = choose_micro_batches(planted(PIECES), 128)
    assert found.chosen == row(found, 32)
    assert (found.limited_by, found.reason) == ("saturated", "Larger pieces gain less than 2 %.")
    closer = planted(PIECES | {16: 5.8})  # 8 · 5.8 + 7 · 0.5 + 5 = 54.9
    assert choose_micro_batches(closer, 128).chosen == row(choose_micro_batches(closer, 128), 16)


def test_an_update_in_every_piece_would_choose_another_size() -> None:
    """What goes wrong where 128 updates are counted: 8 · (6 + 5) = 88 against 2 · (26 + 5) = 62."""
    whole = planted(PIECES)
    blind = replace(whole, points=tuple(replace(point, update_samples=()) for point in whole.points))
    found = choose_micro_batches(blind, 128)
    assert found.chosen is not None and found.chosen.micro_batch_size == 64
    assert row(found, 16).step_seconds == pytest.approx(8 * 11.0 + 7 * 0.5)
    assert len(found.warnings) == 1 and "every piece counts one" in found.warnings[0]
    assert choose_micro_batches(whole, 128).warnings == ()


def test_a_tail_takes_the_time_of_its_own_size() -> None:
    """100 = 3 · 32 + 4; 100 itself lies between 64 and 128; 20 of 24 lie between 16 and 32."""
    found = choose_micro_batches(planted(PIECES), 100)
    assert (row(found, 32).num_micro_batches, row(found, 32).tail) == (4, 4)
    assert row(found, 32).step_seconds == pytest.approx(3 * 12.0 + 3.0 + 3 * 0.5 + 5)
    whole = row(found, 100)
    assert (whole.num_micro_batches, whole.tail, whole.measured) == (1, 0, False)
    assert whole.step_seconds == pytest.approx(26.0 + (60.0 - 26.0) * 36 / 64 + 5)
    assert step_seconds(68, 24, {16: 6.0, 32: 12.0}) == pytest.approx(2 * 9.0 + 7.5)


def test_drift_of_the_machine_does_not_enter_the_update() -> None:
    """Samples a half and twice as fast, update and all: the update keeps its share of the middle one."""
    found = choose_micro_batches(planted(PIECES, noise=2.0), 128)
    assert {row.micro_batch_size: row.step_seconds for row in found.rows} == pytest.approx(STEPS)


def test_a_predicted_piece_holds_a_part_of_an_update() -> None:
    """Of 4 pieces each: 1.25 of 5 seconds; adding gradients stands in the piece."""
    share = OptimizerShare(name="adam", accumulation=4, seconds=1.25)
    profile = replace(
        planted({8: 4.0}, update=1.25), adding_samples=(), prediction=Prediction(device="h100", optimizer=share)
    )
    assert choose_micro_batches(profile, 32).rows[0].step_seconds == pytest.approx(4 * 4.0 + 5.0)


def test_where_the_update_takes_most_of_the_step_it_binds() -> None:
    found = choose_micro_batches(planted({1: 0.2, 64: 3.0}), 64)
    assert row(found, 1).bound == "optimizer"  # 63 · 0.5 + 5 of 49.3
    assert row(found, 64).bound == "optimizer"  # 5 of 8
    assert row(choose_micro_batches(planted({64: 6.0}), 64), 64).bound == ""


MEMORY = MemoryCurve(
    fixed_bytes=300, bytes_per_item=10.0, limit_bytes=1000, limit_source="x", margin=0.1,
    parts={"weights": 100, "gradients": 100, "optimizer": 200, "buffers": 0, "activations": 640},
)  # fmt: skip
"""A step of one piece has its peak before its gradients exist: 300 is without them."""


def test_memory_is_that_of_one_piece_beside_the_gradients_of_others() -> None:
    found = choose_micro_batches(planted(PIECES, memory=MEMORY), 64)
    assert row(found, 16).peak_bytes == 300 + 100 + 160
    assert row(found, 64).peak_bytes == 300 + 640  # one piece: no others
    assert [row.fits for row in found.rows] == [True] * 6 + [False]
    assert row(found, 32).peak_bytes == 720 and found.chosen == row(found, 32)
    assert (found.limited_by, found.reason) == ("saturated", "Larger pieces gain less than 2 %.")


def test_gradients_that_the_fixed_part_holds_are_not_counted_twice() -> None:
    found = choose_micro_batches(planted(PIECES, memory=replace(MEMORY, fixed_bytes=400)), 64)
    assert row(found, 16).peak_bytes == 400 + 160


def test_peaks_that_are_known_for_a_size_stand_for_it() -> None:
    profile = planted({16: 6.0}, memory=MEMORY)
    sizes = BatchSizes.of(global_batch_size=64, micro_batch_size=16)
    alone = BatchSizes.of(global_batch_size=16, micro_batch_size=16)
    known = replace(profile.points[0], predicted_peak_bytes=450, beside_gradients_bytes=555)
    profile = replace(profile, points=(known,))
    assert (peak_bytes(profile, alone), peak_bytes(profile, sizes)) == (450, 555)
    profile = replace(profile, points=(replace(known, peak_bytes=600),), memory=None)
    assert (peak_bytes(profile, alone), peak_bytes(profile, sizes)) == (600, 600)
    assert peak_bytes(planted({16: 6.0}), sizes) is None


FALLING = {1: 2.0, 2: 2.2, 4: 2.6, 8: 3.4, 16: 5.0, 32: 8.0}
"""The larger, the faster."""


@pytest.mark.parametrize(
    ("profile", "batch", "size", "limited_by", "says"),
    [
        (planted(FALLING), 32, 32, "batch", "The whole batch in one piece is the fastest."),
        (planted(FALLING), 256, 32, "range", "32 is the largest size that is known"),
        (planted(FALLING, stopped_by="budget"), 256, 32, "budget", "the time to measure ended at 32"),
        (planted(FALLING, stopped_by="memory"), 256, 32, "memory", "32 is the largest that fits in memory"),
        (planted(FALLING, memory=replace(MEMORY, limit_bytes=600)), 64, 8, "memory", "8 is the largest that fits"),
        (planted(FALLING), 3, 3, "batch", "in one piece"),
        (planted({8: 3.4, 16: 5.0}), 4, 4, "batch", "in one piece"),
    ],
)
def test_what_limits_the_pieces(profile: Profile, batch: int, size: int, limited_by: str, says: str) -> None:
    found = choose_micro_batches(profile, batch)
    assert found.chosen is not None
    assert (found.chosen.micro_batch_size, found.limited_by) == (size, limited_by)
    assert says in found.reason


def test_a_limit_of_ones_own_decides() -> None:
    profile = planted(FALLING, memory=MEMORY)
    found = choose_micro_batches(profile, 64, memory_limit=500)  # 450 after the margin: 400 + 10 · 4
    assert found.chosen == row(found, 4)


def test_nothing_fits() -> None:
    found = choose_micro_batches(planted(FALLING, memory=replace(MEMORY, limit_bytes=300)), 64)
    assert found.chosen is None and found.limited_by == "none"
    assert found.reason == "No micro-batch of the profile fits: one of 1 needs 410 B, and 270 B are allowed."
    assert micro_batches_document(found)["micro_batch"]["micro_batch_size"] is None


def test_without_memory_nothing_is_said_about_it() -> None:
    found = choose_micro_batches(planted(FALLING), 64)
    assert all(row.fits is None and row.peak_bytes is None for row in found.rows)
    assert found.chosen == row(found, 32)


def test_times_of_somebody_else_are_taken_with_a_word() -> None:
    points = tuple(Point(batch_size=size, samples=(seconds,)) for size, seconds in FALLING.items())
    found = choose_micro_batches(Profile(points=points, source="csv"), 64)
    assert row(found, 16).step_seconds == 4 * 5.0
    assert "the update is not known" in found.warnings[0]


@pytest.mark.parametrize("batch", [0, -8, True])
def test_a_global_batch_of_nothing_is_refused(batch: int) -> None:
    with pytest.raises(InvalidBatchSizes, match=f"global_batch_size must be a whole number of 1 or more, not {batch}"):
        choose_micro_batches(planted(FALLING), batch)


@pytest.mark.parametrize("mode", ["inference", "prefill", "decode"])
def test_a_profile_that_trained_nothing_is_refused(mode: str) -> None:
    with pytest.raises(
        InvalidProfile, match=f"one of {mode}, which has no optimizer step for a global batch of 64"
    ) as e:
        choose_micro_batches(replace(planted(FALLING), mode=mode), 64)
    assert "--mode training" in e.value.remedy


TIMES = st.dictionaries(st.integers(1, 300), st.floats(1e-6, 100.0), min_size=1, max_size=12)


@given(pieces=TIMES, batch=st.integers(1, 2000), update=st.floats(0, 50), adding=st.floats(0, 5))
def test_a_step_is_never_shorter_than_its_pieces(
    pieces: dict[int, float], batch: int, update: float, adding: float
) -> None:
    times = StepTimes(pieces=pieces, updates=dict.fromkeys(pieces, update), adding=adding)
    for size in pieces:
        cut = BatchSizes.of(global_batch_size=batch, micro_batch_size=size)
        own = sum(between(pieces, piece) for piece in cut.pieces)
        assert times.step(cut) == pytest.approx(own + update + (len(cut.pieces) - 1) * adding, rel=1e-9)
        assert times.step(cut) >= own * (1 - 1e-9)


@given(pieces=TIMES, update=st.floats(0.01, 50), share=st.floats(0, 1))
def test_the_global_batch_as_micro_batch_is_one_piece_at_its_measured_time(
    pieces: dict[int, float], update: float, share: float
) -> None:
    profile = planted(dict(sorted(pieces.items())), update=update)
    batch = profile.batch_sizes[round(share * (len(pieces) - 1))]
    found = row(choose_micro_batches(profile, batch), batch)
    assert (found.num_micro_batches, found.tail) == (1, 0)
    assert found.step_seconds == pytest.approx(pieces[batch] + update, rel=1e-9)


@given(pieces=TIMES, batch=st.integers(1, 2000), limit=st.integers(500, 5000))
def test_what_is_chosen_fits_and_nothing_that_fits_is_two_percent_faster(
    pieces: dict[int, float], batch: int, limit: int
) -> None:
    profile = planted(dict(sorted(pieces.items())), memory=replace(MEMORY, limit_bytes=limit))
    found = choose_micro_batches(profile, batch)
    fitting = [row for row in found.rows if row.fits]
    assert sum(row.chosen for row in found.rows) == bool(fitting)
    if found.chosen is not None:
        fastest = min(row.step_seconds for row in fitting)
        assert found.chosen in fitting
        assert found.chosen.step_seconds <= fastest / 0.98
        assert all(
            row.step_seconds > fastest / 0.98 for row in fitting if row.micro_batch_size < found.chosen.micro_batch_size
        )


@given(st.integers(1, 10**6))
def test_even_sizes_cut_into_powers_of_two(batch: int) -> None:
    sizes = even_sizes(batch)
    assert (sizes[0], sizes[-1]) == (1, batch)
    assert list(sizes) == sorted(set(sizes))
    assert all(-(-batch // size) <= 2 * -(-batch // larger) for size, larger in pairwise(sizes))


def test_parts_of_a_step_follow_the_times_that_are_asked() -> None:
    """Drift taken out, a size may take other seconds than its samples' median: the update keeps its share."""
    times = step_times(planted({8: 15.0}), {8: 40.0})
    assert (times.pieces, times.updates, times.adding) == ({8: 30.0}, {8: 10.0}, 0.5)
