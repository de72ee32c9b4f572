"""What a curve means, as plain data: the sizes to use and to avoid, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from microbatch.curves.beside import Beside
from microbatch.curves.micro_batches import MicroBatches, micro_batches_document
from microbatch.curves.profile import Profile
from microbatch.notebook import notebook_form


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """The size to use.

    Attributes:
        batch_size: the size; always one that was measured (or, in a prediction, computed).
        objective: throughput, balanced or latency.
        reason: one sentence.
        limited_by: target, memory, range, saturated, budget or none.
        measured: False in a prediction.
        seconds: time of one call.
        throughput: items per second.
        share_of_best: its throughput over the best measured throughput.
        confidence: high, medium or low.
    """

    batch_size: int
    objective: str
    reason: str
    limited_by: str
    measured: bool
    seconds: float
    throughput: float
    share_of_best: float
    confidence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """t(b) = (fixed_seconds^p + (seconds_per_item·b)^p)^(1/p): the shape without cliffs, at their middle height.

    Attributes:
        form: additive (p = 1), p-norm, flat or linear.
        p: exponent; 1 is no overlap of moving and computing, large p is perfect overlap.
        fixed_seconds: time that does not grow with the batch.
        seconds_per_item: marginal time of one item.
        rms: root mean square of log(measured/fitted), cliffs counted in.
    """

    form: str
    p: float
    fixed_seconds: float
    seconds_per_item: float
    rms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Ridge:
    """The batch where fixed and growing time are equal, with its 90 % bootstrap interval; None where there is none."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    predicted_weights: float | None = None
    predicted_with_activations: float | None = None
    overhead_bound: bool = False
    """More than 30 % of the fixed part is overhead: the knee says nothing about memory."""
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cliff:
    """A size where the time per item rises suddenly.

    Attributes:
        batch_size: first slow size measured.
        from_size: next smaller measured size; the edge lies in (from_size, batch_size].
        to_size: last size of the zone to avoid.
        ratio: t(batch_size) / t(from_size).
        excess: ratio of the times per item.
        excess_low, excess_high: its 90 % interval; None when each size has one time only.
        exact: False when the gap to from_size is above 15 %, so that the exact edge is unknown.
        cause: tile, wave, kernel_switch, cache, compute, overhead, allocator, padding or unknown.
        evidence: one sentence that shows the cause, or says what is missing to claim one.
        pad_to: the size to pad to, when that pays.
        proposed: sizes to measure to find the exact edge.
    """

    batch_size: int
    from_size: int
    to_size: int
    ratio: float
    excess: float
    excess_low: float | None = None
    excess_high: float | None = None
    exact: bool = True
    cause: str = "unknown"
    evidence: str = ""
    pad_to: int | None = None
    proposed: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Drop:
    """A size where the time falls although the batch grows, which proves that the library switched kernels."""

    batch_size: int
    from_size: int
    ratio: float
    cause: str
    evidence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Padding:
    """A size whose time shrinks by padding the batch to a larger one; `saves` is the share of its time."""

    batch_size: int
    pad_to: int
    saves: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Binding:
    """One size seen against the device.

    Attributes:
        seconds: median time of one call.
        low, high: 90 % interval of the median; None with one sample.
        fitted_seconds: the smooth fit at this size.
        compute_utilisation: achieved FLOP/s over the peak.
        bandwidth_utilisation: achieved byte/s over the bandwidth.
        overhead_share: share of the time in which no operator ran.
        bound: memory, compute, overhead or mixed; empty when the device's peaks are unknown.
    """

    batch_size: int
    seconds: float
    low: float | None
    high: float | None
    fitted_seconds: float | None = None
    compute_utilisation: float | None = None
    bandwidth_utilisation: float | None = None
    overhead_share: float | None = None
    bound: str = ""

    @property
    def throughput(self) -> float:
        """Items per second."""
        return self.batch_size / self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """A profile, and what it means."""

    profile: Profile
    recommended: Recommendation
    balanced: int | None
    b90: int | None
    latency_target: float | None
    largest_within_target: int | None
    largest_that_fits: int | None
    ridge: Ridge
    fit: Fit | None
    bound: str
    """What binds at the recommended size: memory, compute, overhead or mixed; empty when unknown."""
    cliffs: tuple[Cliff, ...]
    drops: tuple[Drop, ...]
    padding: tuple[Padding, ...]
    period: int | None
    noise: float | None
    """Spread of one sample around its size's time, as a share; None when each size has one time only."""
    points: tuple[Binding, ...]
    utilisation: str = ""
    """Why utilisation did or did not rise with the batch, in a few sentences."""
    warnings: tuple[str, ...] = field(default=())
    beside: Beside | None = None
    """A measurement of the same model laid beside a prediction."""
    micro_batches: MicroBatches | None = None
    """A global batch cut into pieces of each size, where one was given."""

    def point(self, batch_size: int) -> Binding:
        """The point at a measured size."""
        return next(point for point in self.points if point.batch_size == batch_size)

    def _repr_html_(self) -> str | None:
        return notebook_form(self)

    def to_json(self) -> dict[str, Any]:
        """The profile's own document with the explanation's keys added: it can be loaded as a profile again."""
        import msgspec  # only writing needs it

        document = self.profile.to_json()
        own: dict[str, Any] = msgspec.to_builtins(self)
        del own["profile"]
        raw = {point["batch_size"]: point for point in document["points"]}
        own["points"] = [raw[point["batch_size"]] | point for point in own["points"]]
        own |= micro_batches_document(self.micro_batches)
        own["cliffs"] = [_with_edges(cliff) for cliff in own["cliffs"]]
        own["warnings"] = list(dict.fromkeys([*document["warnings"], *self.warnings]))
        return document | own


def _with_edges(cliff: dict[str, Any]) -> dict[str, Any]:
    return {"from" if key == "from_size" else "to" if key == "to_size" else key: value for key, value in cliff.items()}
