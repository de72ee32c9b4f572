"""Checkpoints of one process: what they hold, what is refused, what is damaged; nothing in them runs."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from microbatch.batch.size_limit import SizeLimit
from microbatch.errors import InvalidCheckpoint, InvalidSettings
from microbatch.training.checkpoints.folder import checkpoints
from microbatch.training.checkpoints.plain_values import Packer, places, unpack
from microbatch.training.step import TrainStep

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
}

SCHEDULERS: dict[str, Any] = {
    "none": lambda o: None,
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "milestones": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 3, 3]),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
}


class Tied(nn.Module):
    """Tied weights, a buffer, a batch norm, a parameter that is never used and one that is frozen."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.into = nn.Linear(width, width, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(width, dtype=torch.float64)
        self.out = nn.Linear(width, width, dtype=torch.float64)
        self.out.weight = self.into.weight
        self.unused = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=False)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.dropout(self.norm(self.into(x)))) * self.frozen
        return out


def loss(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


def step_of(optimizer: str = "adamw", scheduler: str = "none", *, size: int = 8, width: int = 4) -> TrainStep:
    torch.manual_seed(0)
    model = Tied(width)
    made = OPTIMIZERS[optimizer](model.parameters())
    return TrainStep(model, made, loss, micro_batch_size=size, scheduler=SCHEDULERS[scheduler](made))


def batch_of(number: int) -> Tensor:
    return torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def trained(step: TrainStep, steps: range) -> list[Any]:
    """Weights, buffers and rates after these steps."""
    for number in steps:
        step(batch_of(number))
    return [*(v.tolist() for v in step.model.state_dict().values()), [g["lr"] for g in step.optimizer.param_groups]]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_goes_on_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    step = step_of(optimizer, "cosine")
    trained(step, range(3))
    step.save(tmp_path)
    expected = trained(step, range(3, 6))
    other = step_of(optimizer, "cosine")
    torch.manual_seed(99)
    assert other.load(tmp_path) == tmp_path / "000001-step-3"
    assert (other.steps, other.samples) == (3, 24)
    assert trained(other, range(3, 6)) == expected


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_schedule_goes_on(scheduler: str, tmp_path: Path) -> None:
    step = step_of("momentum", scheduler)
    trained(step, range(2))
    step.save(tmp_path)
    expected = trained(step, range(2, 5))
    other = step_of("momentum", scheduler)
    other.load(tmp_path)
    assert trained(other, range(2, 5)) == expected


def test_before_the_first_step_nothing_is_counted(tmp_path: Path) -> None:
    step = step_of("adam")
    step.save(tmp_path)
    assert not step.optimizer.state
    kept = copy.deepcopy(step.state_dict())
    assert not step.optimizer.state
    expected = trained(step, range(2))
    other = step_of("adam")
    trained(other, range(1))
    other.load(tmp_path)
    assert trained(other, range(2)) == expected
    other.load_state_dict(kept)
    assert trained(other, range(2)) == expected


def test_a_running_step_goes_back(tmp_path: Path) -> None:
    step = step_of()
    trained(step, range(2))
    step.save(tmp_path)
    expected = trained(step, range(2, 4))
    step.load(tmp_path)
    assert trained(step, range(2, 4)) == expected


def test_the_state_goes_through_torch_save_without_running_anything(tmp_path: Path) -> None:
    step = step_of()
    trained(step, range(2))
    torch.save(step.state_dict(), tmp_path / "state.pt")
    expected = trained(step, range(2, 4))
    other = step_of()
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert trained(other, range(2, 4)) == expected


def test_python_and_numpy_go_on_with_their_random_numbers(tmp_path: Path) -> None:
    step = step_of()
    step.save(tmp_path)
    expected = random.random(), np.random.random(), torch.rand(1).item()
    step.load(tmp_path)
    assert (random.random(), np.random.random(), torch.rand(1).item()) == expected


def test_what_was_learnt_about_memory_is_kept(tmp_path: Path) -> None:
    step = step_of()
    step._recovery.limit = SizeLimit(largest=3, quiet=4, patience=20)
    step._weights_differ = True
    step.save(tmp_path)
    other = step_of()
    other.load(tmp_path)
    assert other._recovery.limit == SizeLimit(largest=3, quiet=4, patience=20)
    assert other._weights_differ
    assert other(batch_of(0)).micro_batch_size == 3


def test_a_loss_scale_goes_on(tmp_path: Path) -> None:
    def scaled() -> TrainStep:
        model = nn.Linear(4, 4)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        return TrainStep(model, torch.optim.SGD(model.parameters()), loss, micro_batch_size=4, scaler=scaler)

    step = scaled()
    for number in range(3):
        step(batch_of(number).float())
    step.save(tmp_path)
    other = scaled()
    other.load(tmp_path)
    assert other.scaler is not None and step.scaler is not None
    assert other.scaler.state_dict() == step.scaler.state_dict()
    assert other.scaler.get_scale() == 2048.0


def test_a_parameter_outside_of_the_model_goes_on(tmp_path: Path) -> None:
    def learning() -> tuple[TrainStep, nn.Parameter]:
        torch.manual_seed(0)
        model, temperature = nn.Linear(4, 4, dtype=torch.float64), nn.Parameter(torch.ones(1, dtype=torch.float64))
        optimizer = torch.optim.Adam([*model.parameters(), temperature], lr=0.1)

        def warm(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
            return (output * temperature).square().sum(), len(output)

        return TrainStep(model, optimizer, warm, micro_batch_size=8), temperature

    step, temperature = learning()
    step(batch_of(0))
    step.save(tmp_path)
    kept = copy.deepcopy(step.state_dict())
    step(batch_of(1))
    for from_folder in (True, False):
        other, again = learning()
        if from_folder:
            other.load(tmp_path)
        else:
            other.load_state_dict(kept)
        other(batch_of(1))
        assert again.item() == temperature.item() != 1.0


def test_fp32_state_of_bf16_weights_keeps_its_bits(tmp_path: Path) -> None:
    def narrow() -> TrainStep:
        torch.manual_seed(0)
        model = nn.Linear(4, 4, dtype=torch.bfloat16)
        return TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loss, micro_batch_size=8)

    step = narrow()
    step(batch_of(0).bfloat16())
    weight = step.optimizer.param_groups[0]["params"][0]
    step.optimizer.state[weight]["momentum_buffer"] = torch.full((4, 4), 1 + 1e-6)
    step.save(tmp_path)
    other = narrow()
    other.load(tmp_path)
    (state, *_) = other.optimizer.state.values()
    assert torch.equal(state["momentum_buffer"], torch.full((4, 4), 1 + 1e-6))


def test_channels_last_weights_are_saved(tmp_path: Path) -> None:
    def convolution() -> TrainStep:
        torch.manual_seed(0)
        model: nn.Module = nn.Conv2d(3, 4, 3)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return TrainStep(model, torch.optim.Adam(model.parameters()), loss, micro_batch_size=2)

    step, images = convolution(), torch.randn(2, 3, 5, 5)
    step(images)
    step.save(tmp_path)
    step(images)
    other = convolution()
    other.load(tmp_path)
    other(images)
    assert all(torch.equal(a, b) for a, b in zip(step.model.parameters(), other.model.parameters()))


def test_the_last_few_stay_and_the_newest_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    step = step_of()
    with caplog.at_level(logging.INFO):
        assert step.load(tmp_path / "none") is None
    assert "no checkpoint" in caplog.text
    (tmp_path / ".000009-step-1.part").mkdir()
    for number in range(4):
        step(batch_of(number))
        step.save(tmp_path, keep=2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["000003-step-3", "000004-step-4"]
    step.load(tmp_path / "000003-step-3")
    assert step.steps == 3
    step.save(tmp_path, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["000005-step-3", "000004-step-4"]
    with pytest.raises(InvalidSettings):
        step.save(tmp_path, keep=0)


def flip(file: Path) -> None:
    """One bit, in the middle."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


DAMAGES: dict[str, Any] = {
    "a bit of the tensors": lambda path: flip(next(path.glob("*.safetensors"))),
    "a bit of the values": lambda path: flip(path / "state.json"),
    "half of the tensors": lambda path: next(path.glob("*.safetensors")).write_bytes(b"\0" * 100),
    "no tensors": lambda path: next(path.glob("*.safetensors")).unlink(),
    "no values": lambda path: (path / "state.json").unlink(),
    "no list": lambda path: (path / "files.json").unlink(),
    "an empty list": lambda path: (path / "files.json").write_text("{}"),
    "half of the list": lambda path: (path / "files.json").write_text('{"state.json": [1'),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = step_of()
    step(batch_of(0))
    old = step.save(tmp_path)
    step(batch_of(1))
    new = step.save(tmp_path)
    DAMAGES[what](new)
    assert step.load(tmp_path) == old
    assert step.steps == 1
    assert new.name in caplog.text
    before = trained(step, range(0))
    DAMAGES[what](old)
    with pytest.raises(InvalidCheckpoint, match=old.name if what == "no list" else new.name):
        step.load(old if what == "no list" else tmp_path)
    assert trained(step, range(0)) == before


OTHERS: dict[str, Any] = {
    "another width": (lambda: step_of(width=6), r"into\.\w+ is torch.float64 of shape \(4"),
    "another model": (lambda: plain(nn.Sequential(nn.Linear(4, 4))), "The model has no "),
    "another dtype": (lambda: plain(Tied().float()), "torch.float32"),
    "other groups": (lambda: plain(Tied(), only=1), "groups"),
}


def plain(model: nn.Module, only: int | None = None) -> TrainStep:
    optimizer = torch.optim.AdamW(list(model.parameters())[:only], lr=0.1)
    return TrainStep(model, optimizer, loss, micro_batch_size=8)


@pytest.mark.parametrize("what", OTHERS)
def test_a_checkpoint_of_something_else_is_refused(what: str, tmp_path: Path) -> None:
    step_of().save(tmp_path)
    other, text = OTHERS[what][0](), OTHERS[what][1]
    before = [p.detach().clone() for p in other.model.parameters()]
    with pytest.raises(InvalidCheckpoint, match=text):
        other.load(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before, other.model.parameters()))


def test_a_scheduler_that_only_one_side_has_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    step_of("adam", "cosine").save(tmp_path)
    step_of("adam").load(tmp_path)
    assert "has a scheduler and the step has none" in caplog.text


class Runs:
    """What a pickle of it would run."""

    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('it ran')",))


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of()
    step(batch_of(0))
    path = step.save(tmp_path)
    for file in path.iterdir():
        assert file.suffix in (".json", ".safetensors")
    (path / ".metadata").write_bytes(pickle.dumps(Runs()))  # what torch's own reader would unpickle

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    assert step.load(tmp_path) == path


@pytest.mark.parametrize("value", [Runs(), print, {1, 2}, object()], ids=["object", "function", "set", "bare"])
def test_what_is_no_plain_value_is_not_saved(value: Any) -> None:
    with pytest.raises(InvalidCheckpoint, match=r"scheduler/fn/0 is a"):
        Packer().pack({"scheduler": {"fn": [value]}})


def test_plain_values_come_back_as_they_were() -> None:
    tensor = torch.arange(3.0)
    values = {
        "numbers": [1, 2.5, True, None, float("inf"), 1e-300],
        "tuple": (1, (2, "x")),
        3: b"\0\xff",
        "counter": Counter({2: 1, 5: 3}),
        "~": "a key of ours",
        "numpy": np.float64(0.1),
        "nested": {"a": tensor, "tied": tensor, "view": tensor[:2]},
    }
    packer = Packer()
    packed = json.loads(json.dumps(packer.pack(values)))
    assert sorted(packer.tensors) == ["nested/a", "nested/view"]
    assert [place.key for place in places(packed)] == ["nested/a", "nested/a", "nested/view"]
    found = unpack(packed, packer.tensors)
    assert type(found["counter"]) is Counter
    nested, _ = found.pop("nested"), values.pop("nested")
    assert nested["tied"] is nested["a"] and torch.equal(nested["view"], tensor[:2])
    assert found == values


def test_a_value_of_a_kind_that_is_not_known_is_refused() -> None:
    with pytest.raises(InvalidCheckpoint, match="'code'"):
        unpack({"~": "code", "text": "1"}, {})
