"""A measured curve as plain data, with every raw sample, and its saved form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from microbatch.curves.prediction import Prediction, SurfacePoint

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """What was measured at one batch size. Times in seconds per call, memory in bytes; None where not measured."""

    batch_size: int
    samples: tuple[float, ...]
    """Every timed call, in the order in which it ran."""
    rounds: tuple[int, ...] = ()
    """The interleaved round of each sample; empty when unknown (a CSV measured by someone else)."""
    times: tuple[float, ...] = ()
    """When each sample was taken, in seconds since the start; empty when unknown."""
    update_samples: tuple[float, ...] = ()
    """Of each sample of a training step, the seconds in which the optimizer updated; empty when not timed apart."""
    first_call_seconds: float | None = None
    """The first call at this shape: kernel selection, allocation, compilation."""
    flops: float | None = None
    """Floating-point operations of one call, counted from the operators."""
    moved_bytes: float | None = None
    """Bytes that one call must move if every operator reads its inputs and writes its outputs once."""
    overhead_seconds: float | None = None
    """Time of one call in which no operator ran (on a GPU: no kernel)."""
    peak_bytes: int | None = None
    """Most bytes alive at once while this size ran: tensors on a CPU, the allocator's peak on a GPU."""
    predicted_peak_bytes: int | None = None
    """The same, predicted before it ran."""
    beside_gradients_bytes: int | None = None
    """The same, predicted for a piece that runs after others of its training step, whose gradients stand."""
    page_faults: float | None = None
    """Minor page faults of one call."""
    allocator_retries: int | None = None
    """Times the GPU allocator freed its cache and tried again."""
    kernels: tuple[str, ...] = ()
    """Kernels or implementations seen at this size, the most expensive first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One module of the model. Shares and seconds hold at each of `Profile.layer_batch_sizes`."""

    name: str
    kind: str
    """The class of the module, as in ``Linear``."""
    parameter_bytes: int
    flops_per_item: float
    activation_bytes_per_item: float
    seconds: tuple[float, ...] = ()
    """Time of one call, one value per `Profile.layer_batch_sizes`; of all `repeat` layers together."""
    repeat: int = 1
    """Identical layers that stand behind this row: a prediction names the first of them only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """What the device can do at most, to hold a result against.

    Attributes:
        flops: FLOP/s for the dtype of the run.
        bandwidth: byte/s from main memory.
        source: ``"measured here"`` or the source of the datasheet figures.
        cache_bytes: last-level cache.
        multiprocessors: on a GPU.
    """

    flops: float | None = None
    bandwidth: float | None = None
    source: str = ""
    cache_bytes: int | None = None
    multiprocessors: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCurve:
    """Memory as fixed part and slope, and the largest batch that it allows.

    Attributes:
        fixed_bytes: weights, gradients, optimizer state and buffers.
        bytes_per_item: growth of the peak with one more item.
        limit_bytes: the budget that the run was held to.
        limit_source: where the budget comes from, as in ``"cgroup limit"``.
        margin: share of the limit that is kept free.
        predicted_largest: the largest batch that the curve allows within the limit less its margin.
        largest_that_fits: the largest batch within memory, only when memory was what ended the search and
            that size was itself run.
        parts: bytes by what they hold, as in ``{"weights": 37748736, "optimizer": 75497472}``.
    """

    fixed_bytes: int
    bytes_per_item: float
    limit_bytes: int
    limit_source: str
    margin: float
    predicted_largest: int | None = None
    largest_that_fits: int | None = None
    parts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLoad:
    """How one mixture-of-experts layer spread one batch over its experts.

    Attributes:
        layer: name of the module.
        batch_size: items in the batch.
        tokens: tokens routed in the layer.
        tokens_per_expert: one count per expert.
        dropped: assignments dropped because an expert was full.
        seconds: time of the layer with this routing; None when not timed.
        even_seconds: time of the layer with the same tokens spread evenly; None when not timed.
    """

    layer: str
    batch_size: int
    tokens: int
    tokens_per_expert: tuple[int, ...]
    dropped: int = 0
    seconds: float | None = None
    even_seconds: float | None = None

    @property
    def load_factor(self) -> float:
        """The busiest expert's tokens over the mean; 1 is even."""
        total = sum(self.tokens_per_expert)
        return max(self.tokens_per_expert) * len(self.tokens_per_expert) / total if total else 1.0

    @property
    def distinct_experts(self) -> int:
        """Experts that got at least one token, whose weights therefore had to be read."""
        return sum(count > 0 for count in self.tokens_per_expert)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A batch size that did not run: ``kind`` is ``out_of_memory``, ``over_budget`` or ``error``."""

    batch_size: int
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The machine as it was during the run. None where the machine does not tell."""

    device: str = ""
    """Name of the processor or accelerator that did the work."""
    threads: int | None = None
    cores: int | None = None
    memory_bytes: int | None = None
    load_before: float | None = None
    """Runnable processes over one minute, before the run started."""
    load_after: float | None = None
    busy_elsewhere: float | None = None
    """Share of the machine's CPU time that other processes used during the run."""
    steal: float | None = None
    """Share of the machine's CPU time that the hypervisor gave to other machines during the run."""
    clock_hz: tuple[float, ...] = ()
    """Clock before, at times during, and after the run."""
    throttled: bool | None = None
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    """Switches that change speed, as in ``{"torch.compile": "off", "MKL": "2024.2"}``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Times and memory of one model by batch size, on one device, with every raw sample.

    Write it with ``microbatch.save(profile, "profile.json")``; every function that takes a profile takes that path.
    """

    points: tuple[Point, ...]
    schema_version: int = SCHEMA_VERSION
    model: str = ""
    mode: str = "inference"
    """inference, training, prefill or decode."""
    sequence: int | None = None
    """Tokens of each item; in decode mode those that its cache holds. None for a model without a sequence."""
    dtype: str = ""
    unit: str = "rows"
    """What one item of the batch is called: rows, images, sequences, tokens."""
    source: str = "measured"
    """measured, predicted or csv."""
    structure: str = ""
    """Fingerprint of the model's modules and shapes, to tell whether a profile belongs to a model."""
    peaks: Peaks = field(default_factory=Peaks)
    memory: MemoryCurve | None = None
    layers: tuple[Layer, ...] = ()
    layer_batch_sizes: tuple[int, ...] = ()
    routing: tuple[ExpertLoad, ...] = ()
    failures: tuple[Failure, ...] = ()
    uncounted: tuple[str, ...] = ()
    """Operators whose FLOPs could not be counted; utilisation is then a lower bound."""
    weight_bytes: int | None = None
    compile_count: int | None = None
    compile_seconds: float | None = None
    adding_samples: tuple[float, ...] = ()
    """Seconds in which one more piece's gradients are added to those of the pieces before it; empty when unknown."""
    timed_rows: int = 0
    """Items in all timed calls together: the price of the measurement."""
    wall_seconds: float | None = None
    stopped_by: str = ""
    """What ended the search for larger sizes: saturated, memory, budget, limit or error."""
    environment: Environment = field(default_factory=Environment)
    warnings: tuple[str, ...] = ()
    prediction: Prediction | None = None
    """What the curve was computed for; None for a measured one."""
    surface: tuple[SurfacePoint, ...] = ()
    """Predicted throughput by sequence length and batch size, where it was asked for."""

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        return tuple(point.batch_size for point in self.points)

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers; `microbatch.curves.codec.load_profile` reads them back without loss."""
        import msgspec  # only writing needs it: measuring works with torch and numpy alone

        result: dict[str, Any] = msgspec.to_builtins(self)
        return result
