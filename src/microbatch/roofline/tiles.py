"""Tiles and waves: why a matrix product's time jumps when one row is added. No torch.

A GPU cuts the output of a product (b×K)·(K×n) into tiles of t_m×t_n and gives each multiprocessor one tile at a time:

    tiles = ceil(b / t_m) · ceil(n / t_n)          waves = ceil(tiles / (multiprocessors · blocks per multiprocessor))

A wave costs the same whether it is full or holds one tile, so time rises in steps (NVIDIA, "Matrix Multiplication
Background User's Guide", sections on tile and wave quantization). Libraries choose among many kernels, so one tile
shape does not hold over a whole curve: the arithmetic here explains a measured jump, it does not predict a curve.
"""

from __future__ import annotations

from dataclasses import dataclass

from microbatch.hardware.device_spec import DeviceSpec

COMMON_TILES: tuple[tuple[int, int], ...] = tuple(
    (rows, columns)
    for rows in (256, 128, 64, 32)
    for columns in (256, 128, 64, 32)
    if 64 * 64 <= rows * columns <= 128 * 256
)
"""Output tiles (rows of the batch × columns of the weight) that GEMM libraries use for large products. A library may
compute the transposed product, so both orientations are listed."""

LARGE_TILES: tuple[tuple[int, int], ...] = ((64, 256), (128, 128), (128, 256), (256, 128))
"""The shapes whose steps are large enough to be worth two extra sizes in a sweep."""

_HIGHEST_EFFICIENCY = 1.03
"""Above the peak rate is impossible; 3 % for clocks above nominal and times rounded to a microsecond."""
_LOWEST_EFFICIENCY = 0.6
"""Below 60 % of the peak the time is set by something else than full waves of this tile. On A100 and H100 the best
large products reach 80 to 87 % (stas00/ml-engineering, MAMF table), and smaller tiles are slower."""
_SMALLEST_RISE = 0.45
"""Least measured rise over the time of the added waves: where moving the weights takes as long as one wave, about
half of the next wave hides behind it."""
_LARGEST_RISE = 1 / _LOWEST_EFFICIENCY


@dataclass(frozen=True, kw_only=True, slots=True)
class JumpExplanation:
    """The tile arithmetic that fits a measured jump.

    Attributes:
        kind: ``"wave"`` when the rise adds one wave, ``"tile"`` when a new row of tiles adds several or when the
            number of multiprocessors is unknown.
        edge: last batch size before the rise; the first slow one is ``edge + 1``.
        tile: rows of the batch × columns of the weight.
        tiles_before, tiles_after: output tiles on both sides of the edge.
        waves_before, waves_after: the same in waves; None when the number of multiprocessors is unknown.
        efficiency: share of the peak rate at which the waves run after the jump; None without a rate.
        alternatives: further shapes that fit the same jump.
        sentence: the evidence in words.
    """

    kind: str
    edge: int
    tile: tuple[int, int]
    tiles_before: int
    tiles_after: int
    waves_before: int | None
    waves_after: int | None
    efficiency: float | None
    alternatives: tuple[tuple[int, int], ...]
    sentence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Jump:
    """A measured rise of one product: times in seconds of one product, `rate` in FLOP/s."""

    before: int
    after: int
    k: int
    n: int
    seconds_before: float
    seconds_after: float
    multiprocessors: int | None
    rate: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fit:
    edge: int
    tile: tuple[int, int]
    tiles: tuple[int, int]
    waves: tuple[int, int] | None
    efficiency: float | None


def tiles(batch: int, n: int, tile_m: int, tile_n: int) -> int:
    """Output tiles of a (batch × K)·(K × n) product: ceil(batch/tile_m) · ceil(n/tile_n).

    >>> tiles(129, 22016, 128, 256)
    172
    """
    return _ceil(batch, tile_m) * _ceil(n, tile_n)


def waves(tiles: int, multiprocessors: int, blocks_per_multiprocessor: int = 1) -> int:
    """Rounds in which the tiles are worked off: ceil(tiles / (multiprocessors · blocks per multiprocessor)).

    >>> waves(172, 108)
    2
    """
    return _ceil(tiles, multiprocessors * blocks_per_multiprocessor)


