"""When requests come: arrival times in seconds from the start, ascending, for simulations and for load."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from microbatch.errors import InvalidSettings

Times = NDArray[np.float64]


def poisson(rate: float, count: int, seed: int = 0) -> Times:
    """Independent requests, `rate` a second on average."""
    _check(rate, count)
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))


def uniform(rate: float, count: int, seed: int = 0) -> Times:  # noqa: ARG001 (one form for all)
    """One request every ``1 / rate`` seconds."""
    _check(rate, count)
    return np.arange(count) / rate


def bursts(rate: float, count: int, seed: int = 0, *, size: int = 16, gap: float = 1e-3) -> Times:
    """Bursts of `size` requests `gap` seconds apart; the bursts are independent, and all together come at `rate`."""
    _check(rate, count)
    number = -(-count // size)
    starts = np.repeat(poisson(rate / size, number, seed), size)
    return np.asarray(np.sort(starts + np.tile(np.arange(size) * gap, number))[:count])


def from_trace(path: str | Path) -> Times:
    """The first column of a CSV file: times in seconds, in any order; a header is left out. The first becomes 0.

    Raises:
        InvalidSettings: no such file, or what is in it is no time.
    """
    try:
        with open(path, encoding="utf-8") as file:
            cells = [row[0].strip() for row in csv.reader(file) if row and not row[0].startswith("#")]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"The trace {path} cannot be read: {error}.", "Give a CSV of seconds.") from None
    if cells and not _is_number(cells[0]):
        cells = cells[1:]
    if wrong := [cell for cell in cells if not _is_number(cell)]:
        raise InvalidSettings(f"{wrong[0]!r} in {path} is not a number of seconds.", "Give a CSV of seconds.")
    if not cells:
        raise InvalidSettings(f"The trace {path} holds no times.", "Give one time a line.")
    times = np.sort(np.array([float(cell) for cell in cells]))
    return np.asarray(times - times[0])


TRAFFIC: dict[str, Callable[..., Times]] = {"poisson": poisson, "uniform": uniform, "bursts": bursts}
"""By name: ``TRAFFIC[name](rate, count, seed)``."""


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _check(rate: float, count: int) -> None:
    if not (rate > 0 and math.isfinite(rate)) or count < 1:
        raise InvalidSettings(f"{count} requests at {rate} a second are no traffic.", "Both must be above zero.")
