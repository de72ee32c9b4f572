"""The gradient noise scale: its arithmetic, planted quadratics, several ranks; and bytes on the wire."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from microbatch.training.noise_scale import Measured, NoiseScale, RunningNoise, measured
from microbatch.training.step import TrainStep
from tests.training import nursery
from tests.training.planted_noise import PLANTED

Found = dict[str, list[list[Any]]]

STEPS = {"much noise": 300}


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize(("items", "micro_batch_size"), [(32, 8), (30, 9)], ids=["equal", "unequal"])
def test_a_planted_noise_scale_is_found(name: str, items: int, micro_batch_size: int) -> None:
    case = PLANTED[name]
    step, generator = case.step(case.model(), micro_batch_size), torch.Generator().manual_seed(1)
    for _ in range(STEPS.get(name, 150)):
        result = step(case.batch(items, generator))
    found = result.noise_scale
    assert found is not None and found.low is not None and found.high is not None
    assert result.gradient_noise_scale == found.value
    assert found.value == pytest.approx(case.expected(), rel=0.2)
    assert found.low < found.value < found.high


@given(
    st.lists(st.tuples(st.floats(0.1, 5.0), st.floats(-3, 3), st.floats(-3, 3)), min_size=2, max_size=6),
)
def test_the_estimates_are_means_over_pairs_of_pieces(pieces: list[tuple[float, float, float]]) -> None:
    weights = np.array([piece[0] for piece in pieces])
    shares, gradients = weights / weights.sum(), np.array([piece[1:] for piece in pieces])
    products = gradients @ gradients.T
    off = ~np.eye(len(pieces), dtype=bool)
    expected = products[off].sum() / np.outer(shares, shares)[off].sum()
    found = measured(
        squares=float(np.trace(products)),
        shares=float((shares**2).sum()),
        square_of_sum=float(products.sum()),
        samples=10,
    )
    assert found is not None
    assert found.squared_gradient == pytest.approx(expected, rel=1e-9, abs=1e-9)
    variance = 10 * (np.trace(products) - (shares**2).sum() * expected)
    assert found.variance == pytest.approx(variance, rel=1e-9, abs=1e-9)


def test_equal_pieces_give_the_papers_estimates() -> None:
    generator = np.random.default_rng(0)
    means, big, small = generator.normal(size=(4, 7)), 32, 8
    of_big, of_small = (means.mean(0) ** 2).sum(), (means**2).sum(1).mean()
    found = measured(squares=of_small / 4, shares=1 / 4, square_of_sum=of_big, samples=big)
    assert found is not None
    assert found.squared_gradient == pytest.approx((big * of_big - small * of_small) / (big - small))
    assert found.variance == pytest.approx((of_small - of_big) / (1 / small - 1 / big))


@pytest.mark.parametrize(("squares", "shares"), [(1.0, 1.0), (math.inf, 0.5), (math.nan, 0.5)])
def test_a_single_piece_or_no_number_says_nothing(squares: float, shares: float) -> None:
    assert measured(squares=squares, shares=shares, square_of_sum=1.0, samples=8) is None


class Shared(nn.Module):
    """A sparse embedding, a layer that is used twice, one that is frozen and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4, sparse=True)
        self.twice, self.frozen, self.unused = (nn.Linear(4, 4) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens).sum(1)
        out: Tensor = self.frozen(self.twice(self.twice(hidden).tanh()))
        return out


def shared_loss(output: Tensor, tokens: Tensor) -> dict[str, tuple[Tensor, float]]:
    return {"square": (output.square().sum(), 2.0 * len(tokens)), "sum": (output.sum(), 2.0 * len(tokens))}


@pytest.mark.parametrize("scale", [None, 1024.0])
@pytest.mark.parametrize("max_norm", [None, 1e-3])
def test_the_norms_are_those_of_each_piece_alone(scale: float | None, max_norm: float | None) -> None:
    torch.manual_seed(0)
    model, tokens = Shared().double(), torch.randint(9, (7, 3))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    step = TrainStep(
        model, optimizer, shared_loss, micro_batch_size=3, noise_scale=True, scaler=scaler, max_norm=max_norm
    )
    result = step(tokens)
    squares = []
    for piece in (*tokens.split(3), tokens):
        terms = [term[0] for term in shared_loss(model(piece), piece).values()]
        total = torch.stack(terms).sum() / (2.0 * len(tokens))
        parameters = [p for p in model.parameters() if p.requires_grad]
        found = torch.autograd.grad(total, parameters, allow_unused=True)
        squares.append(sum(g.to_dense().square().sum().item() for g in found if g is not None))
    expected = measured(
        squares=sum(squares[:-1]), shares=(9 + 9 + 1) / 49, square_of_sum=squares[-1], samples=len(tokens)
    )
    assert expected is not None and result.noise_scale is not None
    assert result.noise_scale.squared_gradient == pytest.approx(expected.squared_gradient, rel=1e-9)
    assert result.noise_scale.variance == pytest.approx(expected.variance, rel=1e-9)
    assert result.grad_norm == pytest.approx(squares[-1] ** 0.5, rel=1e-9)
    assert not any(p._backward_hooks for p in model.parameters())


