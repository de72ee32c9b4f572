"""Peaks against sums done by hand, and predictions against measurements."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode

from microbatch.errors import NoAnswer
from microbatch.measure.memory import Prediction, Predictor, Running, highest, measure_peak_bytes, memory_curve
from microbatch.measure.storages import LiveStorages, bytes_of

pytestmark = pytest.mark.alone

WIDTH = 32
WEIGHT = WIDTH * WIDTH * 4


def chain(depth: int) -> nn.Sequential:
    """Linear layers without bias: every weight has `WEIGHT` bytes, every activation batch · `WIDTH` · 4."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)))


def predicted(model: nn.Module, batch: int, *, train: bool) -> Prediction:
    predictor = Predictor()
    fake, optimizer = faked(predictor, model, train=train)
    return predictor.peak(lambda: running(fake, batch, optimizer), batch)


def faked(predictor: Predictor, model: nn.Module, *, train: bool) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    with predictor.mode, FakeCopyMode(predictor.mode):
        fake = copy.deepcopy(model)
    return fake, torch.optim.Adam(fake.parameters()) if train else None


def running(model: nn.Module, batch: int, optimizer: torch.optim.Optimizer | None) -> Running:
    x = torch.ones(batch, WIDTH)
    return Running(step=step_of(model, x, optimizer), model=model, optimizer=optimizer, example=(x,))


def step_of(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer | None) -> Callable[[], object]:
    def infer() -> Tensor:
        with torch.no_grad():
            result: Tensor = model(x)
            return result

    def train() -> None:
        model(x).square().sum().backward()
        assert optimizer is not None
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return infer if optimizer is None else train


def measured(model: nn.Module, batch: int, *, train: bool) -> int:
    found = running(model, batch, torch.optim.Adam(model.parameters()) if train else None)
    found.step()
    return measure_peak_bytes(found.step, held=found.held())


@pytest.mark.parametrize("batch", [1, 5, 64])
def test_inference_holds_the_weights_the_input_and_two_activations(batch: int) -> None:
    row = batch * WIDTH * 4
    by_hand = 4 * WEIGHT + row + 2 * row
    assert measured(chain(4), batch, train=False) == by_hand
    assert predicted(chain(4), batch, train=False).peak_bytes == by_hand


def test_the_peak_of_a_small_batch_in_training_lies_in_the_optimizer() -> None:
    """Weights, gradients and Adam's two states; in its step two temporaries of a parameter, and one of the last."""
    steps = 4 * 4  # Adam counts its steps in one tensor of 4 bytes for each parameter
    held = 4 * WEIGHT * (1 + 1 + 2) + steps
    row = 1 * WIDTH * 4
    for peak in (measured(chain(4), 1, train=True), predicted(chain(4), 1, train=True).peak_bytes):
        assert held + 3 * WEIGHT + row <= peak <= held + 3 * WEIGHT + row + 64


def test_adams_state_stands_beside_the_activations_of_the_next_step() -> None:
    batch = 4096
    row = batch * WIDTH * 4
    # weights and states; the input and four outputs that backward needs; at its start three temporaries of the square
    by_hand = 4 * WEIGHT * 3 + 16 + 5 * row + 3 * row
    prediction = predicted(chain(4), batch, train=True)
    assert by_hand <= prediction.peak_bytes <= by_hand + 64
    assert prediction.peak_bytes == pytest.approx(measured(chain(4), batch, train=True), rel=1e-4)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_one_predictor_answers_for_many_sizes(train: bool) -> None:
    predictor, model = Predictor(), chain(3)
    fake, optimizer = faked(predictor, model, train=train)
    for batch in (64, 1, 7, 64):
        found = predictor.peak(lambda size=batch: running(fake, size, optimizer), batch)  # type: ignore[misc]
        assert found == predicted(model, batch, train=train)


def test_the_parts_add_up_to_the_peak() -> None:
    prediction = predicted(chain(4), 64, train=True)
    parts = prediction.parts
    assert parts["weights"] == parts["gradients"] == 4 * WEIGHT
    assert parts["optimizer"] == 8 * WEIGHT + 16
    assert parts["example"] == 64 * WIDTH * 4
    assert parts["buffers"] == 0
    assert sum(parts.values()) == prediction.peak_bytes


def test_tied_weights_and_views_count_once() -> None:
    weight = torch.zeros(10, 10)
    assert bytes_of([weight, weight.T, weight[3]]) == 400


