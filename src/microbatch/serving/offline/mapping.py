"""Offline inference: a model over a whole data set, in the fastest pieces that fit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from microbatch.batch.lengths import Length
from microbatch.batch.progress import Progress, progress_bar
from microbatch.batch.running import Forward
from microbatch.curves.profile import Profile
from microbatch.serving.offline.job import BatchSize, Job, Model
from microbatch.serving.offline.joining import Form, Join, rows_of
from microbatch.serving.offline.map_report import MapReport
from microbatch.serving.offline.placing import inferring
from microbatch.serving.offline.sources import WINDOW, Collate
from microbatch.serving.offline.work import Work

logger = logging.getLogger(__name__)

_REDRAWN = 0.1
"""Seconds between two pictures of the progress bar."""


def map(
    model: Model,
    data: Any,
    batch_size: BatchSize = "auto",
    *,
    forward: Forward | None = None,
    collate: Collate | None = None,
    length: Length | None = None,
    window: int = WINDOW,
    device: torch.device | str | None = None,
    output_device: torch.device | str | None = "cpu",
    out: Any = None,
    autocast: torch.dtype | None = None,
    profile: str | Path | Profile | None = None,
    memory_limit: int | None = None,
    check: bool = False,
    progress: bool | Progress = True,
    return_report: bool = False,
) -> Any:
    """The outputs of a model over all of the data, as one pass would give them, in the fastest pieces that fit.

    The model runs in evaluation mode without gradients and is left as it was found. A piece that runs out of memory
    runs again in smaller ones. Outputs of any nesting are put together in the order of the data.

    Args:
        model: a module, or any function of a batch.
        data: a tensor or array, members with one entry per item in a dict, tuple or data class, a data set with
            ``len`` and indices, a list of items, or any iterable of items.
        batch_size: ``"auto"``, the fastest size, found while the data passes; a number of items, in the order of the
            data; or a `TokenBudget`, by length.
        forward: ``forward(model, batch) -> output``; by default ``model(**batch)`` for a mapping, ``model(*batch)``
            for a tuple, else ``model(batch)``.
        collate: makes a batch of a list of items. By default items are stacked; those of different lengths are padded
            where they have an ``attention_mask``, and otherwise only share a piece with their like.
        length: ``length(item)``, tokens of an item where they cannot be read off it.
        window: items of a data set or iterable that are sorted by length at a time, and held.
        device: where torch runs; the model is moved there and back. By default where the model is.
        output_device: where outputs are kept; None leaves them where they come out.
        out: tensors or arrays (``numpy.memmap`` too) of the outputs' form to write to, for results beyond memory.
        autocast: dtype for ``torch.autocast``.
        profile: a saved profile or one in memory, for the size that ``"auto"`` takes.
        memory_limit: bytes that ``"auto"`` may use, weights included.
        check: first prove on a few items that rows do not depend on each other.
        progress: a bar where standard error is a terminal (True), none (False), or called with share and text.
        return_report: give ``(outputs, report)``, a `MapReport` of the size, why, and what ran.

    Returns:
        Outputs in the form of the model's own. Rows of different shapes come as a list in the order of the data.

    Raises:
        InvalidBatch: no items, members of different lengths, or data of another kind.
        InvalidBatchSizes: a size below 1.
        InvalidModel: outputs without a row per item, or rows that depend on each other (with ``check``).
        DoesNotFit: one item alone runs out of memory.
    """
    job = Job(model, data, batch_size, forward, collate, length, window, device, output_device, autocast, profile,
              memory_limit, check)  # fmt: skip
    outputs, report = _mapped(job, out, progress)
    return (outputs, report) if return_report else outputs


def imap(
    model: Model,
    data: Any,
    batch_size: BatchSize = "auto",
    *,
    forward: Forward | None = None,
    collate: Collate | None = None,
    length: Length | None = None,
    window: int = WINDOW,
    device: torch.device | str | None = None,
    output_device: torch.device | str | None = "cpu",
    autocast: torch.dtype | None = None,
    profile: str | Path | Profile | None = None,
    memory_limit: int | None = None,
    check: bool = False,
) -> Iterator[Any]:
    """As `map`, but gives the output of one item after the other, in order, while the data passes.

    Nothing is held but what waits for its turn: a piece, or a window of items where lengths differ. An output has no
    batch dimension, and no padding where its dimensions follow the item's length. The model is in evaluation mode
    from the first output taken to the last, or until the iterator is closed.

    Args: see `map`.
    """
    job = Job(model, data, batch_size, forward, collate, length, window, device, output_device, autocast, profile,
              memory_limit, check)  # fmt: skip
    return _stream(job)


def _mapped(job: Job, out: Any, progress: bool | Progress) -> tuple[Any, MapReport]:
    start = time.perf_counter()
    with inferring(job.model, job.runs_on), _shown(progress) as show:
        work = job.work()
        join = Join(work.source, out)
        for done in work:
            join.add(done, work.axes)
            show(work)
        outputs = join.result()
    report = _report(work, time.perf_counter() - start)
    logger.info("%d items in %d pieces; %s.", report.items, report.pieces, report.reason)
    return outputs, report


def _stream(job: Job) -> Iterator[Any]:
    with inferring(job.model, job.runs_on):
        work = job.work()
        form: Form | None = None
        early: dict[int, Any] = {}
        following = 0
        for done in work:
            form = form or Form(done.output, len(done.places))
            early.update(zip(done.places, rows_of(form, done, work.axes), strict=True))
            while following in early:
                yield early.pop(following)
                following += 1


def _report(work: Work, seconds: float) -> MapReport:
    """What ran; sizes in items where all items were alike."""
    unit, scale = work.scale()
    counts, sizing = work.counts, work.sizing
    return MapReport(
        items=counts.items,
        pieces=counts.pieces,
        seconds=seconds,
        unit=unit,
        size=None if sizing.wanted is None else sizing.wanted // scale,
        reason=sizing.reason(unit, scale),
        tokens=counts.tokens // scale,
        padded_tokens=counts.padded_tokens // scale,
        out_of_memory=sizing.failures,
        trials=tuple(replace(t, size=t.size // scale, cost=t.cost // scale) for t in sizing.trials),
    )


@contextmanager
def _shown(progress: bool | Progress) -> Iterator[Callable[[Work], None]]:
    """What draws the progress of the work, at most ten times a second."""
    bar = progress_bar() if progress is True else nullcontext(progress if callable(progress) else None)
    with bar as draw:
        last = time.perf_counter()

        def show(work: Work) -> None:
            nonlocal last
            now, size, items = time.perf_counter(), work.source.size, work.counts.items
            if draw is not None and (now - last > _REDRAWN or items == size):
                last = now
                draw(items / size if size else 0.0, f"{items} items")

        yield show
