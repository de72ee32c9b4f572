"""Times of a few steps of a model that has just been loaded, so that the first budget comes from measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from microbatch.llm.compute import Steps
from microbatch.llm.limits import Limits
from microbatch.llm.observing import sample_of
from microbatch.llm.row_pieces import Row
from microbatch.llm.step_model import ENOUGH, StepSample

SECONDS = 1.5
"""For all of it, by default."""
_CONTEXTS = (32, 256, 1024)
_PREFILLS = (16, 64, 256, 512, 1024)

Shape = tuple[int, int, int]
"""Sequences, new tokens of each, and cached tokens of each."""


def measure_steps(
    runner: Steps,
    limits: Limits,
    *,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.perf_counter,
    device: torch.device | str = "cpu",
) -> tuple[StepSample, ...]:
    """Decoding at several batch sizes and contexts, and chunks of prompts, in turn until the time is over.

    Args:
        runner: whose cache is empty: its blocks are written to.
        limits: of the steps.
        seconds: for all of it; a slow model takes longer, for fewer samples than a fit needs say nothing.
        clock: what tells seconds.
        device: where the model runs.
    """
    shapes = list(shapes_within(limits))
    samples, end, seen = list[StepSample](), clock() + seconds, set[Shape]()
    with torch.inference_mode():
        while True:
            for shape in shapes:
                rows = _rows(shape, limits.block_size)
                if shape not in seen:  # the first call of a shape allocates, and may compile
                    _timed(runner, rows, clock, device)
                    seen.add(shape)
                samples.append(sample_of(rows, _timed(runner, rows, clock, device)))
                if clock() > end and len(samples) >= ENOUGH:
                    return tuple(samples)


def shapes_within(limits: Limits) -> Iterator[Shape]:
    """Small and large steps mixed, for time may be over soon."""
    most, size = limits.max_num_tokens, limits.block_size
    decodes = [2**power for power in range(11) if 2**power <= min(limits.max_num_sequences, most)]
    prefills = [tokens for tokens in _PREFILLS if tokens <= most]
    found = [(batch, 1, cached) for cached in _CONTEXTS for batch in decodes]
    found += [(1, tokens, cached) for cached in (0, _CONTEXTS[1]) for tokens in prefills]
    fits = [s for s in found if s[1] + s[2] <= limits.context and s[0] * -(-(s[1] + s[2]) // size) <= limits.num_blocks]
    order = sorted(fits or [(1, 1, 0)], key=lambda shape: shape[0] * shape[1])
    for place in range((len(order) + 1) // 2):
        yield order[place]
        if (other := len(order) - 1 - place) > place:
            yield order[other]


def _rows(shape: Shape, block_size: int) -> list[Row]:
    sequences, tokens, cached = shape
    blocks = -(-(tokens + cached) // block_size)
    tables = [range(number * blocks, (number + 1) * blocks) for number in range(sequences)]
    return [Row(ids=[0] * tokens, start=cached, table=table) for table in tables]


def _timed(runner: Steps, rows: list[Row], clock: Callable[[], float], device: torch.device | str) -> float:
    start = clock()
    runner.step(rows)
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - start
