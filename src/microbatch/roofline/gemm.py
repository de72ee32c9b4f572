"""Seconds of one matrix product on a GPU: a choice among kernels, tiles in waves, split-K, and the traffic. No torch.

A kernel of tile t_m×t_n cuts the output of (m×k)·(k×n) into tiles, optionally the sum over k into s parts, and gives
them to the multiprocessors (SMs) in waves (NVIDIA, "Matrix Multiplication Background User's Guide"; split-K as in
CUTLASS, "Efficient GEMM"). With F the rate, S the SMs, e the efficiencies and c the bytes an SM gets from the cache:

    waves   = ceil( ceil(m/t_m)·ceil(n/t_n)·s / S )
    tile    = p-norm of  2·t_m·t_n·(k/s) / (F·e/S)  and  bytes·(t_m + t_n)·(k/s) / c   + the start and end of a tile
    product = start + p-norm of  waves·tile  and  bytes moved / (BW·e)                  + adding up the s parts

and of all kernels the fastest is taken, since a library chooses one that is close to it. Small tiles are slow because
they read their operands more often, few tiles because they leave SMs idle, one row more than a tile because of the new
row of tiles. Nothing but the shape, the dtype and the device enters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from microbatch.hardware.constants import constants_of
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.roofline.ridge import rate_of
from microbatch.units import DTYPE_BYTES

TILES: tuple[tuple[int, int], ...] = (
    (256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64),
    (32, 256), (32, 128), (128, 32), (32, 64), (16, 128), (16, 64),
)  # fmt: skip
"""Output tiles (rows × columns) of the kernels in GEMM libraries for 16-bit values."""

SPLITS = (2, 3, 4, 6, 8, 12, 16)
_SHORTEST_PART = 128
"""A library does not cut the sum over k into parts shorter than this."""
_MOST_WAVES_SPLIT = 2
"""It splits products of few tiles: up to two waves of parts."""
_STEP_BYTES = 128
"""The inner loop takes this many bytes of k at a time."""
_PART_BYTES = 8
"""Each element of a part is written and read once in fp32."""
_ROUNDING = 1e-6
"""A size that was scaled (split over devices, expected loads) may be a hair above a whole number."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """What the products of one dtype on one device are computed with.

    Attributes:
        rate: FLOP/s of all multiprocessors, at the efficiency that large tiles reach.
        bandwidth: byte/s of the main memory that large transfers reach.
        multiprocessors: their number; 0 where unknown, then tiles cost their share and there are no waves.
        cache_bandwidth: byte/s from the cache to all multiprocessors.
        element_bytes: of the operands.
        norm: p of the p-norm by which computing and moving overlap; 1 none, infinity perfectly.
        start: seconds before the first and after the last byte.
        tile_start: seconds to fill and empty the pipeline of one tile.
        split_start: seconds to start adding up the parts of a split sum.
    """

    rate: float
    bandwidth: float
    multiprocessors: int
    cache_bandwidth: float
    element_bytes: float
    norm: float
    start: float
    tile_start: float
    split_start: float


@dataclass(frozen=True, slots=True)
class GemmTime:
    """The fastest kernel's time, and which it was: see `operator_time.OperatorTime` for the parts."""

    seconds: float
    compute_seconds: float
    memory_seconds: float
    overhead_seconds: float
    tile: tuple[int, int]
    split: int
    tiles: float
    waves: float

    @property
    def evidence(self) -> str:
        """``86 tiles in 1 wave of 128x256``, with the parts of k where it is split."""
        split = f", k in {self.split} parts" if self.split > 1 else ""
        tiles, waves = math.ceil(self.tiles - _ROUNDING), math.ceil(self.waves - _ROUNDING)
        wave = "" if not self.waves else f" in {waves} wave{'s' if waves != 1 else ''}"
        return f"{tiles} tile{'s' if tiles != 1 else ''}{wave} of {self.tile[0]}x{self.tile[1]}{split}"


Rows = tuple[tuple[float, float], ...]
"""(rows of the product, how many such products): one pair for a batched product, several for uneven experts."""


