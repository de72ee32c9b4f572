"""Several tenants in one queue: each gets its share of the work and of the room, whatever the others send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from microbatch.errors import InvalidSettings
from microbatch.serving.decisions.fair import FEW
from microbatch.serving.decisions.latency import Latency
from microbatch.serving.decisions.limits import Wishes, settle
from microbatch.serving.decisions.policies import POLICIES
from microbatch.serving.decisions.queue import Entry, Reply, RequestQueue, order_of
from microbatch.serving.decisions.simulate import simulate
from microbatch.serving.decisions.tenants import TenantCounters
from microbatch.serving.decisions.traffic import poisson
from microbatch.serving.decisions.view import NEVER, Waiting
from tests.serving.test_policies import in_order
from tests.serving.views import MEMORY_BOUND, limits_of

NAMES = sorted(POLICIES)
T32 = MEMORY_BOUND.seconds(32)

arrivals = st.builds(
    Waiting,
    arrived=st.floats(0, 1),
    cost=st.integers(1, 50),
    length=st.just(1),
    deadline=st.just(NEVER),
    priority=st.integers(-1, 1),
    key=st.none(),
    tenant=st.sampled_from("abc"),
)
steps = st.lists(st.one_of(arrivals, st.integers(1, 6)), min_size=5, max_size=120)
"""What happens to a queue: something comes, or so many are served together."""


class Server:
    """A queue and what it served: each item with the tenants that waited just before."""

    def __init__(self, most: int = 10**6) -> None:
        self.queue = RequestQueue(most)
        self.waiting: list[Entry] = []
        self.served: list[tuple[Entry, set[str]]] = []
        self.number = 0

    def come(self, facts: Waiting) -> Entry:
        self.number += 1
        entry = Entry(None, facts, self.number, Reply(1))
        self.queue.add(entry)
        self.waiting.append(entry)
        return entry

    def serve(self, count: int) -> None:
        for entry in self.queue.take(range(min(count, len(self.queue)))):
            self.served.append((entry, {each.facts.tenant for each in self.waiting}))
            self.waiting.remove(entry)

    def play(self, happenings: Sequence[Any]) -> None:
        for each in happenings:
            if isinstance(each, Waiting):
                self.come(each)
            else:
                self.serve(each)
        self.serve(len(self.queue))


def largest_differences(server: Server) -> dict[tuple[str, str], int]:
    """For each two tenants, the most by which what they were served differs over a time in which both waited."""
    found: dict[tuple[str, str], int] = {}
    for one, other in combinations("abc", 2):
        lead = low = high = 0
        for entry, waited in server.served:
            if not {one, other} <= waited:
                lead = low = high = 0
                continue
            lead += entry.facts.cost * ((entry.facts.tenant == one) - (entry.facts.tenant == other))
            low, high = min(low, lead), max(high, lead)
            found[one, other] = max(found.get((one, other), 0), high - low)
    return found


@example(happenings=[Waiting(0.0, cost=1, tenant="a")] * 8 + [Waiting(0.0, cost=50, tenant="b")] * 3)
@example(happenings=[Waiting(0.0, tenant="a"), *[Waiting(0.0, tenant="b")] * 30, 25, *[Waiting(0.0, tenant="a")] * 20])
@settings(max_examples=80)
@given(happenings=steps)
def test_while_two_tenants_wait_they_differ_by_a_largest_item_of_each(happenings: list[Any]) -> None:
    """Theorem 1 of start-time fair queueing, over every interval: max - min of the lead over each time together."""
    server = Server()
    server.play(happenings)
    largest = dict.fromkeys("abc", 0)
    for entry, _ in server.served:
        largest[entry.facts.tenant] = max(largest[entry.facts.tenant], entry.facts.cost)
    for (one, other), difference in largest_differences(server).items():
        assert difference <= largest[one] + largest[other]


@given(happenings=steps)
def test_each_tenant_is_served_in_its_own_order_and_everything_once(happenings: list[Any]) -> None:
    server = Server()
    server.play(happenings)
    came = sum(isinstance(each, Waiting) for each in happenings)
    assert len({id(entry) for entry, _ in server.served}) == len(server.served) == came
    assert len(server.queue) == 0
    assert server.queue.uniform


@given(items=st.lists(arrivals, max_size=30), count=st.integers(1, 30))
def test_of_each_tenant_the_first_go_first(items: list[Waiting], count: int) -> None:
    first = in_order(items)[:count]
    for tenant in "abc":
        mine = [item for item in first if item.tenant == tenant]
        orders = [order_of(item, 0)[0] for item in mine]
        assert orders == sorted(orders)
        all_mine = sorted(order_of(item, 0)[0] for item in items if item.tenant == tenant)
        assert orders == all_mine[: len(mine)]


@given(items=st.lists(arrivals, max_size=30))
def test_one_tenant_is_served_as_nobody_in_particular_is(items: list[Waiting]) -> None:
    named = [item._replace(tenant="a") for item in items]
    nobody = [item._replace(tenant="") for item in items]
    assert [item._replace(tenant="") for item in in_order(named)] == in_order(nobody)


def test_who_stays_away_saves_nothing_up_and_forgets_no_debt() -> None:
    server = Server()
    for _ in range(100):
        server.come(Waiting(0.0, tenant="busy"))
    server.come(Waiting(0.0, cost=40, tenant="large"))
    server.serve(60)
    server.come(Waiting(0.0, tenant="late"))
    server.come(Waiting(0.0, cost=40, tenant="large"))  # it has just had 40, and everybody waits for 40 turns less
    order = [entry.tenant for entry in server.queue.first(41)]
    assert order.index("late") <= 1
    assert "large" in order[:3]  # 60 items of the others are past its 40
    server.serve(3)
    server.come(Waiting(0.0, cost=40, tenant="large"))
    assert "large" not in [entry.tenant for entry in server.queue.first(30)]


def test_who_is_taken_out_is_not_charged() -> None:
    server = Server()
    gone = [server.come(Waiting(0.0, cost=50, tenant="a")) for _ in range(5)]
    server.come(Waiting(0.0, tenant="b"))
    server.come(Waiting(0.0, tenant="b"))
    server.come(Waiting(0.0, tenant="a"))
    for entry in gone:
        assert server.queue.remove(entry)
        assert not server.queue.remove(entry)
    assert [item.tenant for item in server.queue.first(9)] == ["b", "a", "b"]


def test_a_queue_at_rest_owes_nothing() -> None:
    server = Server()
    server.play([Waiting(0.0, cost=50, tenant="a"), Waiting(0.0, tenant="b")])
    server.queue.rest()
    server.play([Waiting(0.0, tenant="a"), *[Waiting(0.0, tenant="b")] * 3])
    assert [entry.facts.tenant for entry, _ in server.served[-4:]] == ["a", "b", "b", "b"]


def test_names_without_end_are_forgotten() -> None:
    server = Server()
    server.come(Waiting(0.0, priority=-9, tenant="patient"))
    server.come(Waiting(0.0, priority=-9, tenant="patient"))
    for number in range(5000):
        server.come(Waiting(0.0, tenant=f"name {number}"))
        server.queue.take(range(1))
    assert len(server.queue._lines._lines) <= 4 * FEW


# Room.


@settings(max_examples=80)
@given(
    happenings=st.lists(
        st.tuples(st.sampled_from("aabc"), st.integers(1, 5), st.booleans(), st.booleans()), min_size=1, max_size=60
    ),
    most=st.integers(1, 12),
)
def test_a_tenant_within_its_share_always_finds_room(happenings: list[tuple[str, int, bool, bool]], most: int) -> None:
    server = Server(most)
    for tenant, count, served, patient in happenings:
        queue, before = server.queue, server.queue.waiting_by_tenant()
        tenants = len(before) + (tenant not in before)
        within = before.get(tenant, 0) + count <= most // tenants
        gone = queue.make_room(tenant, count)
        for entry in gone:
            server.waiting.remove(entry)
            assert not entry.waits
            assert not entry.patient
            assert entry.facts.tenant != tenant
        after = queue.waiting_by_tenant()
        assert all(after[name] >= most // tenants for name in {entry.facts.tenant for entry in gone})
        if within and not any(entry.patient for entry in server.waiting):
            assert queue.room_for(tenant) >= count
        assert len(gone) in (0, count - (most - sum(before.values())))
        if queue.room_for(tenant) >= count:
            for _ in range(count):
                server.come(Waiting(0.0, tenant=tenant)).patient = patient
        assert len(queue) == sum(queue.waiting_by_tenant().values()) <= most
        if served:
            server.serve(2)


def test_one_tenant_may_fill_the_queue_to_its_bound() -> None:
    server = Server(4)
    for _ in range(4):
        assert server.queue.room_for("a")
        server.come(Waiting(0.0, tenant="a"))
    assert not server.queue.room_for("a")
    assert server.queue.make_room("a", 1) == []
    assert [entry.facts.tenant for entry in server.queue.make_room("b", 2)] == ["a", "a"]


def test_what_would_be_served_last_makes_room() -> None:
    server = Server(4)
    entries = [server.come(Waiting(0.0, priority=priority, tenant="a")) for priority in (0, 1, -1, 0)]
    assert server.queue.make_room("b", 1) == [entries[2]]
    assert server.queue.make_room("b", 2) == [entries[3]]


def test_a_bound_of_its_own() -> None:
    queue = RequestQueue(10, 3)
    for number in range(3):
        queue.add(Entry(None, Waiting(0.0, tenant="a"), number, Reply(1)))
    assert (queue.room_for("a"), queue.room_for("b"), queue.room) == (0, 3, 7)
    for wishes in (Wishes(max_queue=4, max_queue_per_tenant=5), Wishes(max_queue_per_tenant=0)):
        with pytest.raises(InvalidSettings, match="tenant"):
            settle(wishes, Latency())


# Over simulated time.


def flood_and_quiet(cost: int = 1) -> list[Waiting]:
    """One tenant sends five times what the server can do, another a twentieth."""
    rate = 32 / T32
    flood = [Waiting(time, cost, cost, tenant="flood") for time in poisson(5 * rate, 10_000, 1).tolist()]
    quiet = [Waiting(time, tenant="quiet") for time in poisson(rate / 20, 150, 2).tolist() if time < flood[-1].arrived]
    return flood + quiet


@pytest.mark.parametrize("name", NAMES)
def test_a_tenant_that_floods_does_not_delay_another(name: str) -> None:
    """It waits for the batch that runs and for its own, and is never refused; the queue of the flood is always full."""
    limits = replace(limits_of(name), max_queue=1024)
    found = simulate(flood_and_quiet(), MEMORY_BOUND, limits)
    quiet, flood = found.tenants["quiet"], found.tenants["flood"]
    assert quiet.refused == 0
    assert quiet.latency["max"] <= 2 * T32 + (limits.max_queue_delay or 0.0) + 1e-9
    assert flood.latency["p50"] > 10 * T32
    assert flood.refused > 5_000
    assert found.answered + found.refused == len(flood_and_quiet())
    assert quiet.answered == quiet.accepted
    assert flood.served == flood.answered


def test_without_tenants_the_flood_delays_all() -> None:
    mixed = [request._replace(tenant="") for request in flood_and_quiet()]
    found = simulate(mixed, MEMORY_BOUND, replace(limits_of("marginal_gain"), max_queue=1024))
    assert found.p50 > 10 * T32
    assert found.tenants == {}


def test_shares_are_of_work_not_of_items() -> None:
    """Two that always wait, one with items of 30 tokens and one of 10: equal tokens, three times the items."""
    requests = [Waiting(0.0, cost, cost, tenant=str(cost)) for cost in (10, 30) for _ in range(3000)]
    slow = Latency({tokens: 2e-3 + 2e-6 * tokens for tokens in (16, 256, 1024, 4096)})
    limits = replace(limits_of("token_budget"), token_budget=600)
    server = Server()
    for request in requests:
        server.come(request)
    taken: Counter[str] = Counter()
    while len(server.queue) > 3000:
        for entry in server.queue.take(range(8)):
            taken[entry.facts.tenant] += entry.facts.cost
    assert taken["10"] == pytest.approx(taken["30"], abs=40)
    found = simulate(requests, slow, limits)
    assert found.tenants["10"].served == 30_000
    assert found.tenants["30"].served == 90_000


@pytest.mark.parametrize("name", NAMES)
def test_lengths_and_keys_cost_fairness_no_more_than_a_batch(name: str) -> None:
    """A launch may pass over items that do not go with its head; its tenant has the smallest tag and is next."""
    short = [Waiting(0.0, 16, 16, key="a", tenant="short") for _ in range(600)]
    long = [Waiting(0.0, 400, 400, key="b", tenant="long") for _ in range(24)]
    limits = replace(limits_of(name, 8), token_budget=3200)
    queue, view_cost = RequestQueue(10**6), 8 * 400
    for number, facts in enumerate(short + long):
        queue.add(Entry(None, facts, number, Reply(1)))
    served: list[Counter[str]] = [Counter()]
    slow = Latency({tokens: 2e-3 + 2e-6 * tokens for tokens in (16, 256, 1024, 4096)})
    while len(queue.waiting_by_tenant()) == 2:
        places = _launched(queue, limits, slow)
        now = Counter(served[-1])
        for entry in queue.take(places):
            now[entry.facts.tenant] += entry.facts.cost
        served.append(now)
    leads = [counts["long"] - counts["short"] for counts in served]
    assert max(leads) - min(leads) <= view_cost + 400 + 16
    assert all(after != before for before, after in pairwise(leads))


def _launched(queue: RequestQueue, limits: Any, latency: Latency) -> Sequence[int]:
    from tests.serving.views import view_of

    waiting = queue.first(4 * limits.max_batch_size)
    view = view_of(
        waiting, now=100.0, latency=latency, max_batch_size=limits.max_batch_size,
        max_queue_delay=limits.max_queue_delay, token_budget=limits.token_budget, free_since=50.0, uniform=False,
    )  # fmt: skip
    places: Sequence[int] = limits.decide(view).launch
    assert places
    return places


def test_counters_remember_the_last_tenants_only() -> None:
    counters = TenantCounters(most=3, kept=2)
    for name in ("a", "b", "c", "a", "d"):
        counters.came("accepted", name, 2)
    counters.came("accepted", "", 5)
    entry = Entry(None, Waiting(0.0, cost=7, tenant="a"), 0, Reply(1))
    for seconds in (1.0, 2.0, 3.0):
        counters.answer(entry, None, seconds)
    counters.answer(entry, ValueError(), 9.0)
    counters.launched([entry])
    found = counters.metrics({"d": 4})
    assert sorted(found) == ["a", "c", "d"]
    assert (found["a"].accepted, found["a"].answered, found["a"].failed, found["a"].served) == (4, 3, 1, 7)
    assert found["a"].latency == {"p50": 2.0, "p99": 3.0, "max": 3.0}
    assert (found["d"].waiting, found["d"].latency) == (4, {})
