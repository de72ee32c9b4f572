"""Proof that a step in pieces is the step of the whole batch: what `TrainStep.check` answers.

Twice, without chance (dropout put aside, as in `microbatch.batch.quiet`):

- In float64, on a copy of the model on the CPU: this rank's pieces, through the step's own code, against one plain
  pass. What differs by more than rounding is a model or a loss that mixes rows, and is named.
- In the working dtype, on the model itself, over all ranks: the step's gradients may be at most `FACTOR` times as far
  from those in float64 as the whole batch's own are. Splitting then costs no more than the dtype does.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from microbatch.batch.exactness import TOLERANCE, Culprit, ExactnessReport, compare_gradients
from microbatch.batch.oom import drop_frames, is_out_of_memory
from microbatch.batch.quiet import Quiet, seeded
from microbatch.batch.running import device_of
from microbatch.batch.subject import not_compiled
from microbatch.errors import InvalidBatch, NoAnswer
from microbatch.sizes import BatchSizes
from microbatch.training import gradients
from microbatch.training.exact_copy import Gradients, Local, named_gradients, on_a_copy, over_ranks
from microbatch.training.memory.snapshot import Snapshot

if TYPE_CHECKING:
    from microbatch.training.step import TrainStep

FACTOR = 4.0
"""How many times further from float64 the pieces may be than the whole batch is, in the working dtype."""

ROUNDING = {torch.float64: 1e-13}
"""What the pieces may be off in any case; four units in the last place of other dtypes."""

NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def prove(step: TrainStep, batch: Any) -> ExactnessReport:
    """See the module, and `TrainStep.check`."""
    own = copy.copy(step)  # what it learns of the batch is not the step's
    own._noise, own._whole = None, copy.copy(step._whole)
    sizes, in_one = _sizes(own, batch)
    with gradients_kept(own):
        whole = _of_the_step(own, batch, in_one)
        pieces = _of_the_step(own, batch, sizes)
        with own._ranks.together():
            local = on_a_copy(own, batch, sizes)
            exact = over_ranks(own, local)
            report = _inworking_dtype(own, whole, pieces, sizes) if exact is None else None
            return agreed(own, report or _judged(own, local, exact or {}, whole, pieces))


def _sizes(own: TrainStep, batch: Any) -> tuple[BatchSizes, BatchSizes]:
    """The step's own pieces, halves where it would run the batch whole; and the batch in one piece on every rank."""
    with own._ranks.together():
        items = own._size_of(batch)
        most = max(one["items"] for one in own._ranks.share({"items": items}))
    if most < 2:
        raise InvalidBatch("A batch of 1 item cannot be cut.", "Check a batch of 2 items or more.")
    given = own.micro_batch_size if isinstance(own.micro_batch_size, int) else None
    size = given or (own.choice.micro_batch_size if own.choice else most)
    size = size if size < most else -(-most // 2)
    if not items:  # a rank without data
        return BatchSizes(0, size, 0), BatchSizes(0, most, 0)
    return BatchSizes.of(global_batch_size=items, micro_batch_size=size), BatchSizes(items, most, 1)


@contextmanager
def gradients_kept(own: TrainStep) -> Iterator[None]:
    """What stands in ``.grad`` now stands there afterwards."""
    before = {parameter: parameter.grad for parameter in own._all_parameters()}
    try:
        yield
    finally:
        gradients.clear(before)
        for parameter, gradient in before.items():
            if gradient is not None and gradient.dtype != parameter.dtype:
                parameter.grad_dtype = gradient.dtype
            parameter.grad = gradient


def _of_the_step(own: TrainStep, batch: Any, sizes: BatchSizes) -> Gradients:
    """The step's gradients on the model itself, over all ranks; buffers and random state are put back."""
    start = Snapshot.take(own.model, device_of(own.model))
    try:
        with own._ranks.together(), own._whole.around(own.model), seeded(), not_compiled(), Quiet(wide=False):
            own._multiplied(own._gradients(batch, sizes, start))
        return named_gradients(own)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        drop_frames(error)
    finally:
        own._undo(start)
    raise NoAnswer(
        f"{max(sizes.num_micro_batches, 1)} pieces of {sizes.micro_batch_size} items do not fit in memory.",
        "The proof needs the whole batch in one pass: check a smaller batch, whose items behave alike.",
    )


def _inworking_dtype(own: TrainStep, whole: Gradients, pieces: Gradients, sizes: BatchSizes) -> ExactnessReport:
    """All that can be said where no copy runs."""
    name = NAMES[working_dtype(own)]
    note = "No copy of the model ran on the CPU: pieces and whole batch were compared in the working dtype only."
    report = compare_gradients(
        whole,
        pieces,
        tolerance=TOLERANCE[name],
        batch_size=sizes.global_batch_size,
        pieces=sizes.pieces,
        notes=(note,),
    )
    return replace(report, dtype=name)


def _judged(
    own: TrainStep, local: Local | None, exact: Gradients, whole: Gradients, pieces: Gradients
) -> ExactnessReport:
    """The copy's report, and whether the step itself is as near to the truth as the whole batch is."""
    assert local is not None
    report, dtype = local.report, working_dtype(own)
    errors = [
        compare_gradients(exact, {name: some[name] for name in exact}).largest_difference or 0.0
        for some in (whole, pieces)
    ]
    note = (
        f"In {NAMES[dtype]} the step's gradients are {errors[1]:.2g} off {report.dtype}'s, "
        f"the whole batch's own {errors[0]:.2g}."
    )
    report = replace(report, notes=(*report.notes, note))
    if errors[1] <= max(FACTOR * errors[0], ROUNDING.get(dtype, 4 * torch.finfo(dtype).eps)) or not report.exact:
        return report
    worst = max(exact, key=lambda name: _distance(exact[name], pieces[name]))
    culprit = Culprit(
        module=worst.rpartition(".")[0] or worst,
        kind="gradient",
        difference=errors[1],
        remedy="Look for state that the model keeps between calls, or for sums in a dtype narrower than the loss's.",
        evidence=f"exact in {report.dtype}, but in {NAMES[dtype]} {worst} is further off than in one pass",
        mode="training",
    )
    return replace(report, exact=False, largest_difference=errors[1], culprits=(culprit,))


def working_dtype(own: TrainStep) -> torch.dtype:
    """The narrowest that takes part."""
    kinds = {parameter.dtype for parameter in own._trained() if parameter.is_floating_point()}
    kinds |= {own.autocast} if own.autocast else set()
    return max(kinds & NAMES.keys(), key=lambda kind: torch.finfo(kind).eps, default=torch.float32)


def _distance(one: Tensor | None, other: Tensor | None) -> float:
    tensors = [tensor for tensor in (one, other) if tensor is not None]
    if len(tensors) < 2:
        return max((float(tensor.abs().max()) for tensor in tensors), default=0.0)
    return float((tensors[0] - tensors[1]).abs().nan_to_num(nan=math.inf).max())


def agreed(own: TrainStep, report: ExactnessReport) -> ExactnessReport:
    """The same report on every rank: exact where all are, with the culprits of all."""
    said = own._ranks.share(
        {
            "exact": report.exact,
            "difference": report.largest_difference,
            "culprits": [[getattr(culprit, name) for name in Culprit.__slots__] for culprit in report.culprits],
            "notes": list(report.notes),
        }
    )
    culprits = {
        tuple(values[:2]): Culprit(**dict(zip(Culprit.__slots__, values))) for one in said for values in one["culprits"]
    }
    known = [one["difference"] for one in said if one["difference"] is not None]
    return replace(
        report,
        exact=all(one["exact"] for one in said),
        largest_difference=max(known, default=None),
        culprits=tuple(culprits.values()),
        notes=tuple(dict.fromkeys(note for one in said for note in one["notes"])),
        modes=("training",),
    )
