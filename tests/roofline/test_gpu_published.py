"""Published figures of whole models and of the best products, each within 25 % unless the test says why not."""

from __future__ import annotations

import pytest

from microbatch.hardware.catalogue import load_device
from microbatch.roofline.gemm import linear_seconds
from microbatch.roofline.time import time_call
from microbatch.work.operators import Work
from tests.roofline.networks import BF16, INT4, INT8, Stored, compiled_decoding, product, resnet50_v2
from tests.roofline.works import LLAMA_2_7B, LLAMA_3_8B, Shape

A100 = load_device("a100")
WITHIN = 0.25

DECODE = (
    (LLAMA_2_7B, BF16, 104.9),
    (LLAMA_2_7B, INT8, 155.58),
    (LLAMA_2_7B, INT4, 196.8),
    (LLAMA_3_8B, BF16, 93.89),
    (LLAMA_3_8B, INT8, 137.64),
)
"""Tokens per second at batch 1 on an A100-80 limited to 330 W (gpt-fast README); 5 tokens of prompt, 200 made."""

BEST_PRODUCTS = (
    ("a100", "bf16", 271e12), ("h100", "bf16", 795e12), ("b200", "bf16", 1745e12), ("mi300x", "bf16", 668e12),
    ("gaudi2", "bf16", 419e12), ("gaudi3", "bf16", 1243e12), ("h100", "fp8", 1403e12),
)  # fmt: skip
"""FLOP/s of the best product found (stas00/ml-engineering, MAMF table). The MI300X's efficiency in its file is taken
from this very figure; no other constant is."""

RESNET = ((4, 1.41e-3), (8, 2.27e-3), (16, 3.84e-3), (32, 7.11e-3), (64, 13.40e-3))
"""ResNet-50 v2 on an A100 with TensorRT 8.6 (NVIDIA/TensorRT #3993). The thread names no precision: 39 TFLOP/s at 64
images is twice the plain fp32 rate, so it is TensorRT's default for an fp32 model, tf32. The shared constant
`convolution_efficiency` is taken from these five figures."""


@pytest.mark.parametrize(("shape", "stored", "published"), DECODE)
def test_decoding_at_batch_1(shape: Shape, stored: Stored, published: float) -> None:
    step = time_call(compiled_decoding(shape, stored), A100, batch=1, sequence=105, launches="graph")
    assert 1 / step.seconds == pytest.approx(published, rel=WITHIN)


@pytest.mark.parametrize(("name", "dtype", "published"), BEST_PRODUCTS)
def test_best_reachable_product(name: str, dtype: str, published: float) -> None:
    spec = load_device(name)
    rates = []
    for side in (4096, 8192, 16384):
        stored = Stored(bytes=1.0 if dtype == "fp8" else 2.0)
        work = Work(operators=(product(side, side, stored, dtype=dtype),))
        rates.append(2 * side**3 / time_call(work, spec, batch=side, launches="graph").seconds)
    assert max(rates) == pytest.approx(published, rel=WITHIN)


@pytest.mark.parametrize(("batch", "published"), RESNET)
def test_resnet_with_tensorrt(batch: int, published: float) -> None:
    seconds = time_call(resnet50_v2("tf32"), A100, batch=batch, launches="graph").seconds
    assert seconds == pytest.approx(published, rel=WITHIN)


def test_resnet_has_its_published_work() -> None:
    """4.1e9 multiply-adds an image (arXiv 1512.03385, table 1 says 3.8e9 without the shortcuts' convolutions)."""
    assert resnet50_v2("tf32").flops(1) == pytest.approx(2 * 4.1e9, rel=0.02)


@pytest.mark.parametrize(("rows", "low", "high"), [(264, 279, 292), (384, 279, 292), (392, 382, 404), (512, 382, 404)])
def test_waves_of_a_published_product(rows: int, low: float, high: float) -> None:
    """A100, K = 4096, n = 22016: microseconds of three and of four waves, measured (Vidur's published profiles)."""
    assert 0.75 * low <= linear_seconds(A100, "bf16", rows, 22016, 4096) * 1e6 <= 1.25 * high


def test_a_tpu_layer_is_flat_and_then_linear() -> None:
    """TPU v5e, d = 8192, ff = 32768: flat to about 240 tokens (How to Scale Your Model, inference appendix)."""
    work, spec = Work(operators=(product(8192, 32768), product(32768, 8192))), load_device("tpu-v5e")
    seconds = {n: time_call(work, spec, batch=n).seconds for n in (1, 120, 240, 480, 960)}
    assert seconds[120] < 1.05 * seconds[1]
    assert seconds[240] < 1.2 * seconds[1]
    assert seconds[960] == pytest.approx(2 * seconds[480], rel=0.05)
    crossing = seconds[1] / (seconds[960] / 960)
    assert crossing == pytest.approx(240, rel=0.25)