def kernels_of(spec: DeviceSpec, dtype: str) -> Kernels:
    """The products of a dtype on a device.

    An SM's path from the cache does not depend on the dtype; it is given in 16-bit FLOPs per byte, since it grows from
    one generation to the next about as fast as the rate (see `flops_per_cache_byte` in `hardware.constants`).

    Raises:
        InvalidDevice: the device has no rate for that dtype.
    """
    c, rate = constants_of(spec), rate_of(spec, dtype)
    half = spec.flops.get("bf16") or spec.flops.get("fp16") or rate
    return Kernels(
        rate=rate * c["gemm_efficiency"],
        bandwidth=spec.bandwidth * c["bandwidth_efficiency"],
        multiprocessors=spec.multiprocessors or 0,
        cache_bandwidth=half / c["flops_per_cache_byte"],
        element_bytes=DTYPE_BYTES[dtype],
        norm=c["overlap_norm"],
        start=c["gemm_seconds"],
        tile_start=c["tile_seconds"],
        split_start=c["split_seconds"],
    )


def linear_seconds(spec: DeviceSpec, dtype: str, m: float, n: float, k: float) -> float:
    """Seconds of (m×k)·(k×n), operands and result moved once.

    Raises:
        InvalidDevice: the device has no rate for that dtype.
    """
    moved = DTYPE_BYTES[dtype] * (m * k + k * n + m * n)
    return gemm_time(kernels_of(spec, dtype), ((m, 1.0),), n, k, moved).seconds


@lru_cache(maxsize=65536)
def gemm_time(kernels: Kernels, rows: Rows, n: float, k: float, moved: float) -> GemmTime:
    """The fastest kernel for products of the same k×n with these rows, which move so many bytes in all."""
    memory = moved / kernels.bandwidth
    best = None
    for tile in TILES:
        across = ceil_of(n, tile[1])
        tiles = across * sum(ceil_of(m, tile[0]) * count for m, count in rows)
        for split in _splits(kernels, tiles, k):
            waves = _waves(kernels, tiles * split)
            compute = waves * _tile_seconds(kernels, tile, k / split)
            added = _adding_up(kernels, rows, n, split)
            seconds = kernels.start + p_norm(compute, memory, kernels.norm) + added
            if best is None or seconds < best[0]:
                best = seconds, compute, added, tile, split, tiles, waves
    assert best is not None
    seconds, compute, added, tile, split, tiles, waves = best
    return GemmTime(
        seconds=seconds, compute_seconds=compute, memory_seconds=memory, overhead_seconds=kernels.start + added,
        tile=tile, split=split, tiles=tiles, waves=waves if kernels.multiprocessors else 0.0,
    )  # fmt: skip


def _splits(kernels: Kernels, tiles: float, k: float) -> tuple[int, ...]:
    most = min(_MOST_WAVES_SPLIT * kernels.multiprocessors / max(tiles, 1.0), k / _SHORTEST_PART)
    return (1, *(split for split in SPLITS if split <= most))


def _waves(kernels: Kernels, tiles: float) -> float:
    """Whole waves; without a number of multiprocessors each tile takes its share of the device."""
    return ceil_of(tiles, kernels.multiprocessors) if kernels.multiprocessors else tiles


def _tile_seconds(kernels: Kernels, tile: tuple[int, int], k: float) -> float:
    parts, step = kernels.multiprocessors or 1, _STEP_BYTES / kernels.element_bytes
    k = ceil_of(k, step) * step
    computed = 2 * tile[0] * tile[1] * k * parts / kernels.rate
    fed = kernels.element_bytes * (tile[0] + tile[1]) * k * parts / kernels.cache_bandwidth
    start = kernels.tile_start if kernels.multiprocessors else 0.0
    return p_norm(computed, fed, kernels.norm) + start


def _adding_up(kernels: Kernels, rows: Rows, n: float, split: int) -> float:
    if split == 1:
        return 0.0
    elements = n * sum(m * count for m, count in rows)
    return kernels.split_start + split * _PART_BYTES * elements / kernels.cache_bandwidth


def p_norm(a: float, b: float, p: float) -> float:
    """(a^p + b^p)^(1/p), with the larger one taken out so that no power is lost to rounding."""
    low, high = (a, b) if a < b else (b, a)
    return high * (1 + (low / high) ** p) ** (1 / p) if low > 0 else high


def ceil_of(whole: float, part: float) -> int:
    """Parts that a size takes, at least one."""
    return max(1, math.ceil(whole / part - _ROUNDING))
