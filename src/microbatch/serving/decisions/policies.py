"""When to launch a batch and with which items: each policy is a function of one frozen view. No torch, clock or thread.

To add one, write a function and its row in `POLICIES`; a plain function of a `QueueView` can take a name's place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from microbatch.serving.decisions.choose import fitting, prefix, work_of
from microbatch.serving.decisions.view import NEVER, Decision, Policy, QueueView, Waiting, launch, wait

FULL = "the batch is full"
FREE = "a worker is free"
BELOW_CLIFF = "stops below a cliff"
WINDOW = "the window is over"
LATEST = "the latest start that meets a deadline"
UNKNOWN = "latency is not known yet"
ALL_BACK = "all that were answered are back"
GATHER_RETURNING = "those just answered are coming back"
GATHER_READING = "requests are being read"
GATHER_BURST = "a burst is coming in"

SILENCE = 3.0
"""A burst is over after so many of its gaps without an arrival."""
RETURN_PATIENCE = 2.0
"""Clients that have not come back after so many usual return times are not waited for."""
CLEARLY = 1.5
"""What is known of arrivals wanders by a tenth or two: a wait must pay by so much."""
POISSON_MEDIAN = math.log(2)
"""Median over mean of independent arrivals' gaps; in bursts it is far less."""
MARGIN = 0.1
"""Share of a batch's expected time that is kept free before a deadline."""


def launch_when_free(view: QueueView) -> Decision:
    """All that fits, as soon as a worker is free; never waits."""
    return _launch(view, _fill(view), FREE)


def fixed_window(view: QueueView) -> Decision:
    """Waits until the batch is full or the oldest item has waited `max_queue_delay`, as most servers do."""
    places = _fill(view)
    return _unless_due(view, places, view.oldest + (view.max_queue_delay or 0.0), "the window is open", WINDOW)


def marginal_gain(view: QueueView) -> Decision:
    """Waits only while that delays those waiting by less than it saves; without a reason to wait it launches.

    A launch now leaves whoever comes next to wait for the whole batch, t(n). A delay of d for J more items pays when
    ``J * t(n) > (n + f) * d``, f being those who come later and are pushed back too. For independent arrivals at
    rate r, J = r * d and f = r * t(n): never. It pays in two cases:

    - J clients were just answered and ask again within d, as a rule: then they are the ones who come later, f = J.
    - A burst: the next item is a gap g away, far less than the mean: J = 1, and ``n * g < t(n) * (1 - g / g')``, where
      g' is the median that independent arrivals of that mean would have.

    A lone client is owed nothing when it asks and is no burst: it is launched at once.
    """
    places = _fill(view)
    if view.seconds is None:
        return _launch(view, places, UNKNOWN)
    seconds = view.seconds(_work(view, places))
    pace, n = view.pace, len(places)
    if view.reading:
        return _unless_due(view, places, _began(view) + seconds, GATHER_READING, FREE)
    patience = pace.answered_at + RETURN_PATIENCE * pace.return_time
    if pace.owed and pace.owed * seconds > CLEARLY * (n + pace.owed) * pace.return_time:
        return _unless_due(view, places, min(patience, _began(view) + seconds), GATHER_RETURNING, FREE)
    if pace.owed == 0 and CLEARLY * pace.return_time < seconds and view.now <= patience:
        return _launch(view, places, ALL_BACK)
    independent = POISSON_MEDIAN * pace.mean_gap
    if pace.gap < independent < NEVER and CLEARLY * n * pace.gap < seconds * (1 - pace.gap / independent):
        until = min(pace.last_arrival + SILENCE * pace.gap, _began(view) + seconds)
        return _unless_due(view, places, until, GATHER_BURST, FREE)
    return _launch(view, places, FREE)