def wave_seconds(tile: tuple[int, int], k: int, multiprocessors: int, rate: float) -> float:
    """Least time of one full wave: 2·t_m·t_n·K FLOPs on each multiprocessor, at `rate` FLOP/s for the whole device.

    >>> round(wave_seconds((128, 256), 4096, 108, 312e12) * 1e6)  # A100, bf16
    93
    """
    return 2 * tile[0] * tile[1] * k * multiprocessors / rate


def predicted_edges(spec: DeviceSpec, n: int, up_to: int, *, smallest_rise: float = 1.05) -> tuple[int, ...]:
    """Batch sizes e below `up_to` where e + 1 needs more waves than e by `smallest_rise` or more, for large tiles.

    A sweep that wants to see the steps measures e and e + 1. Empty for a device whose multiprocessors are unknown.
    """
    if spec.multiprocessors is None:
        return ()
    edges = set()
    for tile in LARGE_TILES:
        for edge in range(tile[0], up_to, tile[0]):
            before, after = _waves_around(edge, n, tile, spec.multiprocessors)
            if after / before >= smallest_rise:
                edges.add(edge)
    return tuple(sorted(edges))


def explain_jump(
    before: int,
    after: int,
    *,
    k: int,
    n: int,
    spec: DeviceSpec,
    seconds_before: float,
    seconds_after: float,
    dtype: str = "",
    gemms: float = 1.0,
) -> JumpExplanation | None:
    """The tile arithmetic behind a measured rise from batch `before` to batch `after`, or None.

    A tile shape counts only when all of this holds:
    - exactly one of its edges lies in [before, after), and the gap is at most a quarter of the tile's rows, so that
      an edge there is not chance (136 after 128 on a grid of 8 is the edge at 128);
    - the waves rise there, and their time at the peak rate is no longer than the times measured;
    - the waves after the jump run at 60 % of the peak rate or more;
    - the measured rise is 0.45 to 1.67 times that of the added waves.

    A rise of one wave goes before a rise of several, then the fewest waves and the squarest tile (a library prefers
    large and square tiles because they read their operands least often). Without `multiprocessors` only rows of
    tiles are compared.

    Args:
        before, after: neighbouring measured batch sizes.
        k, n: shape of the weight.
        spec: the device.
        seconds_before, seconds_after: time of one call at both sizes.
        dtype: dtype of the product; empty when unknown, then 16-bit values are assumed and the sentence says so.
        gemms: number of such products in one call, as flops / (2·b·k·n).
    """
    jump = _Jump(
        before=before,
        after=after,
        k=k,
        n=n,
        seconds_before=seconds_before / gemms,
        seconds_after=seconds_after / gemms,
        multiprocessors=spec.multiprocessors,
        rate=_rate(spec, dtype),
    )
    fits = sorted(filter(None, (_fit(jump, tile) for tile in COMMON_TILES)), key=_preference)
    return _explanation(jump, fits, dtype) if fits else None


def _rate(spec: DeviceSpec, dtype: str) -> float | None:
    names = (dtype,) if dtype else ("bf16", "fp16")
    return next((spec.flops[name] for name in names if name in spec.flops), None)


def _fit(jump: _Jump, tile: tuple[int, int]) -> _Fit | None:
    edge = _only_edge(jump, tile[0])
    if edge is None:
        return None
    counts = (tiles(jump.before, jump.n, *tile), tiles(jump.after, jump.n, *tile))
    if jump.multiprocessors is None:
        return _fit_rows(jump, tile, edge, counts)
    return _fit_waves(jump, tile, edge, counts)


