"""The only place that reads and writes quantities with units. Inside: seconds, bytes, FLOP/s, byte/s."""

from __future__ import annotations

import math
import re

from microbatch.errors import InvalidQuantity

DTYPE_BYTES: dict[str, float] = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "fp16": 2,
    "bf16": 2,
    "fp8": 1,
    "int8": 1,
    "int4": 0.5,
}
"""Bytes that one element takes in memory, by our spelling of the dtype (tf32 is stored as fp32)."""

_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_BYTES = {f"{prefix}b": float(factor) for prefix, factor in (_DECIMAL | _BINARY).items()}
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-zµμ]*)\s*", re.IGNORECASE)

_ROUNDS_UP = 0.9995
"""From here on three significant digits read 1 of the larger unit: 0.9996 s is ``1 s``, not ``1 000 ms``."""

THIN_SPACE = "\u202f"


def parse_seconds(text: str) -> float:
    """``"20ms"`` → 0.02. Units: ns, us (µs), ms, s, min, h. A bare number is refused: its unit would be a guess.

    Raises:
        InvalidQuantity: no number, no unit, an unknown unit, or a duration that is not above zero.
    """
    return _parse(text, _SECONDS, "duration", "50ms")


def parse_bytes(text: str) -> int:
    """``"80GB"`` → 80 000 000 000; ``"80GiB"`` → 85 899 345 920. Units: B, kB, MB, GB, TB, KiB, MiB, GiB, TiB.

    Raises:
        InvalidQuantity: no number, no unit, an unknown unit, or a size that is not above zero.
    """
    count = round(_parse(text, _BYTES, "size in bytes", "8GB"))
    if count < 1:
        raise InvalidQuantity(f"A size in bytes must be at least one byte, not {text!r}.", "Write it as in 8GB.")
    return count


def _parse(text: str, units: dict[str, float], kind: str, example: str) -> float:
    match = _NUMBER.fullmatch(text)
    factor = units.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise InvalidQuantity(f"{text!r} is not a {kind}.", f"Write a number and a unit, as in {example}.")
    value = float(match[1]) * factor
    if not (value > 0 and math.isfinite(value)):
        raise InvalidQuantity(f"A {kind} must be above zero, not {text!r}.", f"Write it as in {example}.")
    return value


def format_seconds(seconds: float) -> str:
    """0.0561 → ``56.1 ms``; three significant digits, the largest unit that keeps the number at 1 or more."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= factor * _ROUNDS_UP:
            return f"{format_number(seconds / factor)} {unit}"
    return f"{format_number(seconds / 1e-9)} ns"


def format_duration(seconds: float) -> str:
    """11 530 → ``3 h 12 min``: whole seconds, the two largest units."""
    left, parts = round(seconds), list[str]()
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
        elif parts:
            break
    return " ".join(parts[:2])


def format_bytes(count: float) -> str:
    """1 500 000 → ``1.5 MB`` (decimal units, as on a datasheet)."""
    return _scaled(count, "B")


def format_rate(per_second: float, unit: str) -> str:
    """(6.5e13, ``"FLOP"``) → ``65 TFLOP/s``."""
    return _scaled(per_second, f"{unit}/s")


def _scaled(value: float, unit: str) -> str:
    for prefix, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor * _ROUNDS_UP:
            return f"{format_number(value / factor)} {prefix}{unit}"
    return f"{format_number(value)} {unit}"


def format_number(value: float) -> str:
    """Three significant digits, groups of three set apart: 7020 → ``7 020``, 1.804 → ``1.8``, 56.12 → ``56.1``."""
    if value == 0 or not math.isfinite(value):
        return str(value) if value else "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{round(value, digits):,.{digits}f}".replace(",", THIN_SPACE)
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_percent(fraction: float) -> str:
    """0.0183 → ``1.8 %``; 0.41 → ``41 %``."""
    percent = 100 * fraction
    return f"{percent:.1f} %" if abs(percent) < 9.95 and round(percent, 1) != round(percent) else f"{percent:.0f} %"
