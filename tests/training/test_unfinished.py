"""An update that runs out of memory at any of its operators ends as the one that did not, without a copy."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from microbatch.errors import DoesNotFit
from microbatch.training.memory import safeguard
from microbatch.training.step import TrainStep

STEPS = 1
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "sgd nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd nesterov foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, weight_decay=0.1),
    "adam foreach": lambda p: torch.optim.Adam(p, weight_decay=0.1, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, amsgrad=True, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, weight_decay=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, weight_decay=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, weight_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, weight_decay=0.1),
    "radam": lambda p: torch.optim.RAdam(p, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "asgd": lambda p: torch.optim.ASGD(p, weight_decay=0.1),
    "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor,
}

CANNOT = {"adadelta", "asgd", "adafactor"}
"""These change a state before a weight that depends on its old value."""


class FailsAt(TorchFunctionMode):
    """Counts calls of torch's functions; the one of a given number has no memory. Counters of versions still count."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left, self.failed = number, ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs)))
        if not tensors or func.__name__.startswith(("__get__", "is_")):  # these take no memory
            return func(*args, **(kwargs or {}))
        self.left -= 1
        if self.left == -1:
            self.failed = func.__name__
            raise MemoryError(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of collections of a large heap take minutes and are not what is tested here."""
    monkeypatch.setattr("microbatch.training.memory.recovery.release", lambda device: None)


class Job:
    """Two parameters, each in a group; the update of the last step fails at an operator."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(5, 3)
        self.optimizer = OPTIMIZERS[kind]([{"params": [p]} for p in self.model.parameters()])
        self.step = TrainStep(self.model, self.optimizer, squares, micro_batch_size=3)

    def run(self, steps: int, fails_at: int | None = None) -> tuple[Any, int]:
        """Result of the last step, and how many calls there were."""
        result: Any = None
        for number in range(steps):
            result = self.step(torch.randn(6, 5, generator=torch.Generator().manual_seed(number)))
        mode = self.mode = FailsAt(10**9 if fails_at is None else fails_at)
        real, armed = self.optimizer.step, [True]

        def update() -> Any:
            if armed and armed.pop():
                with mode:
                    return real()
            return real()

        self.optimizer.step = update  # type: ignore[method-assign, assignment]
        result = self.step(torch.randn(6, 5, generator=torch.Generator().manual_seed(steps)))
        return result, 10**9 - mode.left

    def state(self) -> list[Tensor]:
        states = [self.optimizer.state[parameter] for parameter in self.model.parameters()]
        values = [value for state in states for _, value in sorted(state.items())]
        return [*self.model.parameters(), *(torch.as_tensor(value) for value in values if value is not None)]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_goes_on_where_it_stopped(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safeguard, "SMALL", 0)
    logging.getLogger("microbatch").setLevel(logging.ERROR)
    plain = Job(kind)
    _, operators = plain.run(STEPS)
    wanted = copy.deepcopy(plain.state())
    assert operators >= 1
    for number in range(operators):
        job = Job(kind)
        try:
            result, _ = job.run(STEPS, number)
        except DoesNotFit:  # said, not guessed
            assert kind in CANNOT, (number, job.mode.failed)
            continue
        assert [(a.outcome, a.phase) for a in result.attempts] == [("out of memory", "optimizer"), ("done", None)], (
            number
        )
        found = job.state()
        assert len(found) == len(wanted)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)), number
    logging.getLogger("microbatch").setLevel(logging.NOTSET)


@pytest.mark.parametrize("kind", ["sgd momentum", "adam", "adamw foreach", "rmsprop"])
def test_the_first_update_is_undone_and_made_again(kind: str) -> None:
    plain = Job(kind)
    _, operators = plain.run(0)
    for number in range(operators):
        job = Job(kind)
        job.run(0, number)
        assert all(torch.equal(one, other) for one, other in zip(job.state(), plain.state(), strict=True)), number


@pytest.mark.parametrize("kind", ["adam", "adamw foreach", "rmsprop", "nadam"])
def test_the_first_update_without_room_for_copies(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """State that the failed update has created stays where its weights have moved."""
    monkeypatch.setattr(safeguard, "_copies", lambda tensors: None)
    plain = Job(kind)
    _, operators = plain.run(0)
    for number in range(operators):
        job = Job(kind)
        job.run(0, number)
        assert all(torch.equal(one, other) for one, other in zip(job.state(), plain.state(), strict=True)), number


def test_what_depends_on_lost_values_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer that moves a weight by another one's old value."""

    class Chained(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            first, second = self.param_groups[0]["params"][:2]
            with torch.no_grad():
                change = first.sum()
                first.mul_(2.0)
                second.add_(change)

    Chained.__module__ = "torch.optim.chained"
    monkeypatch.setattr(safeguard, "SMALL", 0)
    model = nn.Linear(3, 2)
    step = TrainStep(model, Chained(model.parameters(), lr=0.1), squares, micro_batch_size=3)
    step(torch.randn(6, 3))
    real, armed = step.optimizer.step, [True]

    def update() -> Any:
        if armed and armed.pop():
            with FailsAt(2):
                return real()
        return real()

    step.optimizer.step = update  # type: ignore[method-assign, assignment]
    with pytest.raises(DoesNotFit, match="after it had changed 1 tensors"):
        step(torch.randn(6, 3))


class Nothing(TorchDispatchMode):
    """Does nothing; but inside it "foreach" operators do not count."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("options", "mode"), [({"fused": True}, nullcontext), ({"foreach": True}, Nothing)])
def test_what_is_not_counted_is_not_guessed(options: Any, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safeguard, "SMALL", 0)
    monkeypatch.setitem(OPTIMIZERS, "uncounted", lambda p: torch.optim.AdamW(p, **options))
    job = Job("uncounted")
    job.step(torch.randn(6, 5))
    job.optimizer.register_step_post_hook(FailsOnce())
    with mode(), pytest.raises(DoesNotFit, match=r"after it had changed \d+ tensors"):
        job.step(torch.randn(6, 5))


class FailsOnce:
    done = False

    def __call__(self, *_: Any) -> None:
        if not self.done:
            self.done = True
            raise MemoryError


def squares(output: Tensor, _: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)
