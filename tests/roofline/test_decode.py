"""The limits of decoding, from numbers and from works, against the published figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from microbatch.hardware.catalogue import load_device
from microbatch.roofline.decode import (
    DecodeWork,
    context_limit,
    decode_work_of,
    half_batch,
    saturated_throughput,
)
from microbatch.roofline.time import time_call
from microbatch.work.polynomial import Polynomial
from tests.roofline import works
from tests.roofline.works import Shape

FIGURES = [
    # shape, parameters with embeddings, A100, H100
    (works.LLAMA_2_7B, 6.74e9, 169, 87),
    (works.LLAMA_3_8B, 8.03e9, 822, 421),
    (works.LLAMA_3_70B, 70.6e9, 2971, 1500),
]


def numbers(shape: Shape, parameters: float) -> DecodeWork:
    return DecodeWork(
        active_parameters=parameters, weight_bytes=2 * parameters,
        cache_bytes_per_token=2 * shape.layers * shape.kv_heads * shape.head * 2,
        attention_flops_per_token=4 * shape.layers * shape.heads * shape.head,
    )  # fmt: skip


@pytest.mark.parametrize(("shape", "parameters", "a100", "h100"), FIGURES)
def test_published_contexts(shape: Shape, parameters: float, a100: int, h100: int) -> None:
    from_numbers, from_work = numbers(shape, parameters), decode_work_of(works.decoding(shape))
    assert from_work is not None
    for device, figure in (("a100", a100), ("h100", h100)):
        assert round(context_limit(from_numbers, load_device(device), "bf16") or 0) == figure
        # The published figures were made with parameters of three digits.
        assert context_limit(from_work, load_device(device), "bf16") == pytest.approx(figure, rel=1e-3, abs=0.5)


@pytest.mark.parametrize("shape", [works.LLAMA_2_7B, works.LLAMA_3_8B])
def test_the_work_of_a_model_gives_the_numbers_of_its_shape(shape: Shape) -> None:
    found = decode_work_of(works.decoding(shape))
    assert found is not None
    by_hand = numbers(shape, found.active_parameters)
    assert found == by_hand


def test_half_of_the_throughput_that_no_batch_exceeds() -> None:
    spec, context = load_device("a100"), 2048
    work = decode_work_of(works.decoding(works.LLAMA_2_7B))
    assert work is not None
    batch = half_batch(work, context) or 0.0
    assert batch == pytest.approx(2 * work.active_parameters / (context * 524288), rel=1e-9)
    # Moving weights and cache alone: at that batch, half of the bound.
    seconds = (work.weight_bytes + batch * context * work.cache_bytes_per_token) / spec.bandwidth
    bound = saturated_throughput(work, spec, context)
    assert bound is not None
    assert batch / seconds == pytest.approx(bound / 2)


def test_beyond_the_limit_reading_takes_longer_than_computing_at_any_batch() -> None:
    spec, work = load_device("a100"), works.decoding(works.LLAMA_3_8B)
    found = decode_work_of(work)
    assert found is not None
    limit = context_limit(found, spec, "bf16") or 0
    for context, compute_bound in ((limit * 0.8, True), (limit * 1.2, False)):
        compute = work.flops(1e9, context) / spec.flops["bf16"]
        memory = 1e9 * context * found.cache_bytes_per_token / spec.bandwidth
        assert (compute > memory) == compute_bound
    assert time_call(work, spec, batch=8, sequence=limit).seconds > 0


def test_experts_count_as_far_as_a_token_uses_them() -> None:
    work = replace(works.experts(count=8, top_k=2, width=64), mode="decode", sequence_free=True)
    found = decode_work_of(work)
    assert found is not None
    assert found.active_parameters == pytest.approx(2 * 64 * 64)


def test_no_limit_where_attention_is_compute_bound_and_none_without_a_growing_cache() -> None:
    shape = replace(works.LLAMA_2_7B, kv_heads=1, heads=1024, hidden=131072)
    found = decode_work_of(works.decoding(shape))
    assert found is not None
    assert context_limit(found, load_device("a100"), "bf16") is None
    still = replace(works.decoding(works.LLAMA_2_7B), cache_bytes=Polynomial({(1, 0): 1e6}))
    found = decode_work_of(still)
    assert found is not None
    assert half_batch(found, 2048) is None
    assert saturated_throughput(found, load_device("a100"), 2048) is None
    assert decode_work_of(replace(still, sequence_free=False)) is None
