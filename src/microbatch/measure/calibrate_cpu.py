"""Constants of `microbatch.roofline.cpu` from small pieces of torch, in groups: each rests on those before it.

Products and convolutions are timed inside layers, since between other operators they find colder caches than in a
loop of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.nn import functional

from microbatch.errors import TooNoisy
from microbatch.hardware.constants import DEFAULTS
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.measure import probes
from microbatch.measure.calibration import fit_constants
from microbatch.measure.findings import Findings
from microbatch.measure.fresh_pages import measure_fresh_bandwidth
from microbatch.measure.host_work import Launch, find_launch, launch_calls
from microbatch.measure.load import CpuTimes, read_cpu_times, shares
from microbatch.measure.peaks import cache_bytes
from microbatch.measure.probes import Activated, FeedForward, Probe
from microbatch.measure.rounds import time_rounds
from microbatch.roofline.time import time_call
from microbatch.units import format_bytes

_LAYERS = ((1280, 1280), (320, 1280), (96, 384))
"""(width, hidden) of feed-forward layers: long and short rows for a memory that likes to stream, and small ones."""
_ACTIVATED = 1280
_ROWS = (1, 2, 4, 12, 48, 192)
_TOKENS = (96, 384, 1536)
"""Rows of a batch of sequences, for the small layers; with fewer, host work is all that they are."""
_SMALLEST_WEIGHTS = 48 << 20
_LARGEST_WEIGHTS = 512 << 20
_SMALL_LAYERS = 4
"""Of the small layers there are so few that the cache holds them, as it holds a small model."""
PASSES, ROUNDS = 5, 2
QUIET = 0.4
"""Cores that other processes may use during a pass, beyond those left free, before it is left out."""
WORST_FIT = 0.3
"""Median error of a fit from which on the times were disturbed, whatever the load says."""
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
        alone: the probes run one operator in a loop, where host work costs less than in a model.
    """

    names: tuple[str, ...]
    make: Callable[[], list[Probe]]
    share: float
    what: str
    alone: bool = False


