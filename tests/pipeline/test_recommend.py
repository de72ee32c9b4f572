"""The recommendation is never worse than the best named schedule, keeps its limit, and reaches proven optima."""

from __future__ import annotations

import random
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from microbatch.errors import DoesNotFit, InvalidCosts
from microbatch.pipeline.costs import Costs
from microbatch.pipeline.placement import loop
from microbatch.pipeline.recommend import alternatives, named_timelines, recommend
from microbatch.pipeline.schedule import Schedule
from microbatch.pipeline.search import greedy_schedules, lower_bound
from microbatch.pipeline.simulate import simulate


def costs_of(seed: int, stages: int) -> Costs:
    rng = random.Random(seed)
    forward, inputs, weights = ([rng.uniform(0.5, 3) for _ in range(stages)] for _ in range(3))
    return Costs(forward=forward, input_gradient=inputs, weight_gradient=weights, message=rng.choice((0.0, 0.2)))


@settings(max_examples=12)
@given(p=st.integers(2, 4), m=st.integers(1, 8), limit=st.sampled_from((None, 2, 4)), seed=st.integers(0, 10**6))
def test_never_worse_than_the_best_named_one(p: int, m: int, limit: float | None, seed: int) -> None:
    costs = costs_of(seed, p)
    best = recommend(costs, ranks=p, num_micro_batches=m, memory_limit=limit, rounds=20)
    named = named_timelines(costs, p, m, (1,), given=p, executable=True, memory_limit=limit)
    fitting = [t.makespan_with_optimizer for t in named if t.fits is not False]
    assert best.timeline.makespan_with_optimizer <= min(fitting, default=float("inf")) * (1 + 1e-9)
    assert best.timeline.fits is not False
    assert best.timeline.makespan >= lower_bound(best.schedule, costs) * (1 - 1e-9)
    assert best.reason
    assert [one.verdict for one in best.tried].count("chosen") == 1


def optimum(costs: Costs, p: int, m: int) -> float:  # noqa: C901 (a search in one place)
    """The shortest of all orders in which alike actions keep their order: every choice of every rank, with bounds."""
    frame = Schedule.of("zb_h1", ranks=p, num_micro_batches=m)
    F, I, W = (costs.times(kind, frame)[:, 0].tolist() for kind in (0, 1, 2))  # noqa: E741
    best = [simulate(frame, costs).makespan]
    seen: set[tuple[object, ...]] = set()

    def go(done: tuple[tuple[int, int, int], ...], free: tuple[float, ...], f: tuple[tuple[float, ...], ...],
           i: tuple[tuple[float, ...], ...]) -> None:  # fmt: skip
        left = [(m - d[0]) * F[r] + (m - d[1]) * I[r] + (m - d[2]) * W[r] for r, d in enumerate(done)]
        if max(t + x for t, x in zip(free, left)) >= best[0] - 1e-9:
            return
        if not any(left):
            best[0] = max(free)
            return
        key = (done, free, tuple(x[d[1] :] for x, d in zip(f, done)), i)
        if key in seen:
            return
        seen.add(key)
        options = []
        for r, (a, b, c) in enumerate(done):
            if a < m and (r == 0 or len(f[r - 1]) > a):
                options.append((max(free[r], f[r - 1][a] if r else 0.0), r, 0))
            if b < a and (r == p - 1 or len(i[r + 1]) > b):
                options.append((max(free[r], f[r][b], i[r + 1][b] if r < p - 1 else 0.0), r, 1))
            if c < b:
                options.append((max(free[r], i[r][c]), r, 2))
        # Giffler and Thompson: branch over the rank of the action that can end first, among those that start before.
        ends = [(start + (F, I, W)[k][r], r) for start, r, k in options]
        soonest, rank = min(ends)
        for start, r, k in options:
            if (r == rank and start < soonest - 1e-12) or (
                r == rank and (start + (F, I, W)[k][r], r) == (soonest, rank)
            ):
                end = start + (F, I, W)[k][r]
                d = list(done[r])
                d[k] += 1
                go(
                    (*done[:r], tuple(d), *done[r + 1 :]),  # type: ignore[arg-type]
                    (*free[:r], end, *free[r + 1 :]),
                    (*f[:r], (*f[r], end), *f[r + 1 :]) if k == 0 else f,
                    (*i[:r], (*i[r], end), *i[r + 1 :]) if k == 1 else i,
                )

    go(((0, 0, 0),) * p, (0.0,) * p, ((),) * p, ((),) * p)
    return best[0]


