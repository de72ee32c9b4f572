"""Constants of `microbatch.roofline.cpu` from single operators of torch, in groups: each rests on those before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.nn import functional

from microbatch.hardware.constants import DEFAULTS
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.measure import probes
from microbatch.measure.calibration import fit_constants
from microbatch.measure.findings import Findings
from microbatch.measure.fresh_pages import measure_fresh_bandwidth
from microbatch.measure.host_work import Launch, measure_launch
from microbatch.measure.peaks import cache_bytes
from microbatch.measure.probes import Probe
from microbatch.measure.rounds import time_rounds
from microbatch.roofline.cpu import time_operator
from microbatch.units import format_bytes

_LONG, _SHORT = (1536, 1024), (192, 1024)
"""(k, n) of weights whose rows are long and short for a memory that likes to stream."""
_ROWS = (1, 2, 4, 8, 32, 128, 384)
_SMALLEST_WEIGHTS = 48 << 20
_LARGEST_WEIGHTS = 512 << 20
_LARGEST_BLOCK = 24 << 20
"""A block that a model's activations stay below; freeing it once makes the C library keep blocks up to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Constants that one set of probes decides.

    Attributes:
        names: of the constants.
        make: the probes.
        share: of the time.
        what: the probes in words.
    """

    names: tuple[str, ...]
    make: Callable[[], list[Probe]]
    share: float
    what: str


def find_constants(found: Findings, device: torch.device, seconds: float) -> Iterator[tuple[float, str]]:
    """Adds ``launch_seconds`` and every constant of a CPU. Yields the share done and what comes next."""
    del device
    torch.empty(_LARGEST_BLOCK // 4).fill_(0.0)
    done = 0.0
    yield done, "host work"
    launch = measure_launch(seconds * _LAUNCH_SHARE)
    found.add("launch_seconds", launch.in_model, launch.how)
    fresh = measure_fresh_bandwidth(_LARGEST_BLOCK)
    how = f"filling a new mapping of {format_bytes(_LARGEST_BLOCK)} against filling it again"
    found.add("constants.fresh_bandwidth_share", fresh / found.values["bandwidth"], how)
    done += _LAUNCH_SHARE
    for group in GROUPS:
        yield done, group.what
        _measure_group(found, group, seconds * group.share, launch)
        done += group.share


def _measure_group(found: Findings, group: Group, seconds: float, launch: Launch) -> None:
    made = group.make()
    times = time_rounds({probe.name: probe.call for probe in made}, seconds)
    measured = [times[probe.name] / probe.runs for probe in made]

    _raise_peak(found, made, measured)

    def predict(constants: Mapping[str, float]) -> list[float]:
        spec = _so_far(found, constants, launch.alone)
        return [time_operator(probe.operator, spec, 1, 1).seconds for probe in made]

    constants = fit_constants({name: DEFAULTS["cpu"][name] for name in group.names}, predict, measured)
    errors = np.abs(np.array(predict(constants)) / np.array(measured) - 1)
    how = f"fitted to {len(made)} times of {group.what}, median error {np.median(errors):.0%}"
    for name, value in constants.items():
        found.add(f"constants.{name}", value, how)


def _raise_peak(found: Findings, made: Sequence[Probe], measured: Sequence[float]) -> None:
    """A product that ran faster than the square ones did says what the peak is; a convolution may take short cuts."""
    rates = [p.operator.flops(1) / t for p, t in zip(made, measured, strict=True) if p.operator.kind == "matmul"]
    if max(rates, default=0.0) > found.values["flops.fp32"]:
        found.add("flops.fp32", max(rates), "best of square matrix products and Linear layers")


def _so_far(found: Findings, constants: Mapping[str, float], launch: float) -> DeviceSpec:
    """What is known, for probes that run by themselves."""
    return DeviceSpec(
        name="here",
        kind="cpu",
        flops=found.table("flops"),
        bandwidth=found.values["bandwidth"],
        launch_seconds=launch,
        cache_bytes=cache_bytes(),
        constants=found.table("constants") | dict(constants),
    )


def _linears() -> list[Probe]:
    found = []
    for k, n in (_LONG, _SHORT):
        weights = _weights(k, n)
        found += [probes.linear(weights, rows) for rows in _ROWS]
    return found


def _weights(k: int, n: int) -> list[Tensor]:
    """So many that the last-level cache holds none of them when its turn comes again."""
    room = psutil.virtual_memory().available // 8
    wanted = min(max(2 * (cache_bytes() or 0), _SMALLEST_WEIGHTS), _LARGEST_WEIGHTS, room)
    return [torch.randn(n, k) for _ in range(max(1, wanted // (4 * n * k)))]


def _passes() -> list[Probe]:
    return [probes.elementwise("relu", torch.relu, count) for count in (1 << 16, 1 << 18, 1 << 20)]


def _functions() -> list[Probe]:
    named: dict[str, Callable[[Tensor], Tensor]] = {
        "gelu": functional.gelu,
        "silu": functional.silu,
        "_softmax": _softmax,
    }
    sizes = (1 << 16, 1 << 19)
    return [probes.elementwise(name, function, size) for name, function in named.items() for size in sizes]


def _softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def _convolutions() -> list[Probe]:
    shapes = ((8, 24, 24, 28, 3), (4, 96, 96, 28, 3), (8, 192, 192, 14, 3), (8, 192, 48, 28, 1), (16, 48, 48, 14, 3))
    return [probes.convolution(*shape) for shape in shapes]


def _attentions() -> list[Probe]:
    return [probes.attention(*shape) for shape in ((2, 6, 256, 64), (8, 6, 64, 64), (16, 6, 48, 32))]


_LAUNCH_SHARE = 0.15
GROUPS = (
    Group(
        names=("product_efficiency", "weight_bandwidth_share", "weight_half_row_bytes", "vector_bandwidth_share",
               "vector_half_row_bytes"),
        make=_linears, share=0.4, what="Linear layers over weights larger than the caches at 1 to 384 rows",
    ),
    Group(
        names=("cached_bandwidth_ratio",), make=_passes, share=0.1, what="relu on tensors that fit into the caches",
    ),
    Group(names=("function_flops",), make=_functions, share=0.1, what="gelu, silu and softmax"),
    Group(
        names=("convolution_efficiency", "convolution_half_channels"), make=_convolutions, share=0.15,
        what="convolutions of 24 to 192 channels",
    ),
    Group(names=("attention_efficiency",), make=_attentions, share=0.1, what="fused attention over 48 to 256 tokens"),
)  # fmt: skip
