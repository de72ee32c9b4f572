"""Layers out of a profile: blocks as wholes, alike ones as often as there are, tied weights by name."""

from __future__ import annotations

import pytest

from microbatch.curves.profile import Layer, Point, Profile
from microbatch.errors import InvalidProfile
from microbatch.pipeline.layer_costs import ADAM, block_of, layer_costs
from microbatch.pipeline.partition import partition
from microbatch.pipeline.placement import loop


def row(name: str, seconds: float, *, repeat: int = 1, parameters: int = 10) -> Layer:
    return Layer(name=name, kind="Linear", parameter_bytes=parameters, flops_per_item=1, activation_bytes_per_item=3,
                 seconds=(seconds, 2 * seconds), repeat=repeat)  # fmt: skip


MODEL = Profile(
    points=(Point(batch_size=1, samples=(1.0,)),),
    layers=(row("embed", 1.0), row("layers.0.attn", 4.0, repeat=4, parameters=40), row("layers.0.mlp", 8.0, repeat=4,
            parameters=80), row("norm", 0.5), row("head", 6.0)),
    layer_batch_sizes=(1, 2),
)  # fmt: skip


def test_blocks_are_wholes_and_come_as_often_as_they_stand() -> None:
    costs = layer_costs(MODEL, 1)
    assert [cost.name for cost in costs] == ["embed", "layers.0", "layers.1", "layers.2", "layers.3", "norm", "head"]
    assert [cost.seconds for cost in costs] == [1, 3, 3, 3, 3, 0.5, 6]
    assert costs[1].weight_bytes == ADAM * 30
    assert sum(cost.weight_bytes for cost in costs) == ADAM * sum(layer.parameter_bytes for layer in MODEL.layers)


def test_sizes_between_are_read_off() -> None:
    assert layer_costs(MODEL, 2)[-1].seconds == 12
    assert layer_costs(MODEL, 2)[1].activation_bytes == 2 * layer_costs(MODEL, 1)[1].activation_bytes


def test_tied_layers_share_a_weight() -> None:
    costs = layer_costs(MODEL, 1, tied=("embed", "head"))
    one = partition(costs, loop(1))
    assert one.bytes_per_rank[0] == sum(c.weight_bytes + c.activation_bytes for c in costs) - ADAM * 10
    with pytest.raises(InvalidProfile, match="No layer is called 'tail'"):
        layer_costs(MODEL, 1, tied=("embed", "tail"))


def test_a_profile_without_layers_is_told() -> None:
    with pytest.raises(InvalidProfile, match="no table of layers"):
        layer_costs(Profile(points=MODEL.points), 1)


def test_blocks_by_name() -> None:
    assert block_of("model.layers.3.attn.q") == "model.layers.3"
    assert block_of("0") == "0"
    assert block_of("lm_head") == "lm_head"


def test_a_predicted_model_can_be_cut() -> None:
    import microbatch

    profile = microbatch.predict("mlp:depth=4,width=64", "t4", mode="training", dtype="fp16")
    costs = layer_costs(profile, profile.layer_batch_sizes[0])
    assert not any(cost.name == "optimizer" for cost in costs)
    total = sum(layer.seconds[0] for layer in profile.layers if layer.kind != "optimizer")
    assert sum(cost.seconds for cost in costs) == pytest.approx(total)
    found = partition(costs, loop(2))
    assert found.bottleneck < total
    assert found.gain >= 1
