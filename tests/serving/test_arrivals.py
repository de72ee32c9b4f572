"""How requests arrive: medians that follow, and how soon those who were answered come back."""

from __future__ import annotations

import math

import numpy as np
import pytest

from microbatch.serving.decisions.arrivals import Arrivals
from microbatch.serving.decisions.view import NEVER


def test_nothing_is_known_before_two_arrivals() -> None:
    arrivals = Arrivals()
    arrivals.arrived(1.0)
    assert arrivals.pace(1.0).gap == arrivals.pace(1.0).mean_gap == NEVER


def test_independent_arrivals_have_their_median() -> None:
    arrivals, seen = Arrivals(), []
    for time in np.cumsum(np.random.default_rng(0).exponential(0.01, 4000)).tolist():
        arrivals.arrived(time)
        seen.append(arrivals.pace(time).gap / arrivals.pace(time).mean_gap)
    assert np.median(seen[500:]) == pytest.approx(math.log(2), rel=0.15)


def test_bursts_have_a_short_median_and_a_long_mean() -> None:
    arrivals = Arrivals()
    for burst in range(40):
        for place in range(8):
            arrivals.arrived(burst * 0.1 + place * 1e-4)
    pace = arrivals.pace(4.0)
    assert pace.gap < 3e-4
    assert pace.mean_gap == pytest.approx(0.1 / 8, rel=0.5)


def test_another_pace_is_followed() -> None:
    arrivals, now = Arrivals(), 0.0
    for gap in [0.01] * 50 + [0.001] * 60:
        now += gap
        arrivals.arrived(now)
    assert arrivals.pace(now).gap == pytest.approx(0.001, rel=0.2)


def test_clients_that_come_back_are_owed_until_they_do() -> None:
    arrivals = Arrivals()
    for turn in range(3):
        start = turn * 0.01
        arrivals.answered(4, start)
        for place in range(4):
            arrivals.arrived(start + 4e-4 + place * 1e-5)
    assert arrivals.pace(0.0205).owed == 0
    assert arrivals.pace(0.0205).return_time == pytest.approx(4.3e-4)
    arrivals.answered(4, 0.03)
    arrivals.arrived(0.0304)
    assert arrivals.pace(0.0304).owed == 3
    assert arrivals.pace(0.04).owed == 0, "after twice the usual time nobody is waited for"


def test_clients_that_left_are_forgotten_at_the_next_answer() -> None:
    arrivals = Arrivals()
    arrivals.answered(1, 0.0)
    arrivals.arrived(1e-3)
    arrivals.answered(8, 1.0)
    arrivals.answered(2, 2.0)
    assert arrivals.pace(2.0).owed == 2
