"""Views for policies, and tables of latency, as tests need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from microbatch.curves.profile import Point, Profile
from microbatch.serving.decisions.latency import Latency
from microbatch.serving.decisions.limits import Limits, Wishes, settle
from microbatch.serving.decisions.policies import POLICIES
from microbatch.serving.decisions.view import Pace, QueueView, Waiting

MEMORY_BOUND = Latency({size: 3e-3 + 0.1e-3 * size for size in (1, 2, 4, 8, 16, 32, 64)})
"""A batch costs 3 ms, and 0.1 ms for each item."""
CLIFF = Latency({1: 1.0, 16: 1.2, 32: 1.4, 33: 3.0, 48: 3.1, 64: 3.2})
COMPUTE_BOUND = Latency({1: 1.0, 2: 2.0, 4: 3.99, 8: 7.95})


UNKNOWN_PACE = Pace()


def profile_of(table: dict[int, float], **changes: Any) -> Profile:
    points = tuple(Point(batch_size=size, samples=(t * 1.2, t, t * 0.9)) for size, t in table.items())
    return replace(Profile(points=points), **changes)


def view_of(
    waiting: Sequence[Waiting],
    *,
    now: float = 0.0,
    latency: Latency | None = MEMORY_BOUND,
    max_batch_size: int = 32,
    max_queue_delay: float | None = None,
    token_budget: int | None = None,
    pace: Pace = UNKNOWN_PACE,
    free_since: float = 0.0,
    uniform: bool | None = None,
) -> QueueView:
    plain = all(each == Waiting(each.arrived) for each in waiting)
    return QueueView(
        now=now,
        waiting=waiting,
        num_waiting=len(waiting),
        oldest=min(each.arrived for each in waiting),
        free_workers=1,
        free_since=free_since,
        max_batch_size=max_batch_size,
        max_queue_delay=max_queue_delay,
        token_budget=token_budget,
        seconds=latency.seconds if latency else None,
        best_size=latency.best_size if latency else None,
        pace=pace,
        uniform=plain if uniform is None else uniform,
    )


def wishes_of(policy: str, max_batch_size: int = 32, max_queue: int = 10**6) -> Wishes:
    """Settings with which each policy of the table runs."""
    needs = POLICIES[policy].needs
    return Wishes(
        policy=policy,
        max_batch_size=max_batch_size,
        max_queue=max_queue,
        max_queue_delay=0.01 if "max_queue_delay" in needs else None,
        token_budget=4096 if "token_budget" in needs else None,
    )


def limits_of(policy: str, max_batch_size: int = 32, max_queue: int = 10**6) -> Limits:
    return settle(wishes_of(policy, max_batch_size, max_queue), Latency())
