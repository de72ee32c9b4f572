"""``micro_batch_size="auto"`` on real models: few passes, nothing touched, the longest first, never compiled."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from microbatch.curves.profile import MemoryCurve, Point, Profile
from microbatch.errors import DoesNotFit, InvalidProfile
from microbatch.measure.memory import measure_peak_bytes
from microbatch.measure.storages import bytes_of
from microbatch.training.memory.memory_model import MemoryModel, largest_piece
from microbatch.training.memory.micro_batch_size import from_profile
from microbatch.training.step import TrainStep

WIDTH, ITEMS = 64, 128


class Network(nn.Module):
    """Counts every forward of itself and of its copies; sizes above a limit run out of memory."""

    def __init__(self, calls: list[int], limit: int = 10**6, *, norm: bool = True) -> None:
        super().__init__()
        self.limit = limit
        self.count = calls.append
        middle = nn.BatchNorm1d(2 * WIDTH) if norm else nn.LayerNorm(2 * WIDTH)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), middle, nn.ReLU(), nn.Dropout(0.2), nn.Linear(2 * WIDTH, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        self.count(len(x))
        if len(x) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        result: Tensor = self.layers(x)
        return result


class Deciding(Network):
    """Control flow that depends on a value: fake tensors have none."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if float(x.sum()) > 0 else 1)


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return functional.cross_entropy(output, batch[1], reduction="sum"), (batch[1] >= 0).sum()


def forward(model: Any, batch: Any) -> Any:
    return model(batch[0])


def batch(items: int = ITEMS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(items, WIDTH, generator=generator), torch.randint(3, (items,), generator=generator)


def made(model: nn.Module, **options: Any) -> TrainStep:
    return TrainStep(model, torch.optim.AdamW(model.parameters()), loss, forward=forward, **options)


class Clock:
    """Time that passes in forwards only: `seconds` of each size."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, calls: list[int], seconds: Callable[[int], float]) -> None:
        self.calls, self.seconds = calls, seconds
        monkeypatch.setattr("microbatch.training.memory.micro_batch_size.time.perf_counter", self.now)

    def now(self) -> float:
        return sum(self.seconds(size) for size in self.calls)


@pytest.mark.parametrize("fakes_run", [True, False])
@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [(lambda size: 1e-2 + 1e-3 * size, 16), (lambda size: 1e-3 * (size + 4) * (1 if size <= 8 else 1.6), 8)],
    ids=["larger is faster", "smaller is faster"],
)
def test_from_128_to_a_limit_of_20_in_8_passes_and_1_out_of_memory(
    seconds: Callable[[int], float], chosen: int, fakes_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes on fake tensors counted too; nothing but the failure says where memory ends."""
    calls: list[int] = []
    model = Network(calls, limit=20) if fakes_run else Deciding(calls, limit=20)
    step = made(model)
    with monkeypatch.context() as patch:
        Clock(patch, calls, seconds)
        result = step(batch())
    searched = calls[: -result.num_micro_batches]
    assert len(searched) <= 8
    assert sum(size > 20 for size in searched) == (1 if chosen == 16 or fakes_run else 0)
    assert result.micro_batch_size == chosen
    assert len(result.attempts) == 1
    step(batch())
    assert len(calls) == len(searched) + 2 * result.num_micro_batches  # searched once


def test_a_search_leaves_model_optimizer_and_random_state_alone() -> None:
    """The step ends, to the last bit, as the one of the same size that never searched."""
    outcomes = []
    size = 0
    for search in (True, False):
        torch.manual_seed(3)
        model = Network([])
        step = made(model, micro_batch_size="auto" if search else size)
        result = step(batch())
        size = result.micro_batch_size
        moments = [value for state in step.optimizer.state.values() for value in state.values()]
        outcomes.append([*model.state_dict().values(), *moments, torch.rand(5), torch.tensor(result.loss)])
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))


def test_a_search_that_fails_leaves_everything_alone() -> None:
    model = Network([])
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters())
    step = TrainStep(model, optimizer, lambda output, _: output.sum(), forward=forward)  # no weight
    state = torch.get_rng_state()
    with pytest.raises(Exception, match="sum"):
        step(batch())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not step.optimizer.state and all(parameter.grad is None for parameter in model.parameters())


def test_memory_limit_decides() -> None:
    other = made(Network([]))
    memory = MemoryModel(other._passes(), other.optimizer)
    limit = math.ceil(memory.peak(largest_piece(batch(), 40, None), 40).peak_bytes / 0.95)
    step = made(Network([]), memory_limit=limit)
    result = step(batch())
    assert step.choice is not None and step.choice.budget_source == "your limit"
    assert result.micro_batch_size <= 40
    assert step.choice.largest in (39, 40)
    assert len(step.choice.probes) <= 8
    assert all(probe.micro_batch_size <= step.choice.largest for probe in step.choice.probes)


