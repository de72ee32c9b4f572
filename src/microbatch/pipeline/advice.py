"""One sentence on what to change about a pipeline that was measured, whatever would save most."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from microbatch.pipeline.costs import Costs
from microbatch.pipeline.recommend import named_timelines
from microbatch.pipeline.simulate import simulate
from microbatch.pipeline.timeline import Timeline
from microbatch.units import format_percent, format_seconds

LEAST = 0.02
"""Share of a step below which a change is not worth a sentence: less than the simulation is sure of."""
_TIMES = ("forward", "input_gradient", "weight_gradient", "full_backward")


def advice(timeline: Timeline) -> str:
    """What would shorten the step most: another schedule, other cuts, fewer messages, or more micro-batches.

    Args:
        timeline: simulated, with the costs of a step.
    """
    found = [each for each in (_schedule(timeline), _cuts(timeline), _messages(timeline)) if each[0] >= LEAST]
    if found:
        return max(found)[1]
    if timeline.bubble_fraction >= LEAST:
        count = 2 * timeline.schedule.num_micro_batches
        return (
            f"Ranks wait because the pipeline fills and drains: {count} micro-batches of this size in a step would "
            "halve the share of that."
        )
    return "Nothing: no other schedule or cut saves 2 % or more."


def _schedule(timeline: Timeline) -> tuple[float, str]:
    """The best other schedule that torch's runtime can run with the same stages."""
    schedule = timeline.schedule
    if not schedule.has_backward or schedule.stages % schedule.ranks or not timeline.makespan:
        return 0.0, ""
    chunks = schedule.stages // schedule.ranks
    others = named_timelines(
        timeline.costs, schedule.ranks, schedule.num_micro_batches, (chunks,), given=schedule.stages, executable=True,
        memory_limit=timeline.memory_limit, memory_limit_bytes=timeline.memory_limit_bytes,
    )  # fmt: skip
    fitting = [other for other in others if other.fits is not False]
    best = min(fitting, key=lambda other: other.makespan_with_optimizer, default=timeline)
    gain = 1 - best.makespan_with_optimizer / timeline.makespan_with_optimizer
    return (
        gain,
        f"Take --schedule {best.schedule.name}: with these times a step would take {format_percent(gain)} less.",
    )


def _cuts(timeline: Timeline) -> tuple[float, str]:
    """Stages that all take the mean of their times: what the best cut could reach at most."""
    schedule, costs = timeline.schedule, timeline.costs
    even = {name: float(np.mean(costs.per_stage(name, schedule.stages))) for name in _TIMES if _given(costs, name)}
    whole = sum(costs.per_stage(name, schedule.stages) for name in _TIMES[:3])
    slowest = int(np.argmax(whole))
    gain = _gain(timeline, replace(costs, **even))  # type: ignore[arg-type]
    return gain, (
        f"Give stage {slowest} fewer layers: it takes {format_seconds(float(np.max(whole)))} for a micro-batch and the "
        f"mean is {format_seconds(float(np.mean(whole)))}; even stages would save up to {format_percent(gain)}."
    )


def _messages(timeline: Timeline) -> tuple[float, str]:
    gain = _gain(timeline, replace(timeline.costs, message=0.0, per_message=0.0))
    return gain, (
        f"Send fewer messages, by larger micro-batches or fewer stages on a rank: they take {format_percent(gain)} of "
        "the step."
    )


def _gain(timeline: Timeline, costs: Costs) -> float:
    """The share of the step that other costs would save."""
    if not timeline.makespan_with_optimizer:
        return 0.0
    changed = simulate(timeline.schedule, costs)
    return 1 - changed.makespan_with_optimizer / timeline.makespan_with_optimizer


def _given(costs: Costs, name: str) -> bool:
    return getattr(costs, name) is not None
