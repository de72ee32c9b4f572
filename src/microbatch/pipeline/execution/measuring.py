"""The measured timeline of a pipeline's last run, from the times that its ranks leave in the store.

Not a collective: each rank leaves its times at the end of a run or step, and any rank reads those of all.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import msgspec
import torch.distributed as dist

from microbatch.errors import NoAnswer
from microbatch.pipeline.execution.guard import guard
from microbatch.pipeline.execution.recording import Recorder
from microbatch.pipeline.measured import RankTimes, measured_timeline
from microbatch.pipeline.timeline import Timeline

if TYPE_CHECKING:
    from microbatch.pipeline.execution.pipeline import Pipeline

PATIENCE = 60.0
"""Seconds that a rank waits for the times of others, which may still be in the step."""
_SLOTS = 2
"""Runs that are kept: the ranks of a pipeline do not end a step together."""
_names = count()
"""Pipelines run for the first time in the same order on every rank."""


def recorder_of(pipe: Pipeline) -> Recorder:
    """The recorder of a pipeline, which watches its actions from now on."""
    if not isinstance(pipe.watch, Recorder):
        name = str(next(_names))
        pipe.watch = Recorder(name, pipe.device, partial(_leave, name))
    return pipe.watch


def timeline_of(pipe: Pipeline) -> Timeline:
    """The last run of a pipeline, measured, beside its simulation with the costs that it had itself.

    Raises:
        NoAnswer: nothing was run yet, or the others have gone on.
    """
    recorder = recorder_of(pipe)
    if pipe.last is None or not recorder.number:
        raise NoAnswer("The pipeline has not run yet.", "Run a step, and then ask for its timeline.")
    ranks = [_times(recorder.name, rank, recorder.number) for rank in dist.get_process_group_ranks(pipe.group)]
    return measured_timeline(pipe.last.schedule, ranks)


def _key(name: str, rank: int, number: int) -> str:
    return f"times/{name}/{rank}/{number % _SLOTS}"


def _leave(name: str, number: int, times: bytes) -> None:
    here = guard()
    here.store.set(_key(name, here.rank, number), f"{number} {times.decode()}")


def _times(name: str, rank: int, number: int) -> RankTimes:
    here, key = guard(), _key(name, rank, number)
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        if here.store.check([key]):
            left, _, times = here.store.get(key).decode().partition(" ")
            if int(left) == number:
                return msgspec.json.decode(times, type=RankTimes)
            if int(left) > number:
                raise NoAnswer(f"Rank {rank} has gone on to run {left}.", "Ask for the timeline before the next step.")
        if here.failure is not None:
            raise here.failure.error(here.size)
        time.sleep(0.005)
    raise NoAnswer(f"Rank {rank} has not ended run {number} within {PATIENCE:.0f} s.", "Run a step on every rank.")