@pytest.mark.parametrize("seed", range(8))
def test_small_cases_reach_the_optimum(seed: int) -> None:
    rng = random.Random(seed)
    p, m = rng.choice(((2, 2), (2, 3), (3, 2)))
    F, I, W = (rng.uniform(0.5, 3) for _ in range(3))  # noqa: E741
    costs = Costs(forward=F, input_gradient=I, weight_gradient=W)
    best = recommend(costs, ranks=p, num_micro_batches=m, rounds=200)
    assert best.timeline.makespan == pytest.approx(optimum(costs, p, m))


def test_a_limit_rejects_what_would_be_faster() -> None:
    costs = Costs()
    free = recommend(costs, ranks=4, num_micro_batches=8, rounds=0, synchronised=False)
    assert free.schedule.name == "zb_h2"
    tight = recommend(costs, ranks=4, num_micro_batches=8, memory_limit=4, rounds=0, synchronised=False)
    assert tight.schedule.name == "zb_h1"
    assert "zb_h2 would be faster but holds 7 micro-batches, and the limit is 4" in tight.reason
    verdicts = {one.name: one.verdict for one in tight.tried}
    assert verdicts["zb_h2"].startswith("does not fit")


def test_nothing_fits() -> None:
    with pytest.raises(DoesNotFit, match="No schedule fits: the nearest"):
        recommend(Costs(), ranks=4, num_micro_batches=8, memory_limit=0.5)


def test_a_limit_in_bytes() -> None:
    costs = Costs(activation_bytes=10, weight_bytes=100)
    best = recommend(costs, ranks=4, num_micro_batches=8, memory_limit_bytes=140, rounds=10)
    assert max(best.timeline.peak_bytes or ()) <= 140


def test_what_is_only_simulated_is_tried_where_it_is_asked_for() -> None:
    for executable, tried in ((True, set()), (False, {"chimera", "dualpipe"})):
        best = recommend(Costs(), ranks=4, num_micro_batches=8, executable=executable, rounds=0)
        assert {"chimera", "dualpipe"} & {one.name for one in best.tried} == tried


def test_two_chunks_are_tried_where_they_are_asked_for() -> None:
    names = {(one.name, one.chunks) for one in recommend(Costs(), ranks=4, num_micro_batches=8, chunks=(1, 2),
                                                         rounds=0).tried}  # fmt: skip
    assert ("zb_v", 2) in names
    assert ("one_f_one_b", 1) in names


def test_stages_that_do_not_lie_evenly_are_told() -> None:
    with pytest.raises(InvalidCosts, match="3 stages do not lie evenly on 2 ranks"):
        recommend(Costs(forward=[1, 2, 3]), ranks=2, num_micro_batches=2)


def test_alternatives_keep_the_work() -> None:
    timeline = simulate(Schedule.of("interleaved", ranks=4, num_micro_batches=8), forward=[1, 2, 1, 1, 1, 1, 1, 3])
    others = {(one.name, one.chunks): one for one in alternatives(timeline)}
    merged = simulate(
        Schedule.of("one_f_one_b", ranks=4, num_micro_batches=8),
        forward=[3, 2, 2, 4],
        input_gradient=2,
        weight_gradient=2,
    )
    assert others["one_f_one_b", 1].seconds == pytest.approx(merged.makespan)


def test_greedy_orders_keep_what_they_may_hold() -> None:
    for schedule, _ in zip(greedy_schedules(loop(3), Costs(), 6, 2, 0), count()):
        assert max(simulate(schedule).peak_activations) <= 2