def _only_edge(jump: _Jump, rows: int) -> int | None:
    """The one multiple of `rows` in [before, after); None when there is none or the gap is too wide to tell."""
    edge = (jump.after - 1) // rows * rows
    return edge if jump.before <= edge and edge > 0 and jump.after - jump.before <= max(1, rows // 4) else None


def _fit_waves(jump: _Jump, tile: tuple[int, int], edge: int, counts: tuple[int, int]) -> _Fit | None:
    assert jump.multiprocessors is not None
    if jump.rate is None:
        return None
    before, after = (waves(count, jump.multiprocessors) for count in counts)
    one = wave_seconds(tile, jump.k, jump.multiprocessors, jump.rate)
    efficiency = after * one / jump.seconds_after
    rise = (jump.seconds_after - jump.seconds_before) / (max(1, after - before) * one)
    possible = before * one <= _HIGHEST_EFFICIENCY * jump.seconds_before and efficiency <= _HIGHEST_EFFICIENCY
    if after > before and possible and efficiency >= _LOWEST_EFFICIENCY and _SMALLEST_RISE <= rise <= _LARGEST_RISE:
        return _Fit(edge=edge, tile=tile, tiles=counts, waves=(before, after), efficiency=efficiency)
    return None


def _fit_rows(jump: _Jump, tile: tuple[int, int], edge: int, counts: tuple[int, int]) -> _Fit | None:
    """Without multiprocessors: many waves, so that time follows the rows of tiles; 60 % to 110 % of their rise."""
    predicted = counts[1] / counts[0] - 1
    measured = jump.seconds_after / jump.seconds_before - 1
    efficiency = 2 * counts[1] * tile[0] * tile[1] * jump.k / jump.rate / jump.seconds_after if jump.rate else None
    if 0.6 * predicted <= measured <= 1.1 * predicted and (efficiency or 0) <= _HIGHEST_EFFICIENCY:
        return _Fit(edge=edge, tile=tile, tiles=counts, waves=None, efficiency=efficiency)
    return None


def _preference(fit: _Fit) -> tuple[int, int, float]:
    """One added wave first, then the fewest waves (without waves: tiles), then the squarest tile."""
    length = max(fit.tile) / min(fit.tile)
    if fit.waves is None:
        return 0, fit.tiles[1], length
    return int(fit.waves[1] - fit.waves[0] > 1), fit.waves[1], length


def _explanation(jump: _Jump, fits: list[_Fit], dtype: str) -> JumpExplanation:
    best = fits[0]
    is_wave = best.waves is not None and best.waves[1] - best.waves[0] == 1
    return JumpExplanation(
        kind="wave" if is_wave else "tile",
        edge=best.edge,
        tile=best.tile,
        tiles_before=best.tiles[0],
        tiles_after=best.tiles[1],
        waves_before=best.waves[0] if best.waves else None,
        waves_after=best.waves[1] if best.waves else None,
        efficiency=best.efficiency,
        alternatives=tuple(fit.tile for fit in fits[1:]),
        sentence=_sentence(jump, best, "" if dtype or jump.rate is None else ", taking 16-bit values"),
    )


def _sentence(jump: _Jump, fit: _Fit, assumption: str) -> str:
    shape = f"(tile {fit.tile[0]}x{fit.tile[1]}{assumption})"
    if fit.waves is None:
        row = _ordinal(_ceil(jump.after, fit.tile[0]))
        return f"{row} row of tiles: {fit.tiles[0]} -> {fit.tiles[1]} tiles {shape}."
    where = f"{fit.tiles[0]} -> {fit.tiles[1]} tiles on {jump.multiprocessors} SMs {shape}"
    if fit.waves[1] - fit.waves[0] == 1:
        return f"{_ordinal(fit.waves[1])} wave: {where}."
    return f"New row of tiles, {fit.waves[0]} -> {fit.waves[1]} waves: {where}."


def _ordinal(number: int) -> str:
    words = ("Zeroth", "First", "Second", "Third", "Fourth", "Fifth", "Sixth", "Seventh", "Eighth", "Ninth", "Tenth")
    if number < len(words):
        return words[number]
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def _waves_around(edge: int, n: int, tile: tuple[int, int], multiprocessors: int) -> tuple[int, int]:
    return waves(tiles(edge, n, *tile), multiprocessors), waves(tiles(edge + 1, n, *tile), multiprocessors)


def _ceil(whole: int, part: int) -> int:
    return -(-whole // part)
