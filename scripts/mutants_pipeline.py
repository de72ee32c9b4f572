"""Breaks of pipeline schedules, their simulation and their search that tests must see."""

from __future__ import annotations

from scripts.mutant import Mutant
from scripts.mutant import rows_of as _rows

PIPELINE: tuple[Mutant, ...] = (
    *_rows(
        "pipeline/schedule.py",
        "pipeline/test_schedule.py",
        ("if done[needed] and is_joined[index]:", "if False:", "a pair waits for both of its needs"),
        (
            "for first, second in ((forward, inputs), (inputs, weights)):",
            "for first, second in ((forward, inputs),):",
            "I before W",
        ),
        ("if len(turns) < len(needs):", "if False:", "a deadlock is told"),
        ("if counts.max(initial=0) > 1:", "if False:", "nothing is done twice"),
        (
            "needs[backwards] = inputs[pair[backwards] + count]",
            "needs[backwards] = -1",
            "a backward needs the one behind",
        ),
    ),
    *_rows(
        "pipeline/steady.py",
        "pipeline/test_closed_forms.py",
        ("np.full(delay, _NOTHING)", "np.full(0, _NOTHING)", "zero bubble puts weight gradients off"),
    ),
    *_rows(
        "pipeline/simulate.py",
        "pipeline/test_simulate.py",
        ("if arrival > ready:", "if False:", "an action waits for what it needs"),
        ("leaves[index - 1] = end[index]", "pass", "a pair sends at its end"),
        ("free[here] = ready + after[index]", "free[here] = ready", "a message costs its sender"),
    ),
    *_rows(
        "pipeline/timeline.py",
        "pipeline/test_simulate.py",
        (
            "np.full_like(reduced, reduced.max()) if self.costs.global_clip else reduced",
            "reduced",
            "a global clip waits for all",
        ),
        (
            "busy_until = max(busy_until, float(last[rank, stage]))",
            "busy_until = float(last[rank, stage])",
            "reductions follow each other",
        ),
    ),
    *_rows(
        "pipeline/partition.py",
        "pipeline/test_partition.py",
        ("own + sum(shared.values())", "own + sum(shared.values()) * 2", "a rank holds a shared weight once"),
        ("slowest[~allowed[:last, last]] = np.inf", "pass", "stages stay within memory"),
    ),
    *_rows(
        "pipeline/search.py",
        "pipeline/test_recommend.py",
        ("if held > self.limit:", "if False:", "the search keeps the limit"),
    ),
)
