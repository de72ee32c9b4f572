"""Recommended orders beside proven optima: random F, I and W on up to 4 ranks and 8 micro-batches, by CP-SAT.

Needs the package, which the project itself does not:

    pip install --target benchmarks/.envs/ortools ortools==9.15.6755

    python benchmarks/pipeline_optimum.py [--cases 60] [--seconds 60] [--out benchmarks/results/pipeline_optimum.json]

Each case draws p, m, whole times for F, I and W (half of the cases one for all stages, half one per stage), a message
or none, and a memory limit or none. A case whose optimum is not proven within its seconds is counted apart.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from microbatch.pipeline.costs import Costs
from microbatch.pipeline.recommend import recommend

FOLDER = Path(__file__).parent / ".envs" / "ortools"
SAME = 1e-9


@dataclass(frozen=True, slots=True)
class Case:
    """One draw: times by stage."""

    ranks: int
    count: int
    forward: tuple[int, ...]
    input_gradient: tuple[int, ...]
    weight_gradient: tuple[int, ...]
    message: int
    limit: int | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was found: makespans, the best named schedule, and whether the optimum is proven."""

    case: Case
    recommended: float
    named: float
    optimum: float | None
    bound: float
    search_seconds: float
    proof_seconds: float


def draw(rng: random.Random) -> Case:
    """Sizes and times of one case."""
    ranks, count = rng.randint(2, 4), rng.randint(1, 8)
    even = rng.random() < 0.5
    times = []
    for _ in range(3):
        one = rng.randint(10, 60)
        times.append(tuple(one if even else rng.randint(10, 60) for _ in range(ranks)))
    return Case(ranks, count, times[0], times[1], times[2], rng.choice((0, 0, 5)), rng.choice((None, None, ranks)))


def prove(case: Case, most: float, seconds: float) -> tuple[float | None, float]:  # noqa: C901 (one model)
    """The shortest makespan if it is proven, and the best lower bound. ``most`` is a makespan that is known."""
    from ortools.sat.python import cp_model  # type: ignore[import-not-found, unused-ignore]

    model = cp_model.CpModel()
    horizon = int(most)
    last = case.ranks - 1
    kinds = {"F": case.forward, "I": case.input_gradient, "W": case.weight_gradient}
    start = {
        (kind, stage, micro_batch): model.new_int_var(0, horizon - times[stage], f"{kind}{stage},{micro_batch}")
        for kind, times in kinds.items()
        for stage in range(case.ranks)
        for micro_batch in range(case.count)
    }

    def after(kind: str, stage: int, micro_batch: int) -> Any:
        return start[kind, stage, micro_batch] + kinds[kind][stage]

    for stage in range(case.ranks):
        model.add_no_overlap(
            model.new_fixed_size_interval_var(start[kind, stage, k], times[stage], f"{kind}{stage},{k} lasts")
            for kind, times in kinds.items()
            for k in range(case.count)
        )
        for k in range(case.count):
            model.add(start["I", stage, k] >= after("F", stage, k))
            model.add(start["W", stage, k] >= after("I", stage, k))
            if stage:
                model.add(start["F", stage, k] >= after("F", stage - 1, k) + case.message)
            if stage < last:
                model.add(start["I", stage, k] >= after("I", stage + 1, k) + case.message)
            if k:  # micro-batches cost the same, so that they may keep their order
                for kind in kinds:
                    model.add(start[kind, stage, k] >= after(kind, stage, k - 1))
            if case.limit is not None and k >= case.limit:  # in order, so that the oldest must be gone
                model.add(start["F", stage, k] >= after("W", stage, k - case.limit))
    makespan = model.new_int_var(0, horizon, "makespan")
    for kind, stage, k in start:
        model.add(makespan >= after(kind, stage, k))
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        raise AssertionError(f"the solver finds no order at all for {case}")
    return (solver.objective_value if status == cp_model.OPTIMAL else None), solver.best_objective_bound


def judge(case: Case, seconds: float, seed: int) -> Outcome:
    """The recommendation and the proof of one case."""
    costs = Costs(forward=case.forward, input_gradient=case.input_gradient, weight_gradient=case.weight_gradient,
                  message=float(case.message))  # fmt: skip
    began = time.perf_counter()
    best = recommend(costs, ranks=case.ranks, num_micro_batches=case.count, memory_limit=case.limit, seed=seed)
    middle = time.perf_counter()
    named = min(
        (one.seconds for one in best.tried if one.name != "searched" and not one.verdict.startswith("does not fit")),
        default=float("inf"),
    )
    optimum, bound = prove(case, best.timeline.makespan, seconds)
    return Outcome(case, best.timeline.makespan, named, optimum, bound, middle - began, time.perf_counter() - middle)


def main() -> None:
    """Print every case and the share that equals the optimum."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each proof")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not FOLDER.is_dir():
        sys.exit("Install the solver first: pip install --target benchmarks/.envs/ortools ortools==9.15.6755")
    sys.path.append(str(FOLDER))
    rng = random.Random(arguments.seed)
    found = []
    for number in range(arguments.cases):
        outcome = judge(draw(rng), arguments.seconds, arguments.seed)
        found.append(outcome)
        gap = "not proven" if outcome.optimum is None else f"{outcome.recommended / outcome.optimum - 1:.2%} above"
        print(f"{number:>3} p {outcome.case.ranks} m {outcome.case.count} limit {outcome.case.limit} message "
              f"{outcome.case.message}: named {outcome.named:g}, recommended {outcome.recommended:g}, {gap} "
              f"({outcome.search_seconds:.1f} s + {outcome.proof_seconds:.1f} s)", flush=True)  # fmt: skip
    summary = summarise(found)
    print(", ".join(f"{name} {value:g}" for name, value in summary.items()))
    if arguments.out:
        document = {"seed": arguments.seed, **summary, "cases": [_plain(outcome) for outcome in found]}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _plain(outcome: Outcome) -> dict[str, Any]:
    """A case without its times, which are those of the machine."""
    return {name: value for name, value in asdict(outcome).items() if not name.endswith("_seconds")}


def summarise(found: list[Outcome]) -> dict[str, float]:
    """Counts and shares."""
    proven = [outcome for outcome in found if outcome.optimum is not None]
    equal = [o for o in proven if o.optimum is not None and o.recommended <= o.optimum * (1 + SAME)]
    worse = [outcome for outcome in found if outcome.recommended > outcome.named * (1 + SAME)]
    return {
        "total": len(found), "proven": len(proven), "equal": len(equal), "worse_than_named": len(worse),
        "share_equal": len(equal) / len(proven) if proven else 0.0,
        "worst_gap": max((o.recommended / o.optimum - 1 for o in proven if o.optimum), default=0.0),
    }  # fmt: skip


if __name__ == "__main__":
    main()
