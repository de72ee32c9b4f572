"""A prediction laid beside a measurement, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class BesidePoint:
    """One measured size.

    Attributes:
        measured, predicted: seconds of one call.
        error: predicted over measured, less 1: −0.1 is 10 % too fast.
        computed: the time model was asked for this very size; else the prediction is read between its neighbours.
    """

    batch_size: int
    measured: float
    predicted: float
    error: float
    computed: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """What differs between prediction and measurement.

    Attributes:
        model, device: what was measured, and where.
        median_error, p90_error: of the errors' sizes over all measured sizes.
        bias: median of the errors with their sign.
        points: one for each measured size that lies within the prediction's range.
        findings: sentences that name where the two differ, and which part of the model or machine it comes from.
    """

    model: str
    device: str
    median_error: float
    p90_error: float
    bias: float
    points: tuple[BesidePoint, ...]
    findings: tuple[str, ...] = ()