def test_weights_move_as_without_it() -> None:
    weights = []
    for noise_scale in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = TrainStep(
            model, optimizer, lambda o, b: (o.square().sum(), len(o)), micro_batch_size=3, noise_scale=noise_scale
        )
        result = step(torch.randn(8, 4))
        weights.append(model.weight.detach().clone())
        assert (result.noise_scale is not None) == noise_scale
    assert torch.equal(*weights)


def test_one_piece_and_a_skipped_step_add_nothing() -> None:
    case, generator = PLANTED["few dimensions"], torch.Generator().manual_seed(0)
    step = case.step(case.model(), 100)
    assert step(case.batch(8, generator)).gradient_noise_scale is None
    step.micro_batch_size = 4
    assert step(case.batch(8, generator)).noise_scale is not None
    empty = case.batch(8, generator) | {"weight": torch.zeros(8)}
    again = step(empty)
    assert again.skipped and again.noise_scale is not None and again.noise_scale.steps == 1


def test_a_gradient_in_two_parts_is_not_measured() -> None:
    """Reentrant checkpoints run a backward pass of their own for each use of a parameter."""
    from torch.utils.checkpoint import checkpoint

    layer = nn.Linear(4, 4)

    def forward(_: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(layer, checkpoint(layer, x.requires_grad_(), use_reentrant=True), use_reentrant=True)
        return out

    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    step = TrainStep(
        layer, optimizer, lambda o, b: (o.square().sum(), len(o)), forward=forward, micro_batch_size=4, noise_scale=True
    )
    assert step(torch.randn(8, 4)).noise_scale is None


def test_the_interval_holds_the_truth_nine_times_of_ten() -> None:
    generator, held = np.random.default_rng(0), 0
    for _ in range(200):
        running = RunningNoise()
        for noise, shift in generator.normal(size=(100, 2)):
            running.add(Measured(squared_gradient=1.0 + 2.0 * noise, variance=40.0 + 10 * shift + 5 * noise))
        found = running.noise_scale(32)
        assert found is not None and found.low is not None and found.high is not None
        held += found.low <= 40.0 <= found.high
    assert 170 <= held <= 190


def test_the_start_of_a_run_is_forgotten() -> None:
    running = RunningNoise()
    for step in range(300):
        running.add(Measured(squared_gradient=1.0, variance=5.0 if step < 30 else 50.0))
    found = running.noise_scale(32)
    assert found is not None and found.value == pytest.approx(50.0, rel=0.02)


def test_a_gradient_that_is_lost_in_noise_is_said() -> None:
    running = RunningNoise()
    for step in range(20):
        running.add(Measured(squared_gradient=(-1.0) ** step - 0.1, variance=5.0))
    found = running.noise_scale(32)
    assert found is not None and found.value == math.inf == found.high
    assert "cannot be told from noise" in str(found)


def test_a_sentence_says_what_it_means() -> None:
    values: dict[str, Any] = {"squared_gradient": 1.0, "variance": 1234.0, "steps": 50, "batch_size": 128}
    found = NoiseScale(value=1234.0, low=1000.0, high=1500.0, **values)
    assert str(found) == (
        "Beyond a global batch of about 1,200 (90 % interval 1,000 to 1,500) more samples per step buy little; with "
        "128 training takes 10.6 times the fewest steps."
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return nursery.run(tmp_path_factory.mktemp("noise"), "tests.training.noise_cases")


@pytest.mark.parametrize(("name", "kind"), [("few dimensions", "ddp"), ("weighted", "replicas")])
def test_pieces_of_all_ranks_are_samples_of_one_batch(found: Found, name: str, kind: str) -> None:
    (ranks,) = found[f"{name} {kind}"]
    assert ranks[0] == ranks[1]
    assert ranks[0]["batch_size"] == 24
    assert ranks[0]["value"] == pytest.approx(PLANTED[name].expected(), rel=0.2)


def test_shards_find_what_replicas_find(found: Found) -> None:
    replicas, shards = found["the same"]
    for key in ("value", "low", "squared_gradient", "variance", "steps"):
        assert shards[0][key] == shards[1][key] == pytest.approx(replicas[0][key], rel=1e-9)


@pytest.mark.parametrize("kind", ["ddp", "plain", "fsdp", "fsdp kept", "fsdp idle", "hsdp"])
def test_bytes_and_calls_are_what_torch_counts(found: Found, kind: str) -> None:
    for ranks in found[f"wire {kind}"]:
        for rank in ranks:
            assert rank["calls"] == rank["counted calls"]
            assert rank["bytes"] == pytest.approx(rank["counted bytes"], rel=0.01)


def test_replicas_send_the_same_whatever_the_pieces(found: Found) -> None:
    for kind in ("ddp", "plain"):
        sent = {(rank["calls"], rank["bytes"]) for ranks in found[f"wire {kind}"] for rank in ranks}
        assert len(sent) == 1
        assert [ranks[0]["pieces"] for ranks in found[f"wire {kind}"]] == [1, 4, 16]
