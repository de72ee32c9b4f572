"""Several devices that share a model: what each does, and what they exchange."""

from __future__ import annotations

from dataclasses import replace

import pytest

from microbatch.errors import InvalidDevice, InvalidSettings
from microbatch.hardware.catalogue import load_device
from microbatch.roofline.parallel import EXCHANGE_SECONDS, LINK_EFFICIENCY, split_work
from microbatch.roofline.time import time_call
from microbatch.work.operators import Operator
from tests.roofline import works

SHAPE = works.LLAMA_3_70B
WORK = works.decoding(SHAPE)


def test_one_device_changes_nothing() -> None:
    assert split_work(WORK, 1) is WORK


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_weights_products_and_cache_are_split(devices: int) -> None:
    part = split_work(WORK, devices, kv_heads=SHAPE.kv_heads)
    assert part.weight_bytes == pytest.approx(WORK.weight_bytes / devices, rel=1e-6)
    assert part.cache_bytes(3, 100) == pytest.approx(WORK.cache_bytes(3, 100) / devices)
    products = ("matmul", "attention")
    whole, own = (
        sum(o.repeat * o.flops(4, 512) for o in work.operators if o.kind in products) for work in (WORK, part)
    )
    assert own == pytest.approx(whole / devices)


def test_two_sums_a_layer_of_the_residual_stream() -> None:
    sums = [o for o in split_work(WORK, 8).operators if o.kind == "communication"]
    assert [o.layer for o in sums] == ["layers.0.attention.o:all-reduce", "layers.0.mlp.down:all-reduce"]
    assert [o.repeat for o in sums] == [80, 80]
    assert sums[0].read_bytes(5) == pytest.approx(2 * 7 / 8 * 5 * 2 * 8192)


def test_what_lies_inside_a_block_is_split_and_the_residual_stream_is_not() -> None:
    part = {o.layer: o for o in split_work(WORK, 4).operators if o.kind != "communication"}
    assert part["layers.0.mlp.act"].read_bytes(1) == pytest.approx(2 * 28672 / 4)
    assert part["layers.0.norm"].read_bytes(1) == pytest.approx(2 * 8192)
    up, down = part["layers.0.mlp.up"], part["layers.0.mlp.down"]
    assert up.gemm is not None and down.gemm is not None
    assert (up.gemm.k(1), up.gemm.n(1)) == (8192, 28672 / 4)
    assert (down.gemm.k(1), down.gemm.n(1)) == (28672 / 4, 8192)
    assert (up.read_bytes(1), down.read_bytes(1)) == (2 * 8192, 2 * 28672 / 4)
    assert (up.written_bytes(1), down.written_bytes(1)) == (2 * 28672 / 4, 2 * 8192)


def test_with_fewer_heads_of_keys_than_devices_each_is_kept_several_times() -> None:
    part = split_work(WORK, 16, kv_heads=8)
    assert part.cache_bytes(1, 1) == pytest.approx(WORK.cache_bytes(1, 1) / 8)
    attention = next(o for o in part.operators if o.kind == "attention")
    assert attention.read_bytes(1, 1000) == pytest.approx(WORK.operators[5].read_bytes(1, 1000) / 8)
    assert attention.flops(1, 1000) == pytest.approx(WORK.operators[5].flops(1, 1000) / 16)


def test_an_exchange_takes_the_time_of_its_bytes_on_the_link() -> None:
    spec = load_device("h200")
    part = split_work(WORK, 8)
    exchange = next(o for o in part.operators if o.kind == "communication")
    alone = replace(part, operators=(replace(exchange, repeat=1),))
    assert time_call(alone, spec, batch=64).seconds == pytest.approx(
        exchange.read_bytes(64) / (LINK_EFFICIENCY * 450e9) + EXCHANGE_SECONDS
    )


def test_an_mlp_of_squares_is_split_in_pairs() -> None:
    two = replace(works.mlp(depth=1), operators=works.mlp(depth=1).operators * 2)
    kinds = [o.kind for o in split_work(two, 2).operators]
    assert kinds == ["matmul", "elementwise", "matmul", "communication", "elementwise"]


def test_of_experts_one_row_for_each_token_is_summed() -> None:
    moe = works.experts(count=8, top_k=2, width=512)
    up = works.linear(512, 512, "bf16", layer="gate")
    part = split_work(replace(moe, operators=(up, *moe.operators)), 4)
    exchange = next(o for o in part.operators if o.kind == "communication")
    assert exchange.read_bytes(10) == pytest.approx(2 * 3 / 4 * 10 * 2 * 512)


def test_attention_written_out_as_products_is_attention() -> None:
    whole = works.decoding(replace(works.LLAMA_2_7B, layers=2))
    scores = Operator(name="aten::bmm", kind="matmul", layer="scores", dtype="bf16", flops=works.per_token(8))
    written_out = replace(whole, operators=tuple(scores if o.kind == "attention" else o for o in whole.operators))
    sums = [o.layer for o in split_work(written_out, 4).operators if o.kind == "communication"]
    assert sums == ["layers.0.attention.o:all-reduce", "layers.0.mlp.down:all-reduce"]


def test_mistakes_are_named() -> None:
    with pytest.raises(InvalidSettings, match="0 devices"):
        split_work(WORK, 0)
    with pytest.raises(InvalidSettings, match="no product"):
        split_work(replace(WORK, operators=(works.elementwise(8, "bf16"),)), 2)
    with pytest.raises(InvalidDevice, match="t4 has no link_bandwidth"):
        time_call(split_work(works.decoding(SHAPE, "fp16"), 2), load_device("t4"), batch=1)
