"""The time of one operator on a CPU: its parts, their bounds, and how it grows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as some

from microbatch.hardware.constants import DEFAULTS
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.roofline import cpu
from microbatch.work.operators import KINDS, Gemm, Operator, Routed, Work
from microbatch.work.polynomial import Polynomial, constant

ROWS = Polynomial({(1, 0): 1})
SPEC = DeviceSpec(
    name="here", kind="cpu", flops={"fp32": 1e11}, bandwidth=2e10, launch_seconds=4e-6, cache_bytes=32 << 20
)
IDEAL = DeviceSpec(
    name="ideal", kind="cpu", flops={"fp32": 1e11}, bandwidth=2e10, launch_seconds=1e-12, cache_bytes=1 << 40,
    constants={name: 1e-9 if "half" in name or name == "function_flops" else 1.0 for name in DEFAULTS["cpu"]}
    | {"fresh_bandwidth_share": 1e9},
)  # fmt: skip
"""Every constant out of the way: time is bytes over bandwidth plus FLOPs over the peak."""


def linear(k: int = 512, n: int = 2048) -> Operator:
    """A Linear over b rows, without a bias."""
    return Operator(
        name="aten::mm", kind="matmul", gemm=Gemm(m=ROWS, n=constant(n), k=constant(k)), flops=ROWS * (2 * n * k),
        weight_bytes=constant(4 * n * k), read_bytes=ROWS * (4 * k), written_bytes=ROWS * (4 * n),
    )  # fmt: skip


def convolution(channels: int = 32) -> Operator:
    """3×3, 28 pixels a side, as many channels out as in."""
    return Operator(
        name="aten::convolution", kind="convolution",
        gemm=Gemm(m=ROWS * 784, n=constant(channels), k=constant(9 * channels)),
        flops=ROWS * (2 * 784 * 9 * channels**2), weight_bytes=constant(36 * channels**2),
        read_bytes=ROWS * (3136 * channels), written_bytes=ROWS * (3136 * channels),
    )  # fmt: skip


def experts(number: int = 8, top_k: int = 2, probabilities: tuple[float, ...] = ()) -> Operator:
    """The products of a mixture of experts, 256 → 512."""
    routed = Routed(experts=number, top_k=top_k, tokens=ROWS, probabilities=probabilities)
    return Operator(
        name="experts::up", kind="experts", routed=routed,
        gemm=Gemm(m=ROWS * (top_k / number), n=constant(512), k=constant(256), count=constant(number)),
        flops=ROWS * (2 * top_k * 512 * 256), weight_bytes=constant(number * 4 * 512 * 256),
        read_bytes=ROWS * (1024 * top_k), written_bytes=ROWS * (2048 * top_k),
    )  # fmt: skip


def plain(kind: str, name: str = "aten::relu") -> Operator:
    """b rows of 4096 bytes in and out."""
    gemm = Gemm(m=ROWS, n=constant(64), k=constant(64), count=constant(8))
    return Operator(
        name=name, kind=kind, gemm=gemm if kind in ("matmul", "attention", "recurrent") else None,
        flops=ROWS * 1024, read_bytes=ROWS * 4096, written_bytes=ROWS * 4096,
    )  # fmt: skip


def seconds(operator: Operator, batch: float, spec: DeviceSpec = SPEC) -> float:
    return cpu.time_operator(operator, spec, batch, 1.0).seconds


def all_operators() -> list[Operator]:
    kinds = [kind for kind in KINDS if kind not in ("convolution", "experts", "communication")]
    return [linear(), convolution(), experts(), *(plain(kind) for kind in kinds), plain("reduction", "aten::_softmax")]


@pytest.mark.parametrize("operator", all_operators(), ids=lambda o: f"{o.kind}-{o.name}")
@given(batch=some.integers(1, 5000))
def test_never_faster_than_the_datasheet(operator: Operator, batch: int) -> None:
    found = cpu.time_operator(operator, SPEC, batch, 1.0)
    assert found.seconds >= operator.flops(batch) / SPEC.flops["fp32"]
    assert found.seconds == pytest.approx(found.compute_seconds + found.memory_seconds + found.overhead_seconds)
    assert min(found.compute_seconds, found.memory_seconds, found.overhead_seconds) >= 0


@pytest.mark.parametrize("operator", all_operators(), ids=lambda o: f"{o.kind}-{o.name}")
@given(batch=some.integers(2, 5000), more=some.integers(1, 100))
def test_time_grows_with_the_batch(operator: Operator, batch: int, more: int) -> None:
    assert seconds(operator, batch + more) > seconds(operator, batch)


@given(k=some.integers(1, 4096), n=some.integers(1, 4096), rows=some.integers(2, 4096))
def test_without_constants_a_linear_is_the_textbook_sum(k: int, n: int, rows: int) -> None:
    moved, flops = 4 * (k * n + rows * (k + n)), 2 * rows * k * n
    assert seconds(linear(k, n), rows, IDEAL) == pytest.approx(moved / 2e10 + flops / 1e11, rel=1e-4, abs=1e-9)


def test_weights_beyond_the_bandwidth_of_one_row_are_repacked() -> None:
    one, two = (cpu.time_operator(linear(1024, 1024), SPEC, rows, 1.0).memory_seconds for rows in (1, 2))
    weights = 4 * 1024 * 1024 / SPEC.bandwidth
    shares = DEFAULTS["cpu"]
    assert one > weights / shares["vector_bandwidth_share"]
    assert two / one > 1.5


def test_short_rows_of_a_weight_stream_slower() -> None:
    flat, tall = linear(4096, 128), linear(128, 4096)
    times = [cpu.time_operator(operator, SPEC, 1, 1.0).memory_seconds for operator in (flat, tall)]
    assert times[1] > 2 * times[0]


def test_only_woken_experts_cost() -> None:
    even = cpu.time_operator(experts(), SPEC, 3, 1.0)
    assert even.overhead_seconds == pytest.approx(4.625 * cpu.HOST_WORK["experts"] * 4e-6)
    one = cpu.time_operator(experts(probabilities=(1.0, 1.0, 0, 0, 0, 0, 0, 0)), SPEC, 3, 1.0)
    assert one.overhead_seconds == pytest.approx(2 * cpu.HOST_WORK["experts"] * 4e-6)
    assert one.memory_seconds < even.memory_seconds


def test_one_token_wakes_top_k_experts_with_a_single_row_each() -> None:
    weights = 4 * 512 * 256
    one = cpu.time_operator(experts(), IDEAL, 1, 1.0)
    assert one.memory_seconds == pytest.approx((2 * weights + 2 * 3072) / 2e10)
    slow = replace(IDEAL, constants=IDEAL.constants | {"weight_bandwidth_share": 0.01})
    assert cpu.time_operator(experts(), slow, 1, 1.0).memory_seconds == pytest.approx(one.memory_seconds)
    assert cpu.time_operator(experts(), slow, 50, 1.0).memory_seconds > 10 * one.memory_seconds


def test_few_channels_convolve_slowly() -> None:
    few, many = (cpu.time_operator(convolution(channels), SPEC, 4, 1.0) for channels in (8, 256))
    assert few.compute_seconds / 8**2 > 3 * many.compute_seconds / 256**2


def test_functions_cost_arithmetic() -> None:
    relu, gelu = (cpu.time_operator(plain("elementwise", f"aten::{name}"), SPEC, 64, 1.0) for name in ("relu", "gelu"))
    elements = 64 * 1024
    assert relu.compute_seconds == 0
    assert gelu.compute_seconds == pytest.approx(elements * DEFAULTS["cpu"]["function_flops"] / 1e11)


def test_pages_come_fresh_from_32_mib_on() -> None:
    below, above = ((32 << 20) // 8192 - 1, (32 << 20) // 8192)
    rise = seconds(plain("copy"), above) - seconds(plain("copy"), below)
    assert rise > above * 4096 / SPEC.bandwidth
    assert seconds(plain("copy"), below) - seconds(plain("copy"), below - 1) < rise / 100


def test_the_evidence_tells_a_switch_of_kernels_and_fresh_pages() -> None:
    one, two = (cpu.time_operator(linear(), SPEC, rows, 1.0).evidence for rows in (1, 2))
    assert one != two and cpu.FRESH not in one + two
    assert cpu.time_operator(plain("copy"), SPEC, 1 << 14, 1.0).evidence == cpu.FRESH


def test_a_call_whose_weights_stay_in_the_cache_streams_them_faster() -> None:
    small, large = (Work(operators=(linear(k, 1024),) * 4) for k in (256, 4096))
    for work, faster in ((small, True), (large, False)):
        found = cpu.after_last_call(work, SPEC, 1.0, 1.0)
        times = [cpu.time_operator(work.operators[0], spec, 1.0, 1.0).memory_seconds for spec in (SPEC, found)]
        assert (times[1] < 0.6 * times[0]) if faster else (times[1] == pytest.approx(times[0]))
    none = replace(SPEC, cache_bytes=None)
    assert cpu.after_last_call(small, none, 1.0, 1.0).constants["weight_bandwidth_share"] == pytest.approx(
        DEFAULTS["cpu"]["weight_bandwidth_share"]
    )


def test_keys_and_values_of_earlier_tokens_come_from_where_weights_come() -> None:
    def scores(rows: int) -> Operator:
        shape = Gemm(m=constant(rows), n=constant(4096), k=constant(64), count=ROWS)
        return Operator(name="aten::bmm", kind="matmul", gemm=shape, flops=ROWS, read_bytes=ROWS * (4 * 64 * 4096))

    decode, prefill = (cpu.time_operator(scores(rows), SPEC, 4, 1.0).memory_seconds for rows in (1, 4096))
    assert decode > 2 * prefill


def test_one_small_image_is_convolved_without_the_library() -> None:
    one, two = (cpu.time_operator(convolution(16), SPEC, batch, 1.0) for batch in (1, 2))
    assert two.overhead_seconds > 2 * one.overhead_seconds
    large = cpu.time_operator(convolution(64), SPEC, 1, 1.0)
    assert large.overhead_seconds == two.overhead_seconds


def test_tiny_products_share_one_call() -> None:
    tiny, small = (
        Operator(name="aten::bmm", kind="matmul", gemm=Gemm(m=constant(4), n=constant(n), k=constant(32), count=ROWS))
        for n in (1, 8)
    )
    assert seconds(tiny, 1000) == pytest.approx(seconds(tiny, 1))
    assert seconds(small, 1000) == pytest.approx(seconds(small, 1) + 999 * cpu.PRODUCT_LAUNCHES * 4e-6)


def test_a_datasheet_alone_is_enough() -> None:
    bare = DeviceSpec(name="bare", kind="cpu", flops={"fp32": 1e12}, bandwidth=1e11)
    for operator in all_operators():
        assert seconds(operator, 8, bare) > 0