def test_a_storage_is_forgotten_when_it_dies() -> None:
    with LiveStorages() as live:
        first = torch.zeros(100)
        view = first.view(10, 10)
        second = first + 1
        assert (live.now, live.peak) == (800, 800)
        del first, second
        assert live.now == 400, "the view holds the first storage"
        del view
        assert (live.now, live.peak) == (0, 800)


@pytest.mark.parametrize(("changes", "top"), [((4, 4, -4, 2), 8), ((), 0), ((-5, 3), 0), ((1, 2, 3), 6)])
def test_the_highest_running_sum(changes: tuple[int, ...], top: int) -> None:
    assert highest(changes) == top


class Attends(nn.Module):
    """Every operator that holds scratch of its own: convolutions, attention's fast path, an expanded gradient."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.encoder(x.unsqueeze(1).expand(-1, 12, -1).contiguous())
        return result


class Convolves(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x.view(len(x), 2, 4, 4).repeat(1, 4, 4, 4))
        return result


MODELS: dict[str, Callable[[], nn.Module]] = {
    "attention": Attends,
    "convolution": lambda: Convolves(nn.Conv2d(8, 32, 3, padding=1), nn.ReLU()),
    "odd channels": lambda: Convolves(nn.Conv2d(8, 10, 3, padding=1), nn.ReLU()),
    "depthwise": lambda: Convolves(nn.Conv2d(8, 8, 3, padding=1, groups=8)),
    "pointwise alone": lambda: Convolves(nn.Conv2d(8, 8, 1)),
    "pointwise": lambda: Convolves(nn.Conv2d(8, 32, 1), nn.BatchNorm2d(32), nn.ReLU()),
    "upsampled": lambda: Convolves(nn.Upsample(scale_factor=2), nn.Conv2d(8, 8, 1)),
    "strided": lambda: Convolves(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3)),
}


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("batch", [1, 2, 16])
@pytest.mark.parametrize("name", MODELS)
def test_predictions_meet_measurements(name: str, batch: int, train: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().train(train)
    prediction = predicted(model, batch, train=train).peak_bytes
    assert prediction == pytest.approx(measured(model, batch, train=train), rel=0.05)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.cell(x.unsqueeze(0))[0]
        return result


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Recurrent(), r"cell \(LSTM\)"),
        (Convolves(nn.ConvTranspose2d(8, 8, 2)), "aten::convolution"),
        (Convolves(nn.Unflatten(1, (2, 4)), nn.Conv3d(2, 2, 2)), "aten::convolution"),
    ],
)
def test_what_is_not_known_is_refused(model: nn.Module, text: str) -> None:
    with pytest.raises(NoAnswer, match=text):
        predicted(model, 4, train=False)


def test_predicting_leaves_the_model_and_its_gradients_alone() -> None:
    model = chain(2)
    before = copy.deepcopy(model.state_dict())
    predicted(model, 4, train=True)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())


def prediction(batch: int, peak: int) -> Prediction:
    return Prediction(batch_size=batch, peak_bytes=peak, parts={"weights": 7})


def test_the_curve_is_the_line_through_the_two_largest_sizes() -> None:
    curve = memory_curve([prediction(8, 180), prediction(1, 150), prediction(64, 1300)], limit=10_000, limit_source="x")
    assert (curve.fixed_bytes, curve.bytes_per_item) == (20, 20.0)
    assert curve.parts == {"weights": 7}


def test_the_largest_that_is_predicted_to_fit_keeps_the_margin() -> None:
    predictions = [prediction(1, 110), prediction(2, 120)]
    curve = memory_curve(predictions, limit=1000, limit_source="your limit", margin=0.1)
    assert curve.predicted_largest == 80
    assert (curve.limit_bytes, curve.limit_source, curve.margin) == (1000, "your limit", 0.1)
    assert memory_curve(predictions, limit=50, limit_source="x").predicted_largest == 0


def test_memory_that_does_not_grow_has_no_largest() -> None:
    assert memory_curve([prediction(1, 9), prediction(4, 9)], limit=5, limit_source="x").predicted_largest is None


def test_a_curve_needs_two_sizes() -> None:
    with pytest.raises(ValueError, match="two batch sizes"):
        memory_curve([prediction(4, 9), prediction(4, 9)], limit=5, limit_source="x")
