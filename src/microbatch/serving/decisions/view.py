"""What a policy sees and what it answers. Plain values; time comes in as a number. Loads nothing.

Named tuples, not data classes: a simulation makes millions of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

NEVER = math.inf


class Waiting(NamedTuple):
    """One waiting item.

    Attributes:
        arrived: when it came, in seconds on the clock of the view.
        cost: what it adds to a batch's work: 1 for a row, or its tokens.
        length: what every item of its batch is padded to, at least.
        deadline: when its answer is worth nothing any more.
        priority: larger goes first.
        key: only items of one key share a batch.
        tenant: whose it is; tenants that wait share alike. Empty where nobody says.
    """

    arrived: float
    cost: int = 1
    length: int = 1
    deadline: float = NEVER
    priority: int = 0
    key: object = None
    tenant: str = ""


class Pace(NamedTuple):
    """How requests have been arriving; see `microbatch.serving.decisions.arrivals`.

    Attributes:
        gap: median time between two arrivals; infinite when unknown.
        mean_gap: mean time between two arrivals; infinite when unknown.
        last_arrival: when the last item came.
        answered_at: when items were last answered.
        owed: items answered then whose clients have not asked again since.
        return_time: how long it takes, as a rule, until as many items have come as were answered.
    """

    gap: float = NEVER
    mean_gap: float = NEVER
    last_arrival: float = -NEVER
    answered_at: float = -NEVER
    owed: int = 0
    return_time: float = NEVER


class QueueView(NamedTuple):
    """The state in which a policy decides. A worker is free and at least one item waits.

    Attributes:
        now: seconds.
        waiting: the first items in order of service; as many as any policy may want, not always all.
        num_waiting: all that wait.
        oldest: when the item that has waited longest came.
        free_workers: workers that do nothing.
        free_since: since when this worker does nothing.
        max_batch_size: most items in a batch.
        max_queue_delay: longest that an item waits beside a free worker; None where the user set none.
        token_budget: most padded work in a batch; None without a bound.
        seconds: expected seconds of a batch of some cost; None when nothing is known.
        best_size: for n waiting items, how many to launch so that all are done soonest; see `Latency.best_size`.
        pace: how requests arrive.
        uniform: every item costs 1, has the same key and no deadline.
        reading: further requests are being read at this moment.
    """

    now: float
    waiting: Sequence[Waiting]
    num_waiting: int
    oldest: float
    free_workers: int
    free_since: float
    max_batch_size: int
    max_queue_delay: float | None
    token_budget: int | None
    seconds: Callable[[int], float] | None
    best_size: Callable[[int], int] | None
    pace: Pace
    uniform: bool
    reading: bool = False


class Decision(NamedTuple):
    """Launch items, or look again at a time; an arrival or a worker that becomes free asks again anyway.

    Attributes:
        launch: places in `QueueView.waiting`, empty to wait.
        until: when to look again, if nothing is launched.
        reason: in a few words.
    """

    launch: Sequence[int]
    until: float
    reason: str


Policy = Callable[[QueueView], Decision]


def launch(places: Sequence[int], reason: str) -> Decision:
    """Run these."""
    return Decision(places, NEVER, reason)


def wait(until: float, reason: str) -> Decision:
    """Look again then."""
    return Decision((), until, reason)
