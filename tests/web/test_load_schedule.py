"""When requests are due: rates, ends, warm-up, files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch.errors import InvalidSettings
from microbatch.serving.decisions.traffic import TRAFFIC
from microbatch.web.load.schedule import arrivals


@pytest.mark.parametrize("traffic", TRAFFIC)
@given(
    rate=st.floats(0.5, 3000.0), duration=st.floats(0.5, 20.0), warmup=st.floats(0.0, 3.0), seed=st.integers(0, 1000)
)
def test_a_duration_is_filled_at_the_rate(traffic: str, rate: float, duration: float, warmup: float, seed: int) -> None:
    try:
        times = arrivals(traffic, rate, duration=duration, warmup=warmup, seed=seed)
    except InvalidSettings:
        assert rate * duration < 200  # so few that none may be due
        return
    assert (np.diff(times) >= 0).all()
    assert -warmup - 1e-9 <= times[0] and 0 <= times[-1] < duration
    expected = rate * (warmup + duration)
    # Bursts of 16 vary 16 times as much as independent requests; six standard deviations.
    assert abs(len(times) - expected) <= 6 * (16 * expected) ** 0.5 + 32


@pytest.mark.parametrize("traffic", TRAFFIC)
@pytest.mark.parametrize("requests", [1, 7, 1000])
@pytest.mark.parametrize("warmup", [0.0, 0.5])
def test_a_number_of_requests_is_exact_after_the_warm_up(traffic: str, requests: int, warmup: float) -> None:
    times = arrivals(traffic, 200.0, requests=requests, warmup=warmup, seed=3)
    assert (times >= 0).sum() == requests
    assert (times < 0).any() == (warmup > 0)


def test_whichever_end_comes_first_counts() -> None:
    assert len(arrivals("uniform", 100.0, duration=1.0, requests=30)) == 30
    assert len(arrivals("uniform", 100.0, duration=0.2, requests=30)) == 20


def test_the_seed_decides() -> None:
    one, same, other = (arrivals("poisson", 50.0, duration=2.0, seed=seed) for seed in (1, 1, 2))
    assert one.tolist() == same.tolist() != other.tolist()


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text("seconds\n" + "\n".join(str(100 + 0.5 * k) for k in range(9)))
    return str(path)


def test_a_file_keeps_its_own_rate(trace: str) -> None:
    assert arrivals(trace, None).tolist() == [0.5 * k for k in range(9)]


def test_a_file_is_stretched_to_a_rate(trace: str) -> None:
    assert arrivals(trace, 4.0).tolist() == pytest.approx([0.25 * k for k in range(9)])


def test_a_files_first_seconds_can_be_warm_up(trace: str) -> None:
    assert arrivals(trace, None, warmup=1.0, requests=3).tolist() == [-1.0, -0.5, 0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("time\n1\ntwo\n", "'two'"),
        ("", "no times"),
        ("a,b\n", "no times"),
        ("1\nnan\n", "'nan'"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_a_file_with_something_else_is_one_clear_error(tmp_path: Path, content: str | bytes, said: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InvalidSettings, match=said):
        arrivals(str(path), None)


@pytest.mark.parametrize(
    ("traffic", "rate", "options", "said"),
    [
        ("poison", 5.0, {"duration": 1.0}, "neither a kind of traffic nor a file"),
        ("poisson", None, {"duration": 1.0}, "--rate"),
        ("uniform", 1e9, {"duration": 1e3}, "too many"),
        ("uniform", 0.1, {"duration": 1.0, "warmup": 1.0}, "nothing is due"),
    ],
)
def test_what_cannot_be_is_one_clear_error(
    traffic: str, rate: float | None, options: dict[str, float], said: str
) -> None:
    with pytest.raises(InvalidSettings, match=said):
        arrivals(traffic, rate, **options)  # type: ignore[arg-type]


def test_times_that_are_all_equal_have_no_rate(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("3\n3\n3\n")
    assert arrivals(str(path), None).tolist() == [0, 0, 0]
    with pytest.raises(InvalidSettings, match="no rate"):
        arrivals(str(path), 5.0)
