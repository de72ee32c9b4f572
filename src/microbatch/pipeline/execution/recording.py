"""What each action of this rank took, noted while a pipeline runs, and put together from all ranks when asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from microbatch.errors import UserError
from microbatch.pipeline.execution.listening import this_machine
from microbatch.pipeline.execution.telling import Doing
from microbatch.pipeline.measured import RankTimes
from microbatch.pipeline.schedule import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action

WORDS = {FORWARD: "forward", INPUT_GRADIENT: "input gradient", WEIGHT_GRADIENT: "weight gradient",
         BACKWARD: "backward"}  # fmt: skip


class Recorder:
    """Called before and after every action of this rank; a microsecond or two each.

    Attributes:
        name: of the pipeline.
        number: of runs so far.
        action: that runs now, or ran last; None outside of a run.
    """

    def __init__(self, name: str, device: torch.device, post: Callable[[int, bytes], None]) -> None:
        """
        Args:
            name: of the pipeline, the same on all of its ranks.
            device: where the stages are.
            post: takes number and times of each run or step as soon as it is over.
        """
        self.name, self.number = name, 0
        self._device, self._post = device, post
        self._rows: list[tuple[Action, Any, Any]] = []
        self.action: Action | None = None
        self._in_step = self._ran = False
        self._event: Any = None

    def now(self) -> Doing:
        """What is being done, or was done last between two actions of a run."""
        action = self.action
        if action is not None:
            return Doing(f"{WORDS[action.kind]} of stage {action.stage}, micro-batch {action.micro_batch}", alike=())
        return Doing("update", alike=(UserError,)) if self._in_step and self._ran else Doing()

    def begin(self, action: Action) -> None:
        """An action begins."""
        self.action = action
        if self._device.type == "cuda":
            self._event = _event()

    def __call__(self, action: Action, start: float, end: float) -> None:
        """An action ended, by this process's clock; calls of an accelerator return before that, so events count."""
        self._rows.append((action, start, end) if self._event is None else (action, self._event, _event()))

    @contextmanager
    def run(self) -> Iterator[None]:
        """Around one schedule."""
        self._rows, self.action, self._ran, self.number = [], None, False, self.number + 1
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._zero = _event(), time.perf_counter()
        yield
        self.action, self._ran = None, True
        if not self._in_step:
            self._posted(None, None)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a whole step, its update included."""
        before, began = self.number, time.perf_counter()
        self._in_step, self._ran = True, False
        try:
            yield
        finally:
            self._in_step = False
        if self.number > before:
            self._posted(began, time.perf_counter())

    def _posted(self, began: float | None, ended: float | None) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        rows = [(action, *self._seconds(start, end)) for action, start, end in self._rows]
        times = RankTimes(
            clock=this_machine(),
            actions=tuple((action.stage, action.kind, action.micro_batch) for action, _, _ in rows),
            start=tuple(start for _, start, _ in rows),
            end=tuple(end for _, _, end in rows),
            began=began,
            ended=ended,
        )
        self._post(self.number, msgspec.json.encode(times))

    def _seconds(self, start: Any, end: Any) -> tuple[float, float]:
        if isinstance(start, float):
            return start, end
        event, seconds = self._zero
        return seconds + event.elapsed_time(start) / 1000, seconds + event.elapsed_time(end) / 1000


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
