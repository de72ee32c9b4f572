"""A step that runs out of memory, anywhere, ends as the step that did not: to the last bit, random state included."""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from microbatch.batch.size_limit import QUIET_STEPS
from microbatch.errors import DoesNotFit
from microbatch.training.ranks.one_process import OneProcess
from microbatch.training.result import StepResult
from microbatch.training.step import TrainStep

ITEMS, FIRST, SECOND = 16, 8, 4
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
}


class Failing:
    """Runs out of memory once, at the n-th call after it is armed."""

    def __init__(self) -> None:
        self.left: int | None = None

    def __call__(self, *_: Any) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Network(nn.Module):
    """Random in three ways, with statistics; `failing` sees each forward, `failing_back` each backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 3)
        self.failing, self.failing_back = Failing(), Failing()

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.dropout(self.norm(self.first(x)), 0.4, self.training)
        hidden = hidden * (1 + random.random() + float(np.random.rand()))
        self.failing()
        if hidden.requires_grad:
            hidden.register_hook(self.failing_back)
        result: Tensor = self.last(hidden)  # its gradients are there when the hook runs
        return result


class Ranks(OneProcess):
    def __init__(self) -> None:
        self.failing = Failing()

    def reduce_gradients(self, parameters: Any) -> None:
        next(iter(parameters)).grad.mul_(2)  # half a reduction, that must not stay
        self.failing()
        next(iter(parameters)).grad.mul_(0.5)


class Job:
    """A model, its step, and places that can fail."""

    def __init__(self, optimizer: str, size: int, *, steps: int, **options: Any) -> None:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(0)
        self.model = Network()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.step = TrainStep(
            self.model, self.optimizer, loss, forward=lambda m, b: m(b[0]), micro_batch_size=size, **options
        )
        self.step._ranks = self.ranks = Ranks()
        for number in range(steps):
            self.step(batch(number))

    def state(self) -> dict[str, Any]:
        """Everything that a step changes, flat."""
        found: dict[str, Any] = dict(self.model.state_dict())
        for number, parameter in enumerate(self.model.parameters()):
            found |= {f"{number}.{name}": value for name, value in self.optimizer.state.get(parameter, {}).items()}
            found[f"{number}.grad"] = parameter.grad
        draws = (torch.rand(3), random.random(), float(np.random.rand()))
        return found | {"torch": draws[0], "python": draws[1], "numpy": draws[2]}


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return (functional.cross_entropy(output, batch[1], reduction="none") * batch[1]).sum(), batch[1].sum()


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(ITEMS, 6, generator=generator), torch.randint(3, (ITEMS,), generator=generator)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value) if isinstance(value, Tensor) else found[name] == value, name


def break_optimizer(job: Job, when: str, times: int = 1) -> None:
    """Out of memory some times: before it moves anything, after half of the parameters, after all of them."""
    real, left = job.optimizer.step, [times]

    def step(*args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            return real(*args)
        group = job.optimizer.param_groups[0]
        whole = group["params"]
        group["params"] = {"before": [], "half": whole[: len(whole) // 2], "after": whole}[when]
        try:
            real(*args)
        finally:
            group["params"] = whole
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried"
        )

    job.optimizer.step = step  # type: ignore[method-assign, assignment]


def assert_retried(result: StepResult, phase: str, size: int = SECOND) -> None:
    assert [(a.micro_batch_size, a.phase, a.outcome) for a in result.attempts] == [
        (FIRST, phase, "out of memory"),
        (size, None, "done"),
    ]
    assert (result.micro_batch_size, result.num_micro_batches) == (size, ITEMS // size)


def run_both(
    optimizer: str, steps: int, arm: Callable[[Job], Any], size: int = SECOND, **options: Any
) -> tuple[StepResult, dict[str, Any], StepResult, dict[str, Any]]:
    """The last of some steps: once with a failure, once without it in the pieces of `size` that the retry makes."""
    job = Job(optimizer, FIRST, steps=steps, **options)
    arm(job)
    result = job.step(batch(steps))
    found = job.state()
    plain = Job(optimizer, FIRST, steps=steps, **options)
    plain.step.micro_batch_size = size
    return result, found, plain.step(batch(steps)), plain.state()


def fail_at(phase: str, piece: int) -> Callable[[Job], None]:
    def arm(job: Job) -> None:
        places = {"forward": job.model.failing, "backward": job.model.failing_back, "reduction": job.ranks.failing}
        places[phase].left = piece

    return arm


@pytest.mark.parametrize("optimizer", ["adamw", "sgd momentum"])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    ("phase", "piece"),
    [(phase, piece) for phase in ("forward", "backward") for piece in range(ITEMS // FIRST)] + [("reduction", 0)],
)
def test_a_failed_try_leaves_no_trace(phase: str, piece: int, steps: int, optimizer: str) -> None:
    result, found, expected, wanted = run_both(optimizer, steps, fail_at(phase, piece), max_norm=0.5)
    assert_retried(result, phase)
    assert (result.loss, result.grad_norm) == (expected.loss, expected.grad_norm)
    assert_same(found, wanted)


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("when", ["before", "half", "after"])
def test_an_update_that_failed_half_way_is_made_again(
    when: str, steps: int, optimizer: str, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place: from its start where copies were kept, which the first update always has, else from where it was."""
    monkeypatch.setattr("microbatch.training.memory.safeguard.SMALL", 1 << 20 if copied else 0)
    result, found, expected, wanted = run_both(optimizer, steps, lambda job: break_optimizer(job, when), FIRST)
    assert_retried(result, "optimizer", FIRST)
    assert result.loss == expected.loss
    assert_same(found, wanted)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("when", ["before", "half", "after"])
