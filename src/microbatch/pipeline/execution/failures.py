"""An error of one rank, said on every rank of a pipeline, see `microbatch.pipeline.execution.guard`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from microbatch.pipeline.execution.guard import guard
from microbatch.pipeline.execution.measuring import recorder_of

if TYPE_CHECKING:
    from microbatch.pipeline.execution.pipeline import Pipeline


@contextmanager
def watched(pipe: Pipeline) -> Iterator[None]:
    """Around all that waits for other ranks: an error of one is raised on every one, and nobody waits for ever.

    Raises:
        RankFailed: another rank failed, or is gone. An error of this rank's own is raised as it is.
    """
    with guard().guarding(recorder_of(pipe).now):
        yield


@contextmanager
def shared(pipe: Pipeline) -> Iterator[None]:
    """Around a run of the schedule, whose actions are timed; the rest as `watched`."""
    recorder = recorder_of(pipe)
    for stage in pipe.stages:
        stage.watch = pipe.watch
    with watched(pipe), recorder.run(), _without_dumps():
        yield


@contextmanager
def stepping(pipe: Pipeline) -> Iterator[None]:
    """Around a whole step, update included, which is timed as well; the rest as `watched`."""
    with recorder_of(pipe).step(), watched(pipe):
        yield


@contextmanager
def _without_dumps() -> Iterator[None]:
    """On an error torch's runtime logs its whole schedule, on every rank; ours says where it was in one sentence."""
    runtime = logging.getLogger("torch.distributed.pipelining.schedules")
    before, runtime.disabled = runtime.disabled, True
    try:
        yield
    finally:
        runtime.disabled = before