def find_constants(found: Findings, device: torch.device, seconds: float) -> Iterator[tuple[float, str]]:
    """Adds ``launch_seconds`` and every constant of a CPU. Yields the share done and what comes next.

    Everything is timed in `PASSES` passes, so that all of it sees the same fast and slow minutes of the machine.
    """
    del device
    torch.empty(_LARGEST_BLOCK // 4).fill_(0.0)
    made = {group: group.make() for group in GROUPS}
    calls = [({**launch_calls()}, _LAUNCH_SHARE, "host work")]
    calls += [({p.name: p.call for p in made[group]}, group.share, group.what) for group in GROUPS]
    passes = []
    for number in range(PASSES):
        before, times = read_cpu_times(), dict[str, float]()
        for part, (timed, share, what) in enumerate(calls):
            yield (number + part / len(calls)) / PASSES, what
            times |= time_rounds(timed, seconds * share / PASSES, at_least=ROUNDS)
        passes.append((_busy_cores(before), times))
    times = _typical(passes)
    launch = find_launch(times)
    found.add("launch_seconds", launch.in_model, launch.how)
    _add_fresh(found)
    for group, probes_of in made.items():
        _fit_group(found, group, probes_of, [times[probe.name] for probe in probes_of], launch)


def _typical(passes: Sequence[tuple[float, dict[str, float]]]) -> dict[str, float]:
    """The median of each time over the passes in which others left the machine alone, or the quietest one."""
    quiet = [times for busy, times in passes if busy <= QUIET] or [min(passes, key=lambda one: one[0])[1]]
    return {name: median(times[name] for times in quiet) for name in quiet[0]}


def _add_fresh(found: Findings) -> None:
    fresh = measure_fresh_bandwidth(_LARGEST_BLOCK)
    how = f"filling a new mapping of {format_bytes(_LARGEST_BLOCK)} against filling it again"
    found.add("constants.fresh_bandwidth_share", fresh / found.values["bandwidth"], how)


def _fit_group(found: Findings, group: Group, made: Sequence[Probe], measured: Sequence[float], launch: Launch) -> None:
    def predict(constants: Mapping[str, float]) -> list[float]:
        spec = _so_far(found, constants, launch.alone if group.alone else None)
        return [time_call(probe.work, spec, batch=2).seconds for probe in made]

    start = {name: DEFAULTS["cpu"][name] for name in group.names}
    constants = fit_constants(start, predict, measured)
    error = float(np.median(np.abs(np.array(predict(constants)) / np.array(measured) - 1)))
    if error > WORST_FIT:
        raise TooNoisy(
            f"The times of {group.what} differ by {error:.0%} from what any constants predict.",
            "Something else ran meanwhile; measure again on a quiet machine.",
        )
    how = f"fitted to {len(made)} times of {group.what}, median error {error:.0%}"
    for name, value in constants.items():
        found.add(f"constants.{name}", value, how)
    _raise_peak(found)


def _busy_cores(before: CpuTimes) -> float:
    """Cores that other processes used since then, beyond those left free."""
    cores = psutil.cpu_count() or 1
    share = shares(before, read_cpu_times())[0] or 0.0
    return max(0.0, share * cores - max(0, cores - torch.get_num_threads()))


def _raise_peak(found: Findings) -> None:
    """Products in layers that ran faster than the square ones say what the peak is."""
    efficiency = found.values.get("constants.product_efficiency", 0.0)
    if efficiency > 1:
        found.add("flops.fp32", efficiency * found.values["flops.fp32"], "reached by Linear layers")
        found.values["constants.product_efficiency"] = 1.0


def _so_far(found: Findings, constants: Mapping[str, float], launch: float | None) -> DeviceSpec:
    """What is known, with constants to try."""
    return DeviceSpec(
        name="here",
        kind="cpu",
        flops=found.table("flops"),
        bandwidth=found.values["bandwidth"],
        launch_seconds=launch or found.values["launch_seconds"],
        cache_bytes=cache_bytes(),
        constants=found.table("constants") | dict(constants),
    )


def _layers() -> list[Probe]:
    found = []
    for width, hidden in _LAYERS[:2]:
        layers = [FeedForward(width, hidden) for _ in range(_count(2 * 4 * width * hidden))]
        found += [probes.feed_forward(layers, rows) for rows in _ROWS]
    plain = [Activated(_ACTIVATED) for _ in range(_count(4 * _ACTIVATED**2))]
    found += [probes.activated(plain, rows) for rows in _ROWS]
    small = [FeedForward(*_LAYERS[2]) for _ in range(_SMALL_LAYERS)]
    return found + [probes.feed_forward(small, rows) for rows in _TOKENS]


def _count(weight_bytes: int) -> int:
    """So many layers that the last-level cache holds none of them when its turn comes again."""
    room = psutil.virtual_memory().available // 8
    wanted = min(max(2 * (cache_bytes() or 0), _SMALLEST_WEIGHTS), _LARGEST_WEIGHTS, room)
    return max(1, wanted // weight_bytes)


def _passes() -> list[Probe]:
    return [probes.elementwise("relu", torch.relu, count) for count in (1 << 18, 1 << 19, 1 << 20)]


def _functions() -> list[Probe]:
    named: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
        ("gelu", functional.gelu), ("silu", functional.silu), ("_softmax", _softmax)
    )  # fmt: skip
    return [probes.elementwise(name, function, size) for name, function in named for size in (1 << 16, 1 << 19)]


def _softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def _convolutions() -> list[Probe]:
    shapes = ((8, 48, 2), (8, 48, 12), (24, 28, 2), (24, 28, 16), (96, 14, 2), (96, 14, 12), (192, 14, 4))
    return [probes.residual(*shape) for shape in shapes]


def _attentions() -> list[Probe]:
    return [probes.attention(*shape) for shape in ((2, 6, 256, 64), (8, 6, 64, 64), (16, 6, 48, 32))]


_LAUNCH_SHARE = 0.1
GROUPS = (
    Group(
        names=("cached_bandwidth_ratio",), make=_passes, share=0.08, alone=True,
        what="relu on tensors that fit into the caches",
    ),
    Group(names=("function_flops",), make=_functions, share=0.08, alone=True, what="gelu, silu and softmax"),
    Group(
        names=("product_efficiency", "weight_bandwidth_share", "weight_half_row_bytes", "vector_bandwidth_share",
               "vector_half_row_bytes"),
        make=_layers, share=0.5, what=f"feed-forward layers of 4 shapes at 1 to {_TOKENS[-1]} rows",
    ),
    Group(
        names=("convolution_efficiency", "convolution_half_channels"), make=_convolutions, share=0.16,
        what="residual layers of 8 to 192 channels",
    ),
    Group(
        names=("attention_efficiency",), make=_attentions, share=0.08, alone=True,
        what="fused attention over 48 to 256 tokens",
    ),
)  # fmt: skip
