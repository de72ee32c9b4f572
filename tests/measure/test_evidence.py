"""Overhead, kernels, page faults and layers, with planted causes."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from microbatch.measure.evidence import (
    count_allocator_retries,
    count_page_faults,
    implementations,
    kernel_names,
    layer_seconds,
    measure_overhead,
    own_times,
    union,
)

pytestmark = pytest.mark.alone

SLEEP = 0.005


class Sleeps(nn.Module):
    """Layers with work, and a planted sleep between them."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 256)
        self.seconds = seconds
        self.slept = math.inf  # the shortest so far: a busy machine wakes a sleeper late

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.seconds:
            start = time.perf_counter()
            time.sleep(self.seconds)
            self.slept = min(self.slept, time.perf_counter() - start)
        result: Tensor = self.second(x)
        return result


def overhead(model: nn.Module, rows: int) -> float:
    x = torch.randn(rows, 256)
    with torch.no_grad():
        model(x)
        return measure_overhead(lambda: model(x))


@pytest.mark.parametrize("rows", [1, 256])
def test_a_planted_sleep_is_measured_within_a_tenth(rows: int) -> None:
    sleeps = Sleeps(SLEEP)
    added = overhead(sleeps, rows) - overhead(Sleeps(0), rows)
    assert added == pytest.approx(sleeps.slept, rel=0.1)


def test_work_is_not_overhead() -> None:
    layer, x = nn.Linear(1024, 1024), torch.randn(512, 1024)
    with torch.no_grad():
        layer(x)
        start = time.perf_counter()
        layer(x)
        wall = time.perf_counter() - start
        assert measure_overhead(lambda: layer(x)) < 0.05 * wall


def test_overhead_in_backward_is_seen() -> None:
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *gradients: Tensor) -> Tensor:
            time.sleep(SLEEP)
            return gradients[0]

    x = torch.randn(8, 8, requires_grad=True)

    def step() -> None:
        result: Tensor = Slow.apply(x)  # type: ignore[no-untyped-call]
        result.sum().backward()

    step()
    assert SLEEP < measure_overhead(step) < 1.5 * SLEEP


@pytest.mark.parametrize(
    ("intervals", "merged"),
    [
        ([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)], [(0.0, 3.0), (5.0, 6.0)]),
        ([(5.0, 6.0), (0.0, 9.0), (7.0, 8.0)], [(0.0, 9.0)]),
        ([], []),
    ],
)
def test_intervals_are_merged(intervals: list[tuple[float, float]], merged: list[tuple[float, float]]) -> None:
    assert union(intervals) == merged


def test_own_time_leaves_out_what_is_nested() -> None:
    spans = [(1, 0, 100, "outer"), (1, 10, 40, "inner"), (1, 15, 20, "leaf"), (1, 50, 60, "leaf"), (2, 0, 30, "leaf")]
    assert own_times(spans) == {"outer": 60, "inner": 25, "leaf": 45}


def test_operators_are_named_the_most_expensive_first() -> None:
    layer, x = nn.Linear(512, 512), torch.randn(512, 512)
    with torch.no_grad():
        names = kernel_names(lambda: layer(x).relu())
    assert names[0] == "aten::addmm"
    assert "aten::relu" in names or "aten::clamp_min" in names


def test_onednn_names_its_implementation(capfd: pytest.CaptureFixture[str]) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    layer, x = nn.Conv2d(16, 32, 3), torch.randn(4, 16, 16, 16)

    def call() -> None:
        layer(x)
        os.write(1, b"the model's own line\n")

    with torch.no_grad():
        names = kernel_names(call)
    assert any(name.startswith("convolution ") for name in names)
    output = capfd.readouterr()
    assert "onednn" not in output.out
    assert "the model's own line" in output.out
    assert "profiler" not in output.err


def test_verbose_lines_of_two_versions_are_read() -> None:
    lines = [
        "onednn_verbose,v1,info,cpu,isa:Intel AVX2\n",
        "onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx512_core_bf16,undef,src_bf16,,,8x8,0.5\n",
        "onednn_verbose,v1,primitive,exec,cpu,reorder,jit:uni,undef,src_f32,,,8,0.7\n",
        "dnnl_verbose,exec,cpu,matmul,brg_matmul:avx512_core_bf16,undef,src_bf16,,,8x8,0.4\n",
    ]
    assert implementations(lines) == ("matmul brg_matmul:avx512_core_bf16", "reorder jit:uni")


def test_page_faults_are_those_of_fresh_memory() -> None:
    size = 64 << 20
    fresh = count_page_faults(lambda: torch.ones(size, dtype=torch.uint8), repeats=2)
    page = os.sysconf("SC_PAGE_SIZE")
    huge = "[always]" in read("/sys/kernel/mm/transparent_hugepage/enabled")
    if not huge:
        assert size / page * 0.9 < fresh < size / page * 1.5
    held = torch.ones(1 << 20)
    held.add_(1)
    assert count_page_faults(lambda: held.add_(1)) < 50


def read(path: str) -> str:
    return Path(path).read_text() if Path(path).is_file() else ""


def test_a_cpu_has_no_allocator_that_retries() -> None:
    assert count_allocator_retries(lambda: None, "cpu") is None


def test_layers_share_the_time_and_are_left_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(512, 256), nn.Sequential(nn.ReLU(), Sleeps(SLEEP)))
    x = torch.randn(64, 512)
    with torch.no_grad():
        seconds = layer_seconds(model, lambda: model(x))
    assert set(seconds) == {"0", "1.0", "1.1.first", "1.1.second"}
    assert sum(seconds.values()) < SLEEP, "the sleep lies between layers, in none of them"
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_forward_of_ones_own_is_put_back() -> None:
    model = nn.Linear(4, 4)

    def own(x: Tensor) -> Tensor:
        raise KeyError

    setattr(model, "forward", own)  # noqa: B010 - mypy refuses the plain form
    with pytest.raises(KeyError):
        layer_seconds(model, lambda: model(torch.zeros(1, 4)))
    assert model.__dict__["forward"] is own


def test_timing_layers_keeps_the_fast_path_of_attention() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    x = torch.randn(2, 8, 32)
    with torch.no_grad():
        assert set(layer_seconds(nn.Sequential(layer), lambda: layer(x))) == {"0"}
    layer.train()
    assert len(layer_seconds(layer, lambda: layer(x))) > 3