def deadline_aware(view: QueueView) -> Decision:
    """As `marginal_gain`, but no item is launched that would be late, and no batch so large that it makes one late.

    What cannot be met any more even alone is left to expire.
    """
    if view.seconds is None or view.uniform:
        return marginal_gain(view)
    seconds, waiting = view.seconds, view.waiting
    in_time = [p for p, item in enumerate(waiting) if view.now + seconds(max(item.cost, item.length)) <= item.deadline]
    if not in_time:
        coming = [item.deadline for item in waiting if item.deadline > view.now]
        return wait(min(coming, default=NEVER), "no deadline can be met")
    kept = view._replace(waiting=[waiting[p] for p in in_time], num_waiting=len(in_time))
    decision = marginal_gain(kept)
    places = _in_time(kept, decision.launch)
    shrunk = decision._replace(launch=[in_time[place] for place in places])
    return launch(shrunk.launch, LATEST) if len(places) < len(decision.launch) else shrunk


def token_budget(view: QueueView) -> Decision:
    """As soon as a worker is free, items of like length up to `token_budget` of padded work."""
    return _launch(view, _fill(view), FREE)


def _fill(view: QueueView) -> Sequence[int]:
    """As many items as a batch takes, or fewer where that is faster for all of them."""
    if view.uniform and view.token_budget is None:
        places: Sequence[int] = prefix(view, view.max_batch_size)
    else:
        places = fitting(view, view.max_batch_size)
    if view.best_size is None or not (view.uniform or all(_is_plain(view.waiting[place]) for place in places)):
        return places
    return places[: view.best_size(len(places))]


def _is_plain(item: Waiting) -> bool:
    """Whether its batch costs what its number of items says."""
    return item.cost == 1 and item.length == 1


def _launch(view: QueueView, places: Sequence[int], reason: str) -> Decision:
    if len(places) >= view.max_batch_size:
        return launch(places, FULL)
    if view.uniform and len(places) < view.num_waiting:
        return launch(places, BELOW_CLIFF)
    return launch(places, reason)


def _began(view: QueueView) -> float:
    """Since when a worker and an item have been waiting for more."""
    return max(view.free_since, view.oldest)


def _unless_due(view: QueueView, places: Sequence[int], until: float, why: str, over: str) -> Decision:
    """Waits until a time, but not with a full batch, nor beyond `max_queue_delay` or the latest start of a deadline."""
    if len(places) >= view.max_batch_size or len(places) < view.num_waiting:
        return _launch(view, places, over)
    latest = _latest_start(view, places)
    if view.max_queue_delay is not None:
        until = min(until, view.oldest + view.max_queue_delay)
    if view.now >= min(until, latest):
        return launch(places, LATEST if latest < until else over)
    return wait(min(until, latest), why)


def _latest_start(view: QueueView, places: Sequence[int]) -> float:
    if view.uniform:
        return NEVER
    seconds = view.seconds(_work(view, places)) if view.seconds else 0.0
    return min(view.waiting[place].deadline for place in places) - (1 + MARGIN) * seconds


def _in_time(view: QueueView, places: Sequence[int]) -> Sequence[int]:
    """The places, or fewer around the head of the queue, so that all end before the first of their deadlines.

    Chosen anew for each number, since a part of a batch can be padded more than the whole. With t(n) = t0 + a·n not
    more than n · left / t(n) items end in time, so that few numbers are tried.
    """
    assert view.seconds is not None
    while len(places) > 1:
        left = min(view.waiting[place].deadline for place in places) - view.now
        needed = view.seconds(_work(view, places))
        if needed <= left:
            break
        most = int(len(places) * left / needed)
        places = fitting(view, max(1, min(most, len(places) - 1)))
    return places


def _work(view: QueueView, places: Sequence[int]) -> int:
    return len(places) if view.uniform else work_of([view.waiting[place] for place in places])


class Row(NamedTuple):
    """A policy, the settings that it cannot do without, and those that it would not follow."""

    decide: Policy
    needs: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()


POLICIES: dict[str, Row] = {
    "marginal_gain": Row(marginal_gain),
    "launch_when_free": Row(launch_when_free, ignores=("max_queue_delay",)),
    "fixed_window": Row(fixed_window, needs=("max_queue_delay",)),
    "deadline_aware": Row(deadline_aware),
    "token_budget": Row(token_budget, needs=("token_budget",), ignores=("max_queue_delay",)),
}
DEFAULT = "marginal_gain"
