"""Which sizes run while the data passes: driven by planted times, no clock."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from microbatch.serving.offline.growing import FIRST_ITEMS, Trial, best_size, next_size, rates_of

Seconds = Callable[[int], float]


def saturating(size: int) -> float:
    return 1.0 + size / 16


def with_a_cache(size: int) -> float:
    """Fast up to 32 items, then slower and slower for each."""
    return 0.1 + size / 16 * (1 if size <= 32 else 1 + 0.1 * (size / 32 - 1))


def flat(size: int) -> float:
    return size / 16


CURVES: dict[str, Seconds] = {"saturating": saturating, "cache": with_a_cache, "flat": flat}


def looked_for(seconds: Seconds, *, start: int = 8, limit: int | None = None, left: int = 10**6) -> list[Trial]:
    trials: list[Trial] = []
    while (size := next_size(trials, start=start, largest=None, left=left)) is not None:
        fits = limit is None or size <= limit
        trials.append(Trial(size, size, seconds(size) if fits else None, counts=bool(trials)))
        if not fits:
            start = size // 2
        left -= size
        assert len(trials) < 100
    return trials


@pytest.mark.parametrize("name", CURVES)
def test_the_size_is_as_good_as_the_best_of_all(name: str) -> None:
    seconds = CURVES[name]
    found = best_size(looked_for(seconds))
    best = min(seconds(size) / size for size in range(1, 4096))
    assert seconds(found) / found <= 1.04 * best


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("seed", range(5))
def test_noise_of_a_tenth_does_not_lead_astray(name: str, seed: int) -> None:
    rng, seconds = random.Random(seed), CURVES[name]
    found = best_size(looked_for(lambda size: seconds(size) * (1 + 0.1 * rng.random())))
    best = min(seconds(size) / size for size in range(1, 4096))
    assert seconds(found) / found <= 1.1 * best


def test_the_first_run_of_all_does_not_count() -> None:
    trials = looked_for(flat)
    assert not trials[0].counts
    assert [trial.size for trial in trials[:5]] == [8, 8, 8, 16, 16]  # after it each size runs twice
    assert 8 in rates_of(trials)


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 20, 100])
def test_what_ran_out_of_memory_is_not_tried_again(limit: int) -> None:
    trials = looked_for(lambda size: 1.0, limit=limit)
    failed = [trial.size for trial in trials if trial.seconds is None]
    assert len(failed) == len(set(failed))
    assert len(failed) <= (1 if limit >= 8 else 4)
    assert best_size(trials) <= limit


def test_a_size_that_ran_and_then_ran_out_of_memory_is_given_up() -> None:
    trials: list[Trial] = []
    while (size := next_size(trials, start=8 if len(trials) < 6 else 2, left=10**6)) is not None:
        fits = len(trials) < 6 or size < 4
        trials.append(Trial(size, size, 1.0 if fits else None, counts=bool(trials)))
        assert len(trials) < 50
    failed = [trial.size for trial in trials if trial.seconds is None]
    assert failed and failed == sorted(set(failed), reverse=True)
    assert best_size(trials) < failed[-1]


def test_nothing_above_what_memory_allows_is_tried() -> None:
    trials: list[Trial] = []
    while (size := next_size(trials, start=8, largest=50, left=10**6)) is not None:
        trials.append(Trial(size, size, 1.0, counts=bool(trials)))
    assert max(trial.size for trial in trials) == 50 == best_size(trials)


def test_a_size_that_little_is_left_for_is_not_tried() -> None:
    trials = looked_for(lambda size: 1.0, left=100)
    assert max(trial.size for trial in trials) <= 16


def test_smaller_sizes_are_tried_where_they_are_faster() -> None:
    trials = looked_for(lambda size: size**1.5)
    assert best_size(trials) == 1


def test_no_piece_is_tried_that_is_smaller_than_its_longest_item() -> None:
    trials: list[Trial] = []
    while (size := next_size(trials, start=800, smallest=100)) is not None:
        trials.append(Trial(size, size, size**1.5, counts=bool(trials)))
    assert min(trial.size for trial in trials) == 100


def test_few_items_start_small() -> None:
    from microbatch.serving.offline.sizing import Sizing

    sizes = {}
    for items in (1, 16, 100, 10_000, None):
        sizing = Sizing(wanted=None, unit="tokens", source="measured")
        sizing.begin(1, items)
        sizes[items] = sizing.size()
    assert sizes == {1: 1, 16: 1, 100: 6, 10_000: FIRST_ITEMS, None: FIRST_ITEMS}