@pytest.mark.parametrize("size", [1, 4, 16, 64])
def test_predicted_peaks_are_those_of_a_real_step(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, backward beside the gradients of earlier pieces, and the update of the second step."""
    monkeypatch.setattr("microbatch.training.memory.safeguard.SMALL", 0)  # copies of small weights are not counted
    model = Network([], norm=size > 1)  # batch norm needs two items
    step = made(model, micro_batch_size=size)
    x, y = batch(2 * size)
    step((x, y))
    held = [*model.parameters(), *model.buffers(), x, y]
    held += [value for state in step.optimizer.state.values() for value in state.values()]
    measured = measure_peak_bytes(lambda: step((x, y)), held=held)
    predicted = MemoryModel(step._passes(), step.optimizer).peak((x[:size], y[:size]), size).peak_bytes
    allowed = 0.05 * measured + bytes_of([x, y]) + bytes_of(model.buffers())  # the whole batch, and the snapshot
    assert predicted <= measured * 1.05
    assert measured - predicted <= allowed


def test_one_item_that_does_not_fit_says_what_fills_the_memory() -> None:
    class Full(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 1000)

        def forward(self, x: Tensor) -> Tensor:
            if not isinstance(x, FakeTensor):
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes.")
            result: Tensor = self.layer(x)
            return result

    model = Full()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(DoesNotFit) as caught:
        made(model, micro_batch_size=4)(batch(8))
    text = str(caught.value)
    assert "forward with one item alone of 8 (tried 4, 2, 1; CPU allocator" in text
    for part in ("weights 260 kB", "gradients 260 kB", "optimizer 520 kB", "activations of one item"):
        assert part in text
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def squares(output: Tensor, _: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


def test_activations_of_a_piece_are_its_share() -> None:
    """At 16 of 128: at most an eighth of the whole batch's, and 5 %."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 3))
    x, _ = batch()
    x = x[:, None].repeat(1, 64, 1)
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    optimizer = torch.optim.SGD(model.parameters())
    peaks = {}
    for size in (16, ITEMS):
        step = TrainStep(model, optimizer, squares, micro_batch_size=size)
        step.accumulate(x)
        optimizer.zero_grad()
        peaks[size] = measure_peak_bytes(partial(step.accumulate, x)) - gradients
    assert peaks[16] <= peaks[ITEMS] / 8 * 1.05, peaks


@pytest.mark.parametrize("kind", ["list", "dict", "padded"])
def test_the_longest_sample_comes_first(kind: str) -> None:
    ragged = [torch.ones(length, WIDTH) for length in (3, 1, 9, 2, 9, 4)]
    whole: Any = {"list": ragged, "dict": {"x": ragged, "y": torch.zeros(6)}, "padded": torch.ones(6, 9)}[kind]
    piece = largest_piece(whole, 2, True if kind == "list" else None)
    lengths = [len(x) for x in (piece["x"] if kind == "dict" else piece)]
    assert len(lengths) == 2
    assert 9 in lengths and (kind != "list" or lengths == [9, 9])


def test_no_size_is_compiled_for_a_try() -> None:
    graphs: list[int] = []

    def backend(graph: Any, example: list[Any]) -> Any:
        graphs.append(1)
        return graph.forward

    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
    step = made(torch.compile(model, backend=backend))  # type: ignore[arg-type]
    result = step(batch())
    assert step.choice is not None and len({probe.micro_batch_size for probe in step.choice.probes}) > 1
    assert len(graphs) <= (1 if ITEMS % result.micro_batch_size == 0 else 2)


def test_a_model_that_fakes_cannot_run_is_searched_by_running(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    step = made(Deciding(calls, limit=20))
    with monkeypatch.context() as patch:
        Clock(patch, calls, lambda size: 1e-2 + 1e-3 * size)
        result = step(batch())
    assert step.choice is not None and step.choice.predicted == ()
    assert [probe.micro_batch_size for probe in step.choice.probes if probe.seconds is None] == [32]
    assert result.micro_batch_size == 16 and len(result.attempts) == 1


PROFILE = Profile(
    mode="training",
    points=tuple(
        Point(batch_size=b, samples=(t, t * 1.1, t))
        for b, t in [(1, 2.0), (8, 3.0), (16, 4.0), (32, 9.0), (64, 18.0), (256, 60.0)]
    ),
    memory=MemoryCurve(fixed_bytes=100, bytes_per_item=10, limit_bytes=2000, limit_source="", margin=0.0),
)


@pytest.mark.parametrize(("limit", "size"), [(None, 16), (200, 8)])
def test_a_profile_decides_without_a_pass(limit: int | None, size: int) -> None:
    calls: list[int] = []
    result = made(Network(calls), profile=PROFILE, memory_limit=limit)(batch())
    assert result.micro_batch_size == size
    assert len(calls) == result.num_micro_batches


def test_a_profile_counts_one_update_a_step() -> None:
    """16 pieces of 8 take 16 · 3 + 9 = 57, 8 of 16 take 8 · 6 + 9; with an update in each piece 32 would win."""
    times = {8: 3.0, 16: 6.0, 32: 14.0}
    points = tuple(Point(batch_size=b, samples=(t + 9,), update_samples=(9.0,)) for b, t in times.items())
    found = from_profile(Profile(points=points, mode="training"), ITEMS, None)
    assert (found.micro_batch_size, found.largest) == (8, 32)
    old = tuple(replace(point, update_samples=()) for point in points)
    assert from_profile(Profile(points=old, mode="training"), ITEMS, None).micro_batch_size == 32


def test_a_profile_in_which_nothing_fits_is_refused() -> None:
    with pytest.raises(InvalidProfile, match="No micro-batch of the profile fits: one of 1 needs 110 B, and 50 B"):
        made(Network([]), profile=PROFILE, memory_limit=50)(batch())


def test_a_profile_of_inference_is_refused() -> None:
    with pytest.raises(InvalidProfile, match="one of inference"):
        made(Network([]), profile=Profile(points=PROFILE.points))(batch())
