"""When requests are due, in seconds from the start of what is measured; what comes before it is warm-up."""

from __future__ import annotations

from math import ceil
from pathlib import Path

import numpy as np

from microbatch.errors import InvalidSettings
from microbatch.serving.decisions.traffic import TRAFFIC, Times, from_trace

MOST = 20_000_000
"""Arrivals of one run; their times take 160 MB."""


def arrivals(
    traffic: str,
    rate: float | None,
    *,
    duration: float | None = None,
    requests: int | None = None,
    warmup: float = 0.0,
    seed: int = 0,
) -> Times:
    """Ascending times; the negative ones are warm-up and come before the start at 0.

    Args:
        traffic: a name of `TRAFFIC`, or a file of times (see `from_trace`).
        rate: requests a second on average; a file keeps its own rate where None.
        duration: seconds that are measured.
        requests: so many are measured; where both are given, whatever ends first.
        warmup: seconds before; of a file its own first seconds.
        seed: of random traffic.

    Raises:
        InvalidSettings: an unknown traffic, a file that cannot be read, or nothing that would be measured.
    """
    made = traffic in TRAFFIC
    times = _made(traffic, rate, duration, requests, warmup, seed) if made else _recorded(traffic, rate)
    times = times - warmup
    if duration is not None:
        times = times[times < duration]
    warm = int(np.searchsorted(times, 0.0))
    if requests is not None:
        times = times[: warm + requests]
    if warm == len(times):
        raise InvalidSettings(
            f"Of {traffic} traffic nothing is due after {warmup:g} s of warm-up.", "Measure longer or warm up less."
        )
    return times


def _made(
    name: str, rate: float | None, duration: float | None, requests: int | None, warmup: float, seed: int
) -> Times:
    """Traffic from a formula, so much of it that it reaches one of the ends."""
    if rate is None:
        raise InvalidSettings(f"{name} traffic has no rate of its own.", "Give --rate, as in --rate 250.")
    spans = [span for span in (duration, None if requests is None else requests / rate) if span is not None]
    count = ceil(1.05 * rate * (warmup + min(spans))) + 64
    if count > MOST:
        raise InvalidSettings(f"{count:,} requests are too many for one run.", "Shorten it or lower the rate.")
    while not _lasts(times := TRAFFIC[name](rate, count, seed), duration, requests, warmup):
        count *= 2
    return times


def _lasts(times: Times, duration: float | None, requests: int | None, warmup: float) -> bool:
    """Whether these times reach one of the ends."""
    long_enough = duration is not None and times[-1] >= warmup + duration
    many_enough = requests is not None and len(times) - np.searchsorted(times, warmup) >= requests
    return bool(long_enough or many_enough)


def _recorded(path: str, rate: float | None) -> Times:
    """Times from a file, stretched to the rate where one is given."""
    if not Path(path).exists():
        known = ", ".join(TRAFFIC)
        raise InvalidSettings(f"{path!r} is neither a kind of traffic nor a file.", f"Use {known} or a file of times.")
    times = from_trace(path)
    if rate is None:
        return times
    if times[-1] == 0:
        raise InvalidSettings(f"All times in {path} are equal: they have no rate.", "Leave --rate out.")
    return np.asarray(times * ((len(times) - 1) / times[-1] / rate))