def test_one_that_fails_again_is_undone_and_the_step_redone(when: str, steps: int, optimizer: str) -> None:
    result, found, expected, wanted = run_both(optimizer, steps, lambda job: break_optimizer(job, when, 2))
    assert_retried(result, "optimizer")
    assert result.loss == expected.loss
    assert_same(found, wanted)


@pytest.mark.parametrize(("times", "size"), [(1, FIRST), (2, SECOND)])
def test_a_scaler_unscales_once(times: int, size: int) -> None:
    """The failed try had unscaled its gradients already."""
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1) for _ in range(2)]
    job = Job("adamw", FIRST, steps=0, scaler=scalers[0])
    break_optimizer(job, "half", times)
    assert_retried(job.step(batch(0)), "optimizer", size)
    found = job.state()
    plain = Job("adamw", size, steps=0, scaler=scalers[1])
    plain.step(batch(0))
    assert_same(found, plain.state())
    assert scalers[0].state_dict() == scalers[1].state_dict()


def test_a_large_update_that_moved_and_never_fits_is_said_and_not_done_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("microbatch.training.memory.safeguard.SMALL", 0)
    job = Job("adamw", FIRST, steps=2)
    job.optimizer.register_step_post_hook(out_of_memory)
    with pytest.raises(DoesNotFit, match=r"after it had changed 2[0-9] tensors"):
        job.step(batch(2))


def test_an_optimizer_that_counters_do_not_see_is_not_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may write through ``.data``; nothing can be known, and that is said."""

    class Own(torch.optim.SGD):
        pass

    monkeypatch.setattr("microbatch.training.memory.safeguard.SMALL", 0)
    monkeypatch.setitem(OPTIMIZERS, "own", lambda p: Own(p, lr=0.1))
    job = Job("own", FIRST, steps=2)
    break_optimizer(job, "half")
    with pytest.raises(DoesNotFit, match="after it had changed 6 tensors"):
        job.step(batch(2))


def test_an_optimizer_that_never_fits_ends_after_two_tries_with_the_weights_untouched() -> None:
    before = Job("adamw", FIRST, steps=2).state()
    job = Job("adamw", FIRST, steps=2)
    job.optimizer.register_step_post_hook(out_of_memory)
    with pytest.raises(DoesNotFit, match=r"Out of memory in optimizer .*tried 8, 4"):
        job.step(batch(2))
    assert_same(job.state(), before)


def out_of_memory(*_: Any) -> None:
    raise MemoryError


@pytest.mark.parametrize(
    "error", [ValueError("CUDA out of memory"), RuntimeError("shape mismatch"), KeyboardInterrupt("stop")]
)
def test_other_errors_pass_and_leave_all_as_it_was(error: BaseException) -> None:
    before = Job("adamw", FIRST, steps=1).state()
    calls: list[int] = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise error

    job = Job("adamw", FIRST, steps=1)
    job.model.last.register_forward_hook(fail)
    with pytest.raises(type(error), match=str(error)):
        job.step(batch(1))
    assert len(calls) == 2
    assert_same(job.state(), before)


def test_the_size_grows_back_and_waits_longer_where_that_failed() -> None:
    job = Job("sgd", ITEMS, steps=0)
    limit = [ITEMS // 4]
    job.model.register_forward_pre_hook(lambda _, args: limit_to(limit[0], args[0]))
    tried = [[a.micro_batch_size for a in job.step(batch(0)).attempts] for _ in range(4 * QUIET_STEPS)]
    assert tried[0] == [16, 8, 4]
    assert [(n, sizes) for n, sizes in enumerate(tried) if len(sizes) > 1][1:] == [
        (QUIET_STEPS + 1, [8, 4]),
        (3 * QUIET_STEPS + 2, [8, 4]),
    ]
    limit[0] = ITEMS
    sizes = [job.step(batch(0)).micro_batch_size for _ in range(8 * QUIET_STEPS)]
    assert sizes[0] == 4 and sizes[-1] == ITEMS and sizes == sorted(sizes)


def limit_to(limit: int, x: Tensor) -> None:
    if len(x) > limit:
        raise RuntimeError("std::bad_alloc")


def test_each_retry_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "microbatch"):
        run_both("sgd", 0, fail_at("backward", 1))
    assert [r.getMessage() for r in caplog.records if r.name == "microbatch.training.memory.retry"] == [
        "Out of memory in backward at micro-batch size 8 of 16 (CUDA: CUDA out of memory. Tried to allocate 2.00 GiB.);"
        " the step is done again at 4."
    ]


def test_nothing_of_the_failed_try_is_alive_at_the_next() -> None:
    """Not even in frames that the exception holds, nor in one that the user keeps."""
    job = Job("sgd", ITEMS, steps=0)
    kept: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    errors: list[BaseException] = []

    def watch(_: nn.Module, __: Any, output: Tensor) -> None:
        alive.append(sum(reference() is not None for reference in kept))
        kept.append(weakref.ref(output))

    def fail(*_: Any) -> None:
        if not errors:
            errors.append(MemoryError())
            raise errors[0]

    job.model.norm.register_forward_hook(watch)
    job.model.last.register_forward_hook(fail)
    job.step(batch(0))
    assert alive == [0, 0, 0]


def test_gradients_only_are_retried_too() -> None:
    job = Job("sgd", FIRST, steps=0)
    job.model.failing.left = 1
    assert len(job.step.accumulate(batch(0)).attempts) == 2
    found = job.state()
    plain = Job("sgd", SECOND, steps=0)
    plain.step.accumulate(batch(0))
    assert found["0.grad"] is not None
    assert_same(found, plain.state())
