"""What a run of a pipeline showed: step time and bubble beside the simulation, memory, exactness, what to change."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from microbatch.batch.exactness import ExactnessReport
from microbatch.notebook import notebook_form
from microbatch.pipeline.advice import advice
from microbatch.pipeline.costs_file import costs_json
from microbatch.pipeline.timeline import Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Bytes of one rank.

    Attributes:
        state: of its weights, gradients and optimizer.
        peak: the most that the device's allocator held; on a CPU the most that the process ever had in memory, Python
            and torch included.
    """

    state: int
    peak: int

    def to_json(self) -> dict[str, int]:
        """Plain numbers."""
        return {"state": self.state, "peak": self.peak}


@dataclass(frozen=True, kw_only=True)
class PipelineRun:
    """Some steps of one pipeline.

    Attributes:
        model: as the user wrote it.
        mode: training or inference.
        batch_size: items of a step.
        layers: names of the layers of each stage.
        timeline: of the step of median length, measured; its simulation beside it.
        step_seconds: of each step, the first left out.
        first_step_seconds: of the first, which also meets, plans and allocates.
        memory: of each rank.
        device: where ranks ran.
        exact: against one process; None where it was not checked.
        notes: what a reader must know, one sentence each.
    """

    model: str
    mode: str
    batch_size: int
    layers: tuple[tuple[str, ...], ...]
    timeline: Timeline
    step_seconds: tuple[float, ...]
    first_step_seconds: float
    memory: tuple[RankMemory, ...]
    device: str = "cpu"
    exact: ExactnessReport | None = None
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Of a step, the median."""
        return statistics.median(self.step_seconds)

    @property
    def simulated_seconds(self) -> float:
        """Of the same step, simulated with its measured costs."""
        return self.timeline.predicted.makespan_with_optimizer

    @cached_property
    def advice(self) -> str:
        """What to change, in one sentence."""
        return advice(self.timeline.predicted)

    def to_json(self) -> dict[str, Any]:
        """The measured timeline as `simulate` prints one, the simulated one in ``beside``, and the rest."""
        return {
            **self.timeline.to_json(),
            "model": self.model, "mode": self.mode, "device": self.device, "batch_size": self.batch_size,
            "layers": [list(names) for names in self.layers],
            "step_seconds": self.seconds, "simulated_step_seconds": self.simulated_seconds,
            "samples": list(self.step_seconds), "first_step_seconds": self.first_step_seconds,
            "memory": [one.to_json() for one in self.memory],
            "exact": None if self.exact is None else self.exact.exact,
            "largest_difference": None if self.exact is None else self.exact.to_json()["largest_difference"],
            "advice": self.advice, "notes": list(self.notes),
            "costs": costs_json(self.timeline.costs, self.timeline.schedule.stages),
        }  # fmt: skip

    def _repr_html_(self) -> str | None:
        return notebook_form(self.timeline)
