"""``micro_batch_size="auto"``: the fastest size that fits, from a profile or from a few passes over the first batch.

Memory is predicted on fake tensors; where a model cannot run on them, sizes grow until memory ends them. Passes run
forward and backward on the user's own model, whose gradients, buffers and random state are put back; weights and the
optimizer are never touched, and a compiled model runs uncompiled, so that no size is compiled for a try.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from microbatch.batch.oom import drop_frames, is_out_of_memory, release
from microbatch.batch.running import device_of, uncompiled
from microbatch.batch.split import split
from microbatch.curves.codec import load_profile
from microbatch.curves.micro_batch_choice import choose_micro_batches
from microbatch.curves.profile import Profile
from microbatch.errors import InvalidProfile
from microbatch.measure.budget import memory_budget
from microbatch.measure.memory import MARGIN
from microbatch.measure.storages import bytes_of
from microbatch.measure.timer import synchronize
from microbatch.training.memory import size_search
from microbatch.training.memory.memory_model import MemoryModel, largest_piece
from microbatch.training.memory.size_search import Probe, best_size, is_telling, next_size, pieces_in_pass
from microbatch.training.passes import Passes
from microbatch.units import format_bytes

logger = logging.getLogger(__name__)

PARTS = 3
"""Places in the batch from which repeated passes take their items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A micro-batch size and what it rests on.

    Attributes:
        micro_batch_size: the fastest that fits.
        num_micro_batches: of a pipeline, which decides there; else None.
        reason: in one sentence.
        probes: the passes that were run, in order.
        predicted: predicted peak bytes by size.
        largest: what memory allows, as far as is known.
        budget_bytes: what the peaks were held against.
        budget_source: who says so.
    """

    micro_batch_size: int
    reason: str
    probes: tuple[Probe, ...] = ()
    predicted: tuple[tuple[int, int], ...] = ()
    largest: int | None = None
    budget_bytes: int | None = None
    budget_source: str = ""
    num_micro_batches: int | None = None


def from_profile(profile: str | Path | Profile, batch_size: int, memory_limit: int | None) -> Choice:
    """The smallest size whose step is within 2 % of the fastest that the profile knows, within memory.

    Raises:
        InvalidProfile: no profile of training, or none of its sizes fits.
    """
    profile = load_profile(profile)
    found = choose_micro_batches(profile, batch_size, memory_limit=memory_limit)
    if found.chosen is None:
        raise InvalidProfile(found.reason, "Measure smaller sizes.")
    fitting = [row for row in found.rows if row.fits is not False]
    return Choice(
        micro_batch_size=found.chosen.micro_batch_size,
        reason=f"the profile's smallest within 2 % of the fastest of {len(fitting)} sizes: {found.reason}",
        largest=fitting[-1].micro_batch_size,
    )


def choose(passes: Passes, optimizer: Optimizer, batch: Any, batch_size: int, memory_limit: int | None) -> Choice:
    """The size with the fastest step among those that fit, from at most a handful of passes.

    Gradients are left behind; the caller empties them and puts buffers and random state back.
    """
    with uncompiled(passes.model) as model:
        return _search(replace(passes, model=model), optimizer, batch, batch_size, memory_limit)


def _search(passes: Passes, optimizer: Optimizer, batch: Any, batch_size: int, memory_limit: int | None) -> Choice:
    weights = bytes_of([*passes.model.parameters(), *passes.model.buffers()])
    budget, source = budget_of(weights, device_of(passes.model), memory_limit)
    predicted, failed = _predictions(passes, optimizer, batch, batch_size, budget * (1 - MARGIN))
    largest = size_search.largest_fitting(predicted, budget * (1 - MARGIN)) if predicted else None
    # what refuses a size by itself, not for lack of memory, is not asked again and again: the first size took two
    steps_on_fakes = 0 if failed is None else len(predicted) + 2
    probes = _probes(passes, batch, batch_size, largest, predicted, steps_on_fakes)
    chosen = best_size(batch_size, probes)
    choice = Choice(
        micro_batch_size=chosen,
        reason=reason_of(batch_size, probes, failed, largest, budget, source),
        probes=tuple(probes),
        predicted=tuple(sorted(predicted.items())),
        largest=largest,
        budget_bytes=budget,
        budget_source=source,
    )
    logger.info("Micro-batch size %d of %d: %s.", chosen, batch_size, choice.reason)
    return choice


def _probes(
    passes: Passes, batch: Any, batch_size: int, largest: int | None, predicted: dict[int, int], passes_before: int
) -> list[Probe]:
    probes: list[Probe] = []
    smallest = 1
    while True:
        size = next_size(batch_size, probes, largest, smallest=smallest, passes_before=passes_before)
        if size is None:
            return probes
        pieces = pieces_in_pass(batch_size, probes, size, largest)
        part = _part(passes, batch, batch_size, size, pieces, probes)
        try:
            seconds = _timed(passes, part, pieces)
        except Exception:
            if not any(probe.seconds for probe in probes) or size >= min(probe.micro_batch_size for probe in probes):
                raise
            smallest = size + 1  # a batch norm needs two items
            continue
        telling = is_telling(probes, size, seconds)
        probes.append(Probe(size, seconds, predicted.get(size), counts=telling, pieces=pieces))
        if seconds is None:
            release(device_of(passes.model))


def budget_of(held: int, device: torch.device, memory_limit: int | None) -> tuple[int, str]:
    """Bytes for everything, of which `held` are taken already; on a CPU the ranks of one machine share its memory."""
    budget, source = memory_budget(memory_limit, device)
    if memory_limit is None and device.type == "cpu":  # what is still available does not count what is held
        budget = budget // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) + held
    return budget, source


def _predictions(
    passes: Passes, optimizer: Optimizer, batch: Any, batch_size: int, budget: float
) -> tuple[dict[int, int], int | None]:
    """Peaks of a few sizes up to the largest that fits, and a size at which the model itself said that it does not;
    no peaks where it cannot run on fake tensors."""
    memory = MemoryModel(passes, optimizer)
    known: dict[int, int] = {}
    waiting = list(size_search.first_predictions(batch_size))
    for _ in range(6):
        if not waiting:
            break
        size = waiting.pop(0)
        try:
            known[size] = memory.peak(largest_piece(batch, size, passes.list_of_samples), size).peak_bytes
        except Exception as error:
            if is_out_of_memory(error):
                return known, size
            logger.info("Memory cannot be predicted (%s: %s); sizes grow until it ends.", type(error).__name__, error)
            return {}, None
        if not waiting and (following := size_search.next_prediction(known, batch_size, budget)) is not None:
            waiting.append(following)
    return known, None


def _part(passes: Passes, batch: Any, batch_size: int, size: int, pieces: int, probes: list[Probe]) -> Any:
    """Items of the next pass at a size: those that need most memory at first, then others from pass to pass."""
    before = sum(probe.micro_batch_size == size for probe in probes)
    items = size * pieces
    if not before or pieces == 1:
        return largest_piece(batch, items, passes.list_of_samples)
    start = (before - 1) % PARTS * (batch_size - items) // (PARTS - 1)
    parts = [start, items, batch_size - start - items]
    cut = split(batch, [part for part in parts if part], list_of_samples=passes.list_of_samples)
    return next(part for index, part in enumerate(cut) if index == (1 if start else 0))


def _timed(passes: Passes, part: Any, pieces: int) -> float | None:
    """Seconds of forward and backward of a piece; None where memory ran out. Not in the except block: it holds the
    frames."""
    device = device_of(passes.model)
    try:
        synchronize(device)
        start = time.perf_counter()
        passes.probe(part, pieces)
        synchronize(device)
        return (time.perf_counter() - start) / pieces
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        drop_frames(error)
    return None


def reason_of(
    batch_size: int, probes: list[Probe], refused: int | None, largest: int | None, budget: int, source: str
) -> str:
    """Why a size was chosen, in one sentence."""
    sizes = sorted(size_search.times_of(probes))
    failed = next((probe.micro_batch_size for probe in probes if probe.seconds is None), refused)
    text = f"the fastest of {len(sizes)} sizes that ran ({', '.join(map(str, sizes))})"
    if failed is not None:
        text += f"; {failed} ran out of memory"
    elif largest is not None and largest < batch_size:
        text += f"; {format_bytes(budget)} ({source}) allow {largest}"
    return text
