"""Quantities with units: what is read is what was meant, and what is printed can be read again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch.errors import InvalidQuantity
from microbatch.units import (
    THIN_SPACE,
    format_bytes,
    format_duration,
    format_number,
    format_percent,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_seconds,
)

ROUNDING = 0.00501
"""Three significant digits are at most half a unit of the third digit off: 0.5 % at 1.00."""


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("20ms", 0.02),
        ("20 ms", 0.02),
        ("1.5s", 1.5),
        (".5s", 0.5),
        ("60S", 60.0),
        ("2min", 120.0),
        ("1h", 3600.0),
        ("250us", 250e-6),
        ("250µs", 250e-6),
        ("250μs", 250e-6),
        ("3ns", 3e-9),
        ("1e-3s", 1e-3),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("80GB", 80 * 10**9),
        ("80GiB", 80 * 2**30),
        ("1B", 1),
        ("1.5 kB", 1500),
        ("2KiB", 2048),
        ("512mib", 512 * 2**20),
        ("2TB", 2 * 10**12),
        ("1e3MB", 10**9),
    ],
)
def test_sizes_in_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "ms", "20", "20 lightyears", "-1s", "0s", "1e999s", "nan s", "1,5s", "1 2s"])
def test_what_is_no_duration_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidQuantity, match="duration") as caught:
        parse_seconds(text)
    assert repr(text) in caught.value.message
    assert "50ms" in caught.value.remedy


@pytest.mark.parametrize("text", ["", "GB", "8", "8 blocks", "-1GB", "0B", "0.4B", "8Gbit"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidQuantity, match="size in bytes") as caught:
        parse_bytes(text)
    assert repr(text) in caught.value.message
    assert "8GB" in caught.value.remedy


@given(st.floats(1e-9, 900))
def test_a_printed_duration_reads_back_within_its_rounding(seconds: float) -> None:
    assert parse_seconds(format_seconds(seconds)) == pytest.approx(seconds, rel=ROUNDING)


@given(st.integers(1, 9 * 10**14))
def test_a_printed_size_reads_back_within_its_rounding(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=ROUNDING)


@given(st.floats(1e-9, 999.4) | st.floats(999.5, 999_400))
def test_no_unit_is_printed_with_a_thousand(value: float) -> None:
    assert THIN_SPACE not in format_seconds(min(value, 999.0))
    assert THIN_SPACE not in format_bytes(value)


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (format_seconds(0.0561), "56.1 ms"),
        (format_seconds(0.9996), "1 s"),
        (format_seconds(2e-9), "2 ns"),
        (format_seconds(93e-6), "93 µs"),
        (format_bytes(1_500_000), "1.5 MB"),
        (format_bytes(999_999), "1 MB"),
        (format_bytes(12), "12 B"),
        (format_rate(6.5e13, "FLOP"), "65 TFLOP/s"),
        (format_number(7020), f"7{THIN_SPACE}020"),
        (format_number(1.804), "1.8"),
        (format_number(56.12), "56.1"),
        (format_number(100), "100"),
        (format_number(0), "0"),
        (format_number(-2.5), "-2.5"),
        (format_number(math.inf), "inf"),
        (format_percent(0.0183), "1.8 %"),
        (format_percent(0.41), "41 %"),
        (format_percent(0.02), "2 %"),
        (format_percent(0.0996), "10 %"),
    ],
)
def test_printed_forms(printed: str, expected: str) -> None:
    assert printed == expected


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.4, "0 s"), (59, "59 s"), (60, "1 min"), (85, "1 min 25 s"), (3600, "1 h"), (3605, "1 h"),
     (11_520, "3 h 12 min"), (200_000, "2 d 7 h")],
)  # fmt: skip
def test_long_times(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
