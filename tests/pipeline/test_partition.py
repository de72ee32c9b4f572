"""Stages against all cuts tried one by one."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch.errors import DoesNotFit, InvalidSettings
from microbatch.pipeline.partition import LayerCost, even_bounds, partition, partition_at
from microbatch.pipeline.placement import loop, zigzag


def random_layers(count: int, rng: random.Random) -> list[LayerCost]:
    layers = [
        LayerCost(name=f"layers.{i}", seconds=rng.choice((1.0, rng.random(), 4 * rng.random())),
                  weight_bytes=rng.randrange(1, 20), activation_bytes=rng.randrange(5))
        for i in range(count)
    ]  # fmt: skip
    if rng.random() < 0.5:  # tied embeddings: the first and the last layer hold the same weight
        shared = {"shares": "embedding", "shared_bytes": 8.0}
        layers[0] = LayerCost(name="embed", seconds=0.2, weight_bytes=8, activation_bytes=1, **shared)  # type: ignore[arg-type]
        layers[-1] = LayerCost(name="head", seconds=3.0, weight_bytes=10, activation_bytes=1, **shared)  # type: ignore[arg-type]
    return layers


def rank_bytes(layers: list[LayerCost], pieces: list[tuple[int, int]], held: float) -> float:
    mine = [layer for first, last in pieces for layer in layers[first:last]]
    weights = sum(layer.weight_bytes for layer in mine)
    copies = sum(layer.shares != "" for layer in mine)
    weights -= max(copies - 1, 0) * 8
    return weights + held * sum(layer.activation_bytes for layer in mine)


def best_by_trying(
    layers: list[LayerCost], placement: tuple[int, ...], held: list[float], limit: float
) -> tuple[float, float] | None:
    """Of the slowest rank, and of the slowest stage of those cuts."""
    ranks, found = 1 + max(placement), []
    for cuts in combinations(range(1, len(layers)), len(placement) - 1):
        edges = [0, *cuts, len(layers)]
        pieces = list(pairwise(edges))
        per_rank = [[pieces[s] for s in range(len(placement)) if placement[s] == rank] for rank in range(ranks)]
        if any(rank_bytes(layers, mine, held[rank]) > limit for rank, mine in enumerate(per_rank)):
            continue
        slowest = max(sum(layer.seconds for a, b in mine for layer in layers[a:b]) for mine in per_rank)
        found.append((slowest, max(sum(layer.seconds for layer in layers[a:b]) for a, b in pieces)))
    if not found:
        return None
    best = min(found)[0]
    return best, min(stage for rank, stage in found if rank <= best * (1 + 1e-9))


@given(
    count=st.integers(1, 9), ranks=st.integers(1, 4), v=st.booleans(), tight=st.booleans(), seed=st.integers(0, 10**6)
)
def test_no_other_cut_is_better(count: int, ranks: int, v: bool, tight: bool, seed: int) -> None:
    rng = random.Random(seed)
    placement = zigzag(ranks) if v else loop(ranks)
    layers = random_layers(max(count, len(placement)), rng)
    held = [float(rng.randrange(1, 4)) for _ in range(ranks)]
    limit = sum(layer.weight_bytes + 2 * layer.activation_bytes for layer in layers) / ranks * 1.3 if tight else 1e9
    best = best_by_trying(layers, placement, held, limit)
    if best is None:
        with pytest.raises(DoesNotFit):
            partition(layers, placement, in_flight=held, memory_limit_bytes=limit)
        return
    found = partition(layers, placement, in_flight=held, memory_limit_bytes=limit)
    assert found.bottleneck == pytest.approx(best[0])
    assert max(found.seconds_per_stage) == pytest.approx(best[1])
    assert [name for stage in found.stages for name in stage] == [layer.name for layer in layers]
    assert all(found.stages)
    assert max(found.bytes_per_rank) <= limit


@given(count=st.integers(4, 9), seed=st.integers(0, 10**6))
def test_a_loop_has_the_fastest_slowest_stage(count: int, seed: int) -> None:
    layers = random_layers(count, random.Random(seed))
    found = partition(layers, loop(2, 2))
    slowest = min(
        max(sum(layer.seconds for layer in layers[a:b]) for a, b in zip((0, *cuts), (*cuts, count)))
        for cuts in combinations(range(1, count), 3)
    )
    assert max(found.seconds_per_stage) == pytest.approx(slowest)


@pytest.mark.parametrize("placement", [zigzag(2), zigzag(4), loop(2, 2)])
def test_layers_that_cost_the_same_make_stages_that_cost_the_same(placement: tuple[int, ...]) -> None:
    layers = [LayerCost(name=f"layers.{i}", seconds=1.0) for i in range(2 * len(placement))]
    assert partition(layers, placement).seconds_per_stage == (2.0,) * len(placement)


def test_a_heavy_head_gets_a_stage_with_fewer_layers() -> None:
    layers = [LayerCost(name=f"layers.{i}", seconds=1.0) for i in range(12)] + [LayerCost(name="head", seconds=4.0)]
    found = partition(layers, loop(4))
    assert found.bottleneck == 4.0
    assert found.even_seconds == 6.0
    assert found.gain == pytest.approx(1.5)


def test_memory_forces_another_cut() -> None:
    layers = [LayerCost(name=str(i), seconds=1.0, activation_bytes=10) for i in range(4)]
    assert list(partition(layers, loop(2)).bounds) == [(0, 2), (2, 4)]
    tight = partition(layers, loop(2), in_flight=[2, 1], memory_limit_bytes=30)
    assert list(tight.bounds) == [(0, 1), (1, 4)]
    assert list(tight.bytes_per_rank) == [20, 30]
    with pytest.raises(DoesNotFit, match="4 layers into 2 stages"):
        partition(layers, loop(2), in_flight=[2, 1], memory_limit_bytes=25)


def test_manual_cuts() -> None:
    layers = [LayerCost(name=name, seconds=1.0) for name in ("embed", "a", "b", "head")]
    found = partition_at(layers, ["a", "head"], loop(3))
    assert found.stages == (("embed",), ("a", "b"), ("head",))
    assert found.bottleneck == 2.0
    for cuts, message in ((["c", "head"], "No layer is called 'c'"), (["head", "a"], "do not follow the order"),
                          (["a"], "1 cuts make 2 stages, not 3"), (["embed", "a"], "do not follow")):  # fmt: skip
        with pytest.raises(InvalidSettings, match=message):
            partition_at(layers, cuts, loop(3))


def test_too_few_layers_name_the_nearest() -> None:
    with pytest.raises(InvalidSettings, match="2 layers cannot make 4 stages"):
        partition([LayerCost(name="a", seconds=1), LayerCost(name="b", seconds=1)], loop(4))


def test_even_bounds() -> None:
    assert even_bounds(7, 3) == ((0, 3), (3, 5), (5, 7))
