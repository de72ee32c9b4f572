"""The whole measurement on real models: small budgets, one thread, nothing about speed asserted."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from microbatch.curves.codec import dump_profile, load_profile
from microbatch.curves.profile import Peaks
from microbatch.errors import ImplausibleResult, InvalidModel, InvalidSettings, ModelFailed
from microbatch.profiling import sweep
from microbatch.profiling.sweep import profile

pytestmark = pytest.mark.alone


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))


class Sleeper(nn.Module):
    """A linear layer with a planted overhead in front."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(64, 64), seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        out: Tensor = self.linear(x)
        return out


class Wide(nn.Module):
    """Takes memory that grows with the batch, and a time that does not."""

    def __init__(self, values_per_item: int) -> None:
        super().__init__()
        self.values_per_item = values_per_item

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.002)
        return torch.empty(x.shape[0], self.values_per_item)


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_profile_holds_what_it_promises_and_leaves_the_model_alone(mode: str, tmp_path: Path) -> None:
    model, example = small_model(), torch.randn(4, 64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    measured = profile(model, example, mode=mode, budget=4.0, max_batch_size=64, unit="rows")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    assert measured.stopped_by in ("limit", "saturated")
    assert measured.points[0].batch_size == 1 and measured.points[-1].batch_size <= 64
    assert all(len(point.samples) == len(point.rounds) == len(point.times) >= 3 for point in measured.points)
    assert all(point.flops and point.moved_bytes for point in measured.points)
    assert measured.timed_rows == sum(point.batch_size * len(point.samples) for point in measured.points)
    assert measured.peaks.flops and measured.memory is not None and measured.environment.versions["torch"]
    trained = mode == "training"
    assert all(len(point.update_samples) == trained * len(point.samples) for point in measured.points)
    assert all(0 < u < s for point in measured.points for u, s in zip(point.update_samples, point.samples))
    assert bool(measured.adding_samples) == trained
    assert all((point.beside_gradients_bytes is not None) == trained for point in measured.points)
    looked_at = [point for point in measured.points if point.peak_bytes is not None]
    for point in looked_at:
        assert point.predicted_peak_bytes == pytest.approx(point.peak_bytes, rel=0.05)
        assert point.kernels and point.overhead_seconds is not None
    assert {layer.kind for layer in measured.layers} == {"Linear", "ReLU"}
    path = tmp_path / "p.json"
    path.write_bytes(dump_profile(measured))
    assert load_profile(path) == measured


def test_further_sizes_reach_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[object] = []
    monkeypatch.setattr(sweep, "refine", lambda *given: wanted.append(given[-1]))
    profile(small_model(), torch.randn(4, 64), budget=1.0, max_batch_size=2, sizes=(25, 50))
    assert wanted == [(25, 50)]


def test_work_is_proportional_to_the_batch() -> None:
    measured = profile(small_model(), torch.randn(4, 64), budget=0.5, max_batch_size=32)
    per_item = 2 * (64 * 256 + 256 * 8) + 256
    for point in measured.points:
        assert point.flops == pytest.approx(per_item * point.batch_size, rel=0.05)


def test_a_planted_sleep_is_named_overhead_with_its_milliseconds() -> None:
    plain = profile(Sleeper(0.0), torch.randn(4, 64), budget=2.0, max_batch_size=8)
    asleep = profile(Sleeper(0.005), torch.randn(4, 64), budget=3.0, max_batch_size=8)
    found = asleep.points[0].overhead_seconds
    own = plain.points[0].overhead_seconds
    assert found is not None and own is not None
    assert found - own == pytest.approx(0.005, rel=0.1)
    assert found / min(asleep.points[0].samples) > 0.5


def test_nested_and_named_inputs_are_found() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, *, state: dict[str, list[Tensor]], scale: float) -> Tensor:
            out: Tensor = self.linear(state["x"][0]) * scale
            return out

    measured = profile(Named(), {"state": {"x": [torch.randn(3, 8)]}, "scale": 2.0}, budget=1.0, max_batch_size=4)
    assert measured.batch_sizes[-1] == 4


def test_batch_norm_trains_from_two_items_on() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    measured = profile(model, torch.randn(4, 8), mode="training", budget=1.0, max_batch_size=8)
    assert measured.batch_sizes[0] == 2
    assert measured.failures[0].kind == "error" and "more than 1 value" in measured.failures[0].text


