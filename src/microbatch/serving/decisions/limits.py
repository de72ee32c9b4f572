"""The sizes and delays of a server: what the user set, what follows from the measured latency, and what contradicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from microbatch.errors import InvalidSettings
from microbatch.serving.decisions.latency import HELPS, Latency
from microbatch.serving.decisions.policies import DEFAULT, POLICIES, Row
from microbatch.serving.decisions.view import Decision, Policy, QueueView
from microbatch.units import format_number, format_seconds

UNMEASURED = 32
"""Largest batch while nothing is known about the model."""
TURNS = 2
"""Batches that a request may have to wait for: the one that runs when it comes, and its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a user sets; None follows from the measured latency.

    Attributes:
        policy: a name of `POLICIES`, or a function of a `QueueView`.
        max_batch_size: most items in a batch.
        max_queue_delay: seconds that an item waits beside a free worker, at most.
        latency_target: seconds from request to answer that a batch may not endanger.
        max_queue: most waiting items.
        max_queue_per_tenant: most waiting items of one tenant; None for no bound of its own.
        token_budget: most padded work in a batch.
    """

    policy: str | Policy = DEFAULT
    max_batch_size: int | None = None
    max_queue_delay: float | None = None
    latency_target: float | None = None
    max_queue: int = 1024
    max_queue_per_tenant: int | None = None
    token_budget: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a server keeps to.

    Attributes:
        decide: the policy.
        policy: its name.
        max_batch_size: most items in a batch.
        max_queue_delay: see `Wishes`; None leaves it to the policy.
        max_queue: most waiting items.
        max_queue_per_tenant: most waiting items of one tenant; None for no bound of its own.
        token_budget: most padded work in a batch; None without a bound.
        largest_item: work above which an item is refused; a single one may exceed a budget that the user did not set.
        batch_target: seconds that a batch may take; None without a target, or where the user set the size.
        reason: why batches are no larger.
        notes: what the user should know, one sentence each.
    """

    decide: Callable[[QueueView], Decision]
    policy: str
    max_batch_size: int
    max_queue_delay: float | None
    max_queue: int
    max_queue_per_tenant: int | None = None
    token_budget: int | None
    largest_item: int | None = None
    batch_target: float | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()


def settle(wishes: Wishes, latency: Latency, *, by_cost: bool = False) -> Limits:
    """The limits that follow.

    Args:
        wishes: of the user.
        latency: what is known; may be nothing.
        by_cost: items cost what a callback says, not 1 each: the table then counts tokens.

    Raises:
        InvalidSettings: every contradiction, in one error.
    """
    row = _row(wishes.policy)
    if problems := [*_out_of_range(wishes), *_against_policy(wishes, row), *_against_latency(wishes, latency, by_cost)]:
        raise InvalidSettings(" ".join(problems), "Change or leave out one of each pair.")
    notes = _notes(latency, wishes)
    return Limits(
        decide=row.decide,
        policy=wishes.policy if isinstance(wishes.policy, str) else getattr(row.decide, "__name__", "policy"),
        max_batch_size=wishes.max_batch_size or _size(wishes, latency, by_cost),
        max_queue_delay=wishes.max_queue_delay,
        max_queue=wishes.max_queue,
        max_queue_per_tenant=wishes.max_queue_per_tenant,
        token_budget=wishes.token_budget or (_budget(wishes, latency) if by_cost else None),
        largest_item=wishes.token_budget,
        batch_target=None if wishes.max_batch_size else _batch_target(wishes),
        reason=_reason(wishes, latency, by_cost),
        notes=notes,
    )


def _row(policy: str | Policy) -> Row:
    if callable(policy):
        return Row(policy)
    if policy not in POLICIES:
        raise InvalidSettings(f"There is no policy {policy!r}.", f"Use one of {', '.join(POLICIES)}, or a function.")
    return POLICIES[policy]


