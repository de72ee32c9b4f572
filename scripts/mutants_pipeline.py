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
    *_rows(
        "pipeline/execution/cutting.py",
        "pipeline/execution/test_cutting.py",
        ("needs[-1] |= record.at_end", "pass", "what the output is made of crosses too"),
        (
            "live = (live | needs[stage]) - frozenset(stages[stage])",
            "live = needs[stage] - frozenset(stages[stage])",
            "what later stages need passes through",
        ),
        ("(*owners[0], *idle)", "owners[0]", "every parameter has a stage"),
    ),
    *_rows(
        "pipeline/execution/probe.py",
        "pipeline/execution/test_cutting.py",
        ("if fake._version != version:", "if False:", "changes in place are noticed"),
        ("if name in record.returned:", "if False:", "a layer is called once"),
    ),
    *_rows(
        "pipeline/execution/stage.py",
        "pipeline/execution/test_execution.py",
        (
            "if not split_backward.splits(roots, graph.inputs, self.parameters()):",
            "if False:",
            "a backward that cannot be split is done at once",
        ),
        ("            graph.whole_later = True\n", "            pass\n", "the first stage makes its weight gradients"),
        ("torch.manual_seed(run.seeds(self.index, micro_batch))", "pass", "chance does not depend on the order"),
        (
            "roots = [_owned(root) for root in roots]",
            "pass",
            "a view can lose its graph",
        ),
    ),
    *_rows(
        "pipeline/execution/parts.py",
        "pipeline/execution/test_execution.py",
        (
            "return tree_map(_cloned, received) if name in self._changed else received",
            "return received",
            "what was received may be changed in place",
        ),
    ),
    *_rows(
        "pipeline/execution/tied.py",
        "pipeline/execution/test_execution.py",
        ("dist.all_reduce(_local(held.grad), group=one.group)", "pass", "tied gradients are added up"),
    ),
    *_rows(
        "training/ranks/pipelined.py",
        "pipeline/execution/test_execution.py",
        ("dist.all_reduce(square, group=self._pipe.group)", "pass", "one norm over all stages"),
        ("if not one.counts}", "if False}", "a tied weight counts once in the norm"),
        ("self._over_replicas(", "len(", "gradients of replicas are added up"),
    ),
)
