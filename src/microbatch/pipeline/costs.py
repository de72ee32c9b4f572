"""What actions, messages and the end of a step cost: numbers per stage, a CSV, or profiles of the stages."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from microbatch.curves.profile import Profile
from microbatch.errors import InvalidCosts
from microbatch.pipeline.schedule import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Schedule

Floats = NDArray[np.float64]

PER_STAGE = ("forward", "input_gradient", "weight_gradient", "full_backward", "optimizer", "reduction",
             "activation_bytes", "weight_bytes")  # fmt: skip
"""Columns that a CSV of costs may have, beside ``stage`` and ``message``."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds and bytes. Each is one number for all stages or one per stage, in the order of the model; the times of
    F, I, W and B may also have one number per stage and micro-batch.

    Attributes:
        forward: F.
        input_gradient: I.
        weight_gradient: W.
        full_backward: B where both gradients are made in one; I + W unless given.
        pair: time of a forward and a backward that run as one, over the sum of the two.
        pairs_apart: run them one behind the other, each with messages of its own.
        message: travel time over the link behind each stage; the last entry may be left out. Nothing is sent between
            stages of one rank.
        per_message: time of their own that a message costs the rank that sends it and the rank that gets it.
        overlap: whether ranks compute while their messages travel.
        optimizer: update of each stage's weights.
        global_clip: all ranks wait for each other before their updates, as the norm of all gradients asks.
        reduction: data-parallel reduction of each stage's gradients, from its last weight gradient on.
        activation_bytes: what a forward keeps of one micro-batch until its weight gradient is done.
        weight_bytes: weights, gradients and optimizer state, always there.
    """

    forward: ArrayLike = 1.0
    input_gradient: ArrayLike = 1.0
    weight_gradient: ArrayLike = 1.0
    full_backward: ArrayLike | None = None
    pair: float = 1.0
    pairs_apart: bool = False
    message: ArrayLike = 0.0
    per_message: float = 0.0
    overlap: bool = True
    optimizer: ArrayLike = 0.0
    global_clip: bool = False
    reduction: ArrayLike = 0.0
    activation_bytes: ArrayLike | None = None
    weight_bytes: ArrayLike = 0.0

    def times(self, kind: int, schedule: Schedule) -> Floats:
        """Seconds of an action by stage and micro-batch; the one place where an action's cost is known."""
        shape = schedule.stages, schedule.num_micro_batches
        if kind == BACKWARD and self.full_backward is None:
            return self.times(INPUT_GRADIENT, schedule) + self.times(WEIGHT_GRADIENT, schedule)
        name = {FORWARD: "forward", INPUT_GRADIENT: "input_gradient", WEIGHT_GRADIENT: "weight_gradient",
                BACKWARD: "full_backward"}[kind]  # fmt: skip
        return _spread(name, getattr(self, name), shape)

    def per_stage(self, name: str, stages: int) -> Floats:
        """One of the figures that do not depend on the micro-batch, for each stage."""
        return _spread(name, getattr(self, name), (stages, 1))[:, 0]

    def links(self, stages: int) -> Floats:
        """Travel time over the link behind each stage but the last."""
        values = np.asarray(self.message, dtype=float)
        if values.ndim == 1 and len(values) == stages - 1:
            return _checked("message", values)
        return _spread("message", values, (stages, 1))[:-1, 0]

    def scaled(self, stage: int, factor: float, schedule: Schedule) -> Costs:
        """The same with all actions of a stage longer or shorter."""
        changed: dict[str, Any] = {}
        for name, kind in (("forward", FORWARD), ("input_gradient", INPUT_GRADIENT),
                           ("weight_gradient", WEIGHT_GRADIENT), ("full_backward", BACKWARD)):  # fmt: skip
            if getattr(self, name) is not None:
                times = self.times(kind, schedule).copy()
                times[stage] *= factor
                changed[name] = times
        return replace(self, **changed)

    def with_link(self, link: int, factor: float, stages: int) -> Costs:
        """The same with the link behind a stage faster or slower."""
        links = self.links(stages).copy()
        links[link] *= factor
        return replace(self, message=links)