def _out_of_range(wishes: Wishes) -> list[str]:
    found = []
    for name in ("max_batch_size", "max_queue", "max_queue_per_tenant", "token_budget"):
        value = getattr(wishes, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            found.append(f"{name}={value!r} is not a whole number of 1 or more.")
    for name in ("max_queue_delay", "latency_target"):
        value = getattr(wishes, name)
        if value is not None and not (isinstance(value, int | float) and 0 <= value < float("inf")):
            found.append(f"{name}={value!r} is not a number of seconds.")
    if not found and wishes.max_queue_per_tenant and wishes.max_queue_per_tenant > wishes.max_queue:
        found.append(f"Of {wishes.max_queue} items in all, {wishes.max_queue_per_tenant} of one tenant cannot wait.")
    return found


def _against_policy(wishes: Wishes, row: Row) -> list[str]:
    name = wishes.policy if isinstance(wishes.policy, str) else "the policy"
    missing = [f"{name} needs {each}=." for each in row.needs if getattr(wishes, each) is None]
    unread = [f"{name} never waits, so {each}= says nothing." for each in row.ignores if getattr(wishes, each)]
    return missing + unread


def _against_latency(wishes: Wishes, latency: Latency, by_cost: bool) -> list[str]:
    target = wishes.latency_target
    if target is None:
        return []
    delay = wishes.max_queue_delay or 0.0
    if delay >= target:
        return [f"A queue delay of {format_seconds(delay)} leaves nothing of a target of {format_seconds(target)}."]
    if not latency.known:
        return []
    smallest, alone = latency.curve()[0]
    if alone + delay > target:
        what = "one request" if smallest == 1 else f"a batch of {smallest}"
        waits = f" after a queue delay of {format_seconds(delay)}" if delay else ""
        return [f"{what} takes {format_seconds(alone)} alone{waits}, above the target of {format_seconds(target)}."]
    asked = wishes.token_budget if by_cost else wishes.max_batch_size
    if asked and latency.seconds(asked) + delay > target:
        return [
            f"A batch of {asked} takes {format_seconds(latency.seconds(asked))}, above the target of "
            f"{format_seconds(target)}; {latency.largest_within(target - delay)} would keep it."
        ]
    return []


def _size(wishes: Wishes, latency: Latency, by_cost: bool) -> int:
    if by_cost or not latency.known:
        return UNMEASURED
    return _largest(wishes, latency) if latency.gain() >= HELPS else latency.curve()[0][0]


def _reason(wishes: Wishes, latency: Latency, by_cost: bool) -> str:
    """Why batches are no larger, as part of a sentence."""
    if wishes.max_batch_size:
        return "as you set it"
    if not latency.known:
        return "until the latency has been learnt from requests"
    if by_cost:
        return "of like length" if wishes.token_budget is None else "within the token budget"
    if latency.gain() < HELPS:
        return "a larger one would not be faster"
    if wishes.latency_target is not None and _largest(wishes, latency) < latency.recommended():
        return f"the largest that keeps {format_seconds(wishes.latency_target)} with another batch ahead of it"
    return "the smallest within 2 % of the best throughput"


def _largest(wishes: Wishes, latency: Latency) -> int:
    """The smallest size near the best throughput, or the largest that keeps the target with one batch ahead of it."""
    best, target = latency.recommended(), _batch_target(wishes)
    return best if target is None else min(best, latency.largest_within(target) or latency.curve()[0][0])


def _batch_target(wishes: Wishes) -> float | None:
    """Seconds that a batch may take, so that the target is kept with another one ahead of it."""
    if wishes.latency_target is None:
        return None
    return (wishes.latency_target - (wishes.max_queue_delay or 0.0)) / TURNS


def _budget(wishes: Wishes, latency: Latency) -> int | None:
    """Work whose batch keeps the target."""
    target = _batch_target(wishes)
    return None if target is None or not latency.known else latency.cost_within(target)


def _notes(latency: Latency, wishes: Wishes) -> tuple[str, ...]:
    if len(latency.curve()) < 2 or latency.gain() >= HELPS:
        return ()
    told = "max_batch_size is as you set it." if wishes.max_batch_size else "Requests run one by one."
    return (
        f"Batching cannot help this model here: the best batch has {format_number(latency.gain())} x the throughput of "
        f"single requests. {told}",
    )
