"""The mixture of experts against a plain loop, and what is recorded of its routing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from microbatch.models.built_in import build
from microbatch.models.moe import MixtureOfExperts, even_routing, measure_imbalance, record_routing
from microbatch.models.routing import TokenChoice, by_expert


def _layer(**settings: float) -> MixtureOfExperts:
    torch.manual_seed(0)
    return MixtureOfExperts(TokenChoice(8, experts=4, top_k=2, **settings), 8, 16).double()  # type: ignore[arg-type]


def _tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _plain(layer: MixtureOfExperts, x: Tensor) -> Tensor:
    """Every token by itself through its two best experts."""
    scores = torch.softmax(x @ layer.router.gate.weight.T, dim=-1)
    out = torch.zeros_like(x)
    for token in range(len(x)):
        best = scores[token].topk(2)
        for expert, weight in zip(best.indices, best.values / best.values.sum()):
            out[token] += weight * (torch.relu(x[token] @ layer.up[expert]) @ layer.down[expert])
    return out


def test_equals_a_plain_loop_over_tokens() -> None:
    layer, x = _layer(), _tokens(7)
    torch.testing.assert_close(layer(x), _plain(layer, x), rtol=0, atol=1e-12)


def test_keeps_the_shape_of_sequences() -> None:
    layer, x = _layer(), _tokens(3, 5)
    torch.testing.assert_close(layer(x).reshape(15, 8), _plain(layer, x.reshape(15, 8)), rtol=0, atol=1e-12)


def test_gradients_equal_those_of_the_plain_loop() -> None:
    layer, x = _layer(), _tokens(7)
    parameters = list(layer.parameters())
    ours = torch.autograd.grad(layer(x).square().sum(), parameters)
    plain = torch.autograd.grad(_plain(layer, x).square().sum(), parameters)
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_record_routing_counts_each_layer_and_leaves_no_hook() -> None:
    loaded = build("moe:depth=2,width=8,hidden=8,experts=4,top_k=2,routing=even")
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    with record_routing(loaded.model) as loads, torch.no_grad():
        loaded.model(x)
    assert [load.layer for load in loads] == ["0.layer", "1.layer"]
    assert loads[0].tokens_per_expert == (3, 3, 3, 3)
    assert (loads[0].tokens, loads[0].batch_size, loads[0].dropped) == (6, 6, 0)
    assert loads[0].load_factor == 1 and loads[0].distinct_experts == 4
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in loaded.model.modules())
    with torch.no_grad():
        loaded.model(x)
    assert len(loads) == 2


def test_record_routing_counts_drops() -> None:
    layer = MixtureOfExperts(TokenChoice(8, 4, 1, capacity=1.0, planted=torch.zeros(1, 1, dtype=torch.long)), 8, 8)
    with record_routing(layer, batch_size=2) as loads, torch.no_grad():
        layer(torch.zeros(2, 4, 8))
    assert loads[0].tokens_per_expert == (2, 0, 0, 0)
    assert (loads[0].batch_size, loads[0].tokens, loads[0].dropped) == (2, 8, 6)
    assert loads[0].load_factor == 4


def test_even_routing_keeps_assignments_and_takes_no_expert_twice() -> None:
    chosen = torch.tensor([[0, 1], [0, 1], [0, 2], [0, 3], [0, 1]])
    weights = torch.rand(5, 2, generator=torch.Generator().manual_seed(2))
    skewed = by_expert(chosen, weights, experts=4)
    even = even_routing(skewed, experts=4)
    assert even.counts == (3, 3, 2, 2)
    assert even.tokens.bincount().tolist() == [2] * 5
    pairs = list(zip(even.tokens.tolist(), torch.arange(4).repeat_interleave(torch.tensor(even.counts)).tolist()))
    assert len(set(pairs)) == 10
    for token in range(5):
        mine = even.weights[even.tokens == token].sort().values
        torch.testing.assert_close(mine, weights[token].sort().values)


def _clock(seconds: Iterator[float]) -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += next(seconds)
        yield now


def test_measure_imbalance_takes_the_least_time_of_each_routing() -> None:
    loaded = build("moe:depth=1,width=8,hidden=8,experts=4,top_k=2,routing=zipf")
    # Round 0 runs the even routing first, round 1 the real one.
    ticks = _clock(iter([2.0, 5.0, 4.0, 3.0]))
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    (load,) = measure_imbalance(loaded.model, (torch.ones(2, 8),), {}, rounds=2, clock=lambda: next(ticks))
    assert (load.seconds, load.even_seconds) == (4.0, 2.0)
    assert load.batch_size == 2 and load.tokens == 2 and sum(load.tokens_per_expert) == 4
    assert all(torch.equal(value, before[name]) for name, value in loaded.model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in loaded.model.modules())


def test_measure_imbalance_without_experts_gives_nothing_and_runs_nothing() -> None:
    class Refuses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("must not run")

    assert measure_imbalance(Refuses(), (torch.zeros(2),), {}) == ()


def test_measure_imbalance_times_for_real() -> None:
    loaded = build("moe:depth=2,width=8,hidden=8,experts=4,routing=zipf")
    loads = measure_imbalance(loaded.model, loaded.args, {}, rounds=1)
    assert len(loads) == 2
    assert all(load.seconds and load.even_seconds for load in loads)


@pytest.mark.parametrize("gate", ["tokens", "experts"])
def test_capacity_changes_what_is_computed(gate: str) -> None:
    text = f"moe:depth=1,width=8,hidden=8,experts=4,gate={gate}"
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    loads = []
    for setting in ("capacity=0.5", "capacity=2"):
        model = build(f"{text},{setting}").model
        with record_routing(model) as recorded, torch.no_grad():
            model(x)
        loads.append(sum(recorded[0].tokens_per_expert))
    assert loads[0] == 16 and loads[1] > loads[0]