def test_mistakes_are_one_clear_error() -> None:
    model = small_model()
    with pytest.raises(InvalidModel, match=r"3.*4|4.*3"):
        profile(nn.Bilinear(8, 8, 8), (torch.randn(3, 8), torch.randn(4, 8)), budget=1.0)
    with pytest.raises(ModelFailed, match="mat1 and mat2"):
        profile(model, torch.randn(4, 63), budget=1.0)
    for wrong in ({"budget": 0.0}, {"max_batch_size": 0}, {"memory_limit": 0}):
        with pytest.raises(InvalidSettings):
            profile(model, torch.randn(4, 64), **wrong)


def test_a_memory_limit_is_held_and_its_largest_size_was_run() -> None:
    limit = 32 * 2**20
    measured = profile(Wide(1 << 16), torch.randn(2, 8), budget=4.0, memory_limit=limit)
    assert measured.stopped_by == "memory" and measured.memory is not None
    largest = measured.memory.largest_that_fits
    assert largest == measured.points[-1].batch_size == measured.memory.predicted_largest
    assert 0.9 * limit < (measured.points[-1].predicted_peak_bytes or 0) <= limit
    with pytest.raises(ModelFailed, match="Not even batch 1 fits"):
        profile(Wide(1 << 20), torch.randn(2, 8), budget=1.0, memory_limit=2**20)


def test_the_largest_that_fits_is_run_once_where_throughput_saturates_first() -> None:
    measured = profile(nn.Linear(256, 4096), torch.randn(2, 256), budget=6.0, memory_limit=32 * 2**20)
    assert measured.memory is not None
    if measured.stopped_by == "saturated":
        assert measured.memory.largest_that_fits == measured.memory.predicted_largest
    assert (measured.memory.largest_that_fits or 0) <= (measured.memory.predicted_largest or 0)


def test_a_result_faster_than_the_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "measure_peaks", lambda *_, **__: Peaks(flops=1e6, bandwidth=1e9))
    with pytest.raises(ImplausibleResult, match="the device reaches 1 MFLOP/s"):
        profile(small_model(), torch.randn(4, 64), budget=1.0, max_batch_size=8)


CAPPED = """
    import resource, torch
    torch.set_num_threads(1)
    from microbatch.profiling.sweep import profile
    from tests.profiling.test_sweep import Wide
    model = Wide(1 << 20)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    cap = used + 1_200_000_000
    resource.setrlimit(resource.RLIMIT_AS, (cap, cap))
    measured = profile(model, torch.randn(2, 8), budget=10.0, memory_limit=1 << 40)
    print(measured.stopped_by, measured.batch_sizes[-1], [f.kind for f in measured.failures])
"""


def test_real_out_of_memory_is_caught_and_the_sweep_goes_on_below(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CAPPED)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={"PYTHONPATH": f"{root / 'src'}:{root}", "PATH": ""},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    stopped_by, largest, *kinds = done.stdout.split()
    assert stopped_by == "memory"
    assert "out_of_memory" in " ".join(kinds)
    assert 100 <= int(largest) <= 300


class Router(nn.Linear):
    """Sends rows to experts, by its name."""


@pytest.mark.parametrize(("rows", "warned"), [(4, True), (200, False)])
def test_a_gate_with_few_different_rows_is_warned_of(rows: int, warned: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Router(8, 8))
    measured = profile(model, torch.randn(rows, 8), budget=0.5, max_batch_size=32)
    assert (
        any("sends rows to experts" in warning and f"{rows} rows" in warning for warning in measured.warnings) is warned
    )


def test_a_function_makes_every_batch_and_the_length_is_kept() -> None:
    asked: list[int] = []

    def make(batch: int) -> tuple[tuple[object, ...], dict[str, object]]:
        asked.append(batch)
        return (torch.randn(batch, 8),), {}

    measured = profile(Router(8, 8), make, mode="prefill", budget=0.5, max_batch_size=16, sequence=7)
    assert not measured.warnings and (measured.mode, measured.sequence) == ("prefill", 7)
    assert set(measured.batch_sizes) <= set(asked)
