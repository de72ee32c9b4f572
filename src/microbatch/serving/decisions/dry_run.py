"""What a server will do before any traffic: its maximum rate, and latencies at given rates, by simulation. No torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from microbatch.curves.codec import load_profile
from microbatch.curves.profile import Profile
from microbatch.errors import InvalidSettings
from microbatch.notebook import notebook_form
from microbatch.serving.decisions.latency import Latency, latency_of
from microbatch.serving.decisions.limits import Limits, Wishes, settle
from microbatch.serving.decisions.simulate import Simulated, simulate
from microbatch.serving.decisions.traffic import TRAFFIC, Times, from_trace

SHARES = (0.25, 0.5, 0.75, 0.9)
"""Of the maximum rate: what is simulated when no rates are given."""
REQUESTS = 20_000
"""Simulated at each rate: 200 of them lie above the p99."""
FULL_BATCHES = 200
"""Batches of the simulation that finds the maximum rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtRate:
    """Latency at one rate of requests per second; seconds, None above the maximum rate, where it only grows."""

    rate: float
    p50: float | None
    p99: float | None
    mean_batch: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """What another limit would do, at the highest of the rates that it bears.

    Attributes:
        max_batch_size: the limit.
        max_rate: requests per second.
        rate: at which the latencies hold.
        p50, p99: seconds.
    """

    max_batch_size: int
    max_rate: float
    rate: float | None
    p50: float | None
    p99: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What to expect.

    Attributes:
        max_rate: requests per second that can be answered.
        at: latencies by rate.
        policy: its name.
        max_batch_size: as set or found.
        curve: seconds by cost.
        what_if: other limits.
        notes: what the user should know.
    """

    max_rate: float
    at: tuple[AtRate, ...]
    policy: str
    max_batch_size: int
    curve: tuple[tuple[int, float], ...]
    what_if: tuple[WhatIf, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers."""
        return {"schema_version": 1} | dataclasses.asdict(self) | {"curve": [list(row) for row in self.curve]}

    def _repr_html_(self) -> str | None:
        return notebook_form(self)


def dry_run(
    source: str | Path | Profile | Latency,
    wishes: Wishes | None = None,
    *,
    rates: Sequence[float] = (),
    traffic: str = "poisson",
    workers: int = 1,
    requests: int = REQUESTS,
    seed: int = 0,
) -> DryRun:
    """Simulates the server's own policy on the measured latency.

    Args:
        source: a profile or its path, whose samples also tell how much the time of a batch varies; or a table.
        wishes: settings, as for the server.
        rates: requests per second; by default some shares of the maximum.
        traffic: a name of `TRAFFIC`, or a CSV file of seconds: its shape is kept at every rate, its own one by default.
        workers: batches that run at once.
        requests: simulated at each rate.
        seed: of arrivals and of the times of batches.

    Raises:
        InvalidSettings: contradictions, a rate that is not above zero, or an unknown traffic.
        InvalidProfile: a profile that cannot be used.
    """
    arrive, own_rate = arrivals_of(traffic)
    if wrong := [rate for rate in rates if not (rate > 0 and math.isfinite(rate))]:
        raise InvalidSettings(f"A rate of {wrong[0]} requests a second is not above zero.", "Give rates such as 250.")
    latency = source if isinstance(source, Latency) else latency_of(source)
    if not latency.known:
        raise InvalidSettings("Nothing is known about the latency.", "Give a profile.")
    limits = replace(settle(wishes or Wishes(), latency), max_queue=10**9)
    ratios = () if isinstance(source, Latency) else spread_of(source)
    ask = _Question(latency, ratios, arrive, workers, requests, seed)
    most = ask.max_rate(limits)
    wanted = tuple(rates) or ((own_rate,) if own_rate else tuple(share * most for share in SHARES))
    return DryRun(
        max_rate=most,
        at=tuple(ask.at(limits, rate, most) for rate in wanted),
        policy=limits.policy,
        max_batch_size=limits.max_batch_size,
        curve=latency.curve(),
        what_if=tuple(ask.what_if(replace(limits, max_batch_size=size), wanted) for size in _others(latency, limits)),
        notes=limits.notes,
    )


def arrivals_of(traffic: str) -> tuple[Callable[[float, int, int], Times], float | None]:
    """How requests come at a rate, and the rate of a trace.

    Raises:
        InvalidSettings: neither a name nor a file that can be used.
    """
    if traffic in TRAFFIC:
        return TRAFFIC[traffic], None
    if not Path(traffic).is_file():
        raise InvalidSettings(f"There is no traffic {traffic!r}.", f"Use one of {', '.join(TRAFFIC)}, or a CSV file.")
    trace = from_trace(traffic)
    if trace[-1] == 0:
        raise InvalidSettings(f"All times in {traffic} are the same, which is no rate.", "Give a longer trace.")
    gap = float(trace[-1]) / (len(trace) - 1)

    def repeated(rate: float, count: int, seed: int) -> Times:  # noqa: ARG001 (nothing is drawn)
        turns = np.arange(-(-count // len(trace)))[:, None] * (trace[-1] + gap)
        return np.asarray((trace + turns).reshape(-1)[:count] / (gap * rate))

    return repeated, 1 / gap


def spread_of(profile: str | Path | Profile) -> tuple[float, ...]:
    """How the time of a batch varies: every sample over the median of its size."""
    points = load_profile(profile).points
    return tuple(sample / median(point.samples) for point in points for sample in point.samples)


@dataclass(frozen=True, slots=True)
class _Question:
    """What is the same in every simulation of a dry run."""

    latency: Latency
    ratios: Sequence[float]
    arrive: Callable[[float, int, int], Times]
    workers: int
    requests: int
    seed: int

    def max_rate(self, limits: Limits) -> float:
        """Requests per second while the queue is never empty."""
        count = FULL_BATCHES * limits.max_batch_size * self.workers
        return self._simulated(np.zeros(count), limits).throughput

    def at(self, limits: Limits, rate: float, most: float) -> AtRate:
        if rate >= most:
            return AtRate(rate=rate, p50=None, p99=None, mean_batch=None)
        found = self._simulated(self.arrive(rate, self.requests, self.seed), limits)
        return AtRate(rate=rate, p50=found.p50, p99=found.p99, mean_batch=found.mean_batch)

    def what_if(self, limits: Limits, rates: Sequence[float]) -> WhatIf:
        most = self.max_rate(limits)
        borne = max((rate for rate in rates if rate < most), default=None)
        at = None if borne is None else self.at(limits, borne, most)
        return WhatIf(
            max_batch_size=limits.max_batch_size,
            max_rate=most,
            rate=borne,
            p50=at.p50 if at else None,
            p99=at.p99 if at else None,
        )

    def _simulated(self, arrivals: Any, limits: Limits) -> Simulated:
        return simulate(arrivals, self.latency, limits, workers=self.workers, ratios=self.ratios, seed=self.seed)


def _others(latency: Latency, limits: Limits) -> list[int]:
    """No batching, half, and twice the limit, as far as they were measured."""
    largest = latency.curve()[-1][0]
    wanted = {1, limits.max_batch_size // 2, limits.max_batch_size * 2} - {limits.max_batch_size, 0}
    return sorted(size for size in wanted if size <= largest)