def _spread(name: str, value: ArrayLike, shape: tuple[int, int]) -> Floats:
    """A number, one per stage, or one per stage and micro-batch, as a table of the shape."""
    given = _checked(name, np.asarray(value, dtype=float))
    if given.ndim == 1 and len(given) == shape[0]:
        given = given[:, None]
    if given.ndim > 2 or (given.ndim == 1) or (given.ndim == 2 and given.shape[0] != shape[0]):
        raise InvalidCosts(
            f"{name} has {len(given)} values, and the schedule has {shape[0]} stages.",
            f"Give one number, or {shape[0]}.",
        )
    if given.ndim == 2 and given.shape[1] not in (1, shape[1]):
        raise InvalidCosts(
            f"{name} has {given.shape[1]} values for each stage, and there are {shape[1]} micro-batches.",
            f"Give one number for each stage, or {shape[1]}.",
        )
    return np.broadcast_to(given, shape)


def _checked(name: str, values: Floats) -> Floats:
    if not np.all(np.isfinite(values)) or np.any(values < 0):
        raise InvalidCosts(f"{name} must hold numbers of 0 or more, not {values.tolist()}.", "Correct them.")
    return values


def costs_from_csv(path: str | Path) -> Costs:
    """Costs from a CSV with a row per stage, in the order of the model.

    Columns: ``forward``, and any of `PER_STAGE` and ``message``; others are refused. ``stage`` may number the rows, and
    ``per_message`` stands the same in all.

    Raises:
        InvalidCosts: not such a file.
    """
    source = Path(path)
    if not source.is_file():
        raise InvalidCosts(f"There is no file {source}.", "Give a CSV with a row per stage and a column forward.")
    rows = [row for row in csv.reader(source.read_text(encoding="utf-8-sig").splitlines()) if any(row)]
    header = [name.strip().lower() for name in rows[0]] if rows else []
    unknown = [name for name in header if name not in (*PER_STAGE, "message", "per_message", "stage")]
    if unknown or "forward" not in header or len(rows) < 2:
        raise InvalidCosts(
            f"{source} has the columns {', '.join(header) or 'of no header'} and {max(len(rows) - 1, 0)} rows.",
            f"Columns are stage, message, per_message, {', '.join(PER_STAGE)}; forward is needed, and a row per stage.",
        )
    columns: dict[str, Any] = {
        name: [_number(source, line, row, column) for line, row in enumerate(rows[1:], 2)]
        for column, name in enumerate(header)
        if name != "stage"
    }
    if "per_message" in columns:
        columns["per_message"] = max(columns["per_message"])
    return Costs(**columns)


def _number(source: Path, line: int, row: list[str], column: int) -> float:
    text = row[column].strip() if column < len(row) else ""
    try:
        return float(text)
    except ValueError:
        raise InvalidCosts(f"{source} line {line}: {text!r} is not a number.", "Write seconds, as in 0.012.") from None


def costs_from_profiles(
    forward: Sequence[Profile], training: Sequence[Profile], micro_batch_size: int, **more: Any
) -> Costs:
    """Costs from profiles of the stages, measured or predicted, at one micro-batch size.

    The backward is what a training step takes beyond its forward; it is shared out between I and W evenly, as for
    products whose two gradients cost the same, so only schedules with full backwards are exact.

    Args:
        forward: one per stage, mode inference.
        training: one per stage, mode training, without an optimizer or with it taken off by ``more``.
        micro_batch_size: items of a micro-batch; a size between two measured ones is read off in between.
        more: other fields of `Costs`.
    """
    ahead = np.asarray([seconds_at(profile, micro_batch_size) for profile in forward])
    step = np.asarray([seconds_at(profile, micro_batch_size) for profile in training])
    half = np.maximum(step - ahead, 0.0) / 2
    return Costs(forward=ahead, input_gradient=half, weight_gradient=half, **more)


def seconds_at(profile: Profile, batch_size: int) -> float:
    """The median time of a batch size, read off between its neighbours where it was not measured.

    Raises:
        InvalidCosts: outside the sizes of the profile.
    """
    sizes = np.asarray(profile.batch_sizes, dtype=float)
    if not sizes.min() <= batch_size <= sizes.max():
        raise InvalidCosts(
            f"The profile of {profile.model or 'a stage'} covers batch {sizes.min():.0f} to {sizes.max():.0f}, "
            f"not {batch_size}.",
            "Measure it at that size.",
        )
    order = np.argsort(sizes)
    medians = np.asarray([float(np.median(point.samples)) for point in profile.points])
    return float(np.interp(batch_size, sizes[order], medians[order]))
