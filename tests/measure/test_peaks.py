"""Rates that this machine reaches, with small budgets and planted times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from microbatch.measure import peaks
from microbatch.measure.peaks import cache_bytes, measure_peaks
from microbatch.measure.timer import time_call

pytestmark = pytest.mark.alone


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing measured before, and weights small enough for a test."""
    monkeypatch.setattr(peaks, "_measured", {})
    monkeypatch.setattr(peaks, "_LARGEST_WEIGHTS", 8 << 20)


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls take planted times: 1e9 FLOP/s, 2e9 up to the size of 512; 4e9 byte/s, the sum half of that."""
    seen: list[str] = []

    def fastest(call: Callable[[], object], device: object, end: float, *, at_least: int) -> float:
        result = call()
        assert isinstance(result, torch.Tensor)
        if result.dim() == 2 and result.shape[0] == result.shape[1]:
            seen.append("product")
            return 2.0 * result.shape[0] ** 3 / (2e9 if result.shape[0] <= 512 else 1e9)
        seen.append("stream")
        weights = result.shape[-1] * 4096 * 4 if result.dim() else 8 << 20
        return weights / (4e9 if result.dim() else 2e9)

    monkeypatch.setattr(peaks, "_fastest", fastest)
    return seen


def test_the_best_of_all_sizes_and_kinds_counts(rates: list[str]) -> None:
    found = measure_peaks("fp32", seconds=40.0)
    assert found.flops == pytest.approx(2e9)
    assert found.bandwidth == pytest.approx(4e9)
    assert found.source == "measured here"
    assert found.multiprocessors is None


def test_a_size_that_would_eat_the_budget_is_left_out(rates: list[str]) -> None:
    measure_peaks("fp32", seconds=0.5)  # 512 takes 0.13 s at 2e9 FLOP/s, more than an eighth of 0.25 s
    assert rates.count("product") == 2 * 1 + 1


def test_the_answer_is_kept_by_dtype_and_threads(rates: list[str]) -> None:
    first = measure_peaks("fp32", seconds=0.1)
    count = len(rates)
    assert measure_peaks("fp32", seconds=9.0) is first
    assert len(rates) == count
    measure_peaks("fp64", seconds=0.1)
    assert len(rates) > count


def test_a_real_layer_does_not_pass_the_roof() -> None:
    found = measure_peaks("fp32", seconds=0.1)
    assert found.flops is not None and found.bandwidth is not None
    layer, rows = nn.Linear(512, 512), torch.ones(64, 512)
    with torch.no_grad():
        seconds = min(time_call(lambda: layer(rows)) for _ in range(5))
    assert 2 * 64 * 512 * 512 / seconds < 1.5 * found.flops
    assert 1e8 < found.bandwidth < 1e13


def test_the_last_level_counts(tmp_path: Path) -> None:
    for index, (level, size) in enumerate([("1", "32K"), ("1", "48K"), ("2", "2048K"), ("3", "32M")]):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "level").write_text(f"{level}\n")
        (folder / "size").write_text(f"{size}\n")
    assert cache_bytes(folder=tmp_path) == 32 << 20


def test_a_system_without_caches_in_sight_gives_none(tmp_path: Path) -> None:
    assert cache_bytes(folder=tmp_path / "missing") is None
