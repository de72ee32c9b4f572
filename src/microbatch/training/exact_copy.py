"""One rank's part of a proof: pieces against the whole batch, on a copy of the model on the CPU in float64."""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD

from microbatch.batch.exactness import FLOOR, TOLERANCE, ExactnessReport, compare_gradients
from microbatch.batch.independence import check_independence
from microbatch.batch.oom import is_out_of_memory
from microbatch.batch.running import call, device_of
from microbatch.batch.subject import Subject, unwrapped
from microbatch.errors import MicrobatchError, NoAnswer
from microbatch.sizes import BatchSizes
from microbatch.training import gradients
from microbatch.training.memory.snapshot import Snapshot
from microbatch.training.normalise import Total, added_up, loss_of
from microbatch.training.ranks.distributed import is_empty
from microbatch.training.ranks.one_process import OneProcess
from microbatch.training.ranks.unsharded import unsharded

if TYPE_CHECKING:
    from microbatch.training.step import TrainStep

logger = logging.getLogger(__name__)

DTYPES = {"fp64": torch.float64, "fp32": torch.float32}

Gradients = dict[str, Tensor | None]
"""By name of the parameter."""


@dataclass(frozen=True, slots=True)
class Local:
    """What the copy on the CPU found of this rank's batch.

    Attributes:
        twin: the step on the copy, by itself and in the copy's dtype.
        subject: the copy.
        batch: the batch in the copy's dtype; None where the rank has none.
        report: the pieces against the whole batch.
        whole: gradients of the whole batch.
        totals: sum and weight of each term.
    """

    twin: TrainStep
    subject: Subject
    batch: Any
    report: ExactnessReport
    whole: Gradients
    totals: dict[str, Total]


def named(own: TrainStep) -> dict[str, nn.Parameter]:
    """What is trained, by its name in the model; by its place in the optimizer where it is not the model's."""
    names = {id(parameter): name for name, parameter in unwrapped(own.model).named_parameters()}
    return {names.get(id(p), f"optimizer[{place}]"): p for place, p in enumerate(own._trained())}


def named_gradients(own: TrainStep) -> Gradients:
    """Whole gradients on the CPU in float64, without the scale of a scaler."""
    scale = own.scaler.get_scale() if own.scaler is not None and own.scaler.is_enabled() else 1.0
    found: Gradients = {}
    for name, parameter in named(own).items():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        found[name] = None if gradient is None else gradient.detach().to("cpu", torch.float64, copy=True) / scale
    return found


def on_a_copy(own: TrainStep, batch: Any, sizes: BatchSizes) -> Local | None:
    """This rank's pieces, in the widest dtype that a copy of the model runs in; None where it runs in none."""
    plain = unsharded(own.model)
    for name, dtype in DTYPES.items():
        subject = Subject(plain, None, "as it is", dtype)
        twin = _twin(own, subject)
        if is_empty(batch):
            return Local(twin, subject, None, ExactnessReport(exact=True, largest_difference=None), {}, {})
        try:
            return _compared(twin, subject, subject.placed(batch), sizes, name)
        except MicrobatchError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise NoAnswer(f"The whole batch does not fit in memory in {name}.", "Check a smaller one.") from None
            logger.info("A copy of the model does not run in %s (%s: %s).", name, type(error).__name__, error)
    return None


def _twin(own: TrainStep, subject: Subject) -> TrainStep:
    twin = copy.copy(own)
    parameters = dict(subject.model.named_parameters())
    twin.model = subject.model
    twin.optimizer = SGD([parameters[name] for name in named(own) if name in parameters], lr=0.0)
    twin.autocast = twin.scaler = None
    twin._ranks = OneProcess()
    return twin


def _compared(twin: TrainStep, subject: Subject, batch: Any, sizes: BatchSizes, dtype: str) -> Local:
    """The pieces, through the step's own code, against one plain pass."""
    whole, totals = _whole(twin, subject, batch, None)
    twin.model = subject.fresh()
    with twin._whole.around(twin.model), subject.quietly():
        done = twin._gradients(batch, sizes, Snapshot.take(twin.model, device_of(twin.model)))
        twin._multiplied(done)
    pieces = named_gradients(twin)
    gradients.clear(twin._all_parameters())
    report = compare_gradients(
        whole, pieces, tolerance=TOLERANCE[dtype], batch_size=sizes.global_batch_size, pieces=sizes.pieces
    )
    report = _with_loss(replace(report, dtype=dtype), loss_of(totals), loss_of(done.totals))
    return Local(twin, subject, batch, report if report.exact else _blamed(twin, subject, batch, report), whole, totals)


def _whole(
    twin: TrainStep, subject: Subject, batch: Any, weights: dict[str, float] | None
) -> tuple[Gradients, dict[str, Total]]:
    """One forward and one backward over the whole batch: Σ_t S_t / W_t, with its own weights where none are given."""
    twin.model = subject.fresh()
    with twin._whole.around(twin.model), subject.quietly():
        pairs = twin._passes().pairs(batch)
        weighty = {name: pair for name, pair in pairs.items() if pair.weight}
        by = {name: pair.weight for name, pair in weighty.items()} if weights is None else weights
        terms = [pair.sum / by[name] for name, pair in weighty.items() if pair.sum.requires_grad]
        if terms:
            torch.stack(terms).sum().backward()
    found = named_gradients(twin)
    gradients.clear(twin._all_parameters())
    return found, {
        name: Total(float(pair.sum.detach()) if pair.weight else 0.0, pair.weight) for name, pair in pairs.items()
    }


def over_ranks(own: TrainStep, local: Local | None) -> Gradients | None:
    """Gradients of the whole batch of all ranks, in the copy's dtype; None where a rank has no copy that runs."""
    totals = {} if local is None else {name: [total.sum, total.weight] for name, total in local.totals.items()}
    said = own._ranks.share({"ran": local is not None, "totals": totals})
    if local is None or not all(one["ran"] for one in said):
        return None
    if own._ranks.alone:
        return local.whole
    weights = {name: total.weight for name, total in added_up(one["totals"] for one in said).items()}
    mine = {} if local.batch is None else _whole(local.twin, local.subject, local.batch, weights)[0]
    zeros = {name: torch.zeros_like(parameter, dtype=torch.float64) for name, parameter in named(local.twin).items()}
    return {name: own._ranks.add_up(zero if (g := mine.get(name)) is None else g) for name, zero in zeros.items()}


def _with_loss(report: ExactnessReport, whole: float, pieces: float) -> ExactnessReport:
    """The loss that is reported must not depend on the split either."""
    both_nan = math.isnan(whole) and math.isnan(pieces)
    apart = 0.0 if whole == pieces or both_nan else abs(whole - pieces) / max(abs(whole), FLOOR)
    apart = math.inf if math.isnan(apart) else apart
    largest = max(report.largest_difference or 0.0, apart)
    return replace(report, exact=report.exact and apart <= report.tolerance, largest_difference=largest)


def _blamed(twin: TrainStep, subject: Subject, batch: Any, report: ExactnessReport) -> ExactnessReport:
    """With the modules that mix rows as culprits, where they can be told; else the parameters that differ."""
    forward = twin.forward or (lambda model, piece: call(model, piece, list_of_samples=twin._list_of_samples))
    try:
        named = check_independence(subject.fresh(), batch, forward=forward, loss=twin.loss)
    except MicrobatchError:
        return report
    return replace(report, culprits=named.culprits or report.culprits, notes=(*report.notes, *named.notes))
