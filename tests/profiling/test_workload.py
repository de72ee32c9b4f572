"""A workload runs at any size, in any mode and dtype, and leaves no trace."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from microbatch.errors import InvalidModel, InvalidSettings
from microbatch.measure.memory import measure_peak_bytes
from microbatch.measure.timer import time_call
from microbatch.profiling.loss import loss_of
from microbatch.profiling.optimizers import add_weights_to_gradients
from microbatch.profiling.workload import MODES, TIMES_ADDED, Workload, structure_of


class Net(nn.Module):
    """Dropout, batch norm and a frozen layer: everything that a run could leave changed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5)
        self.last = nn.Linear(16, 4)
        self.first.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.drop(self.norm(self.first(x)).relu()))
        return result


X = torch.randn(2, 8)


def state_of(model: nn.Module) -> dict[str, Any]:
    return {
        "values": copy.deepcopy(model.state_dict()),
        "training": [module.training for module in model.modules()],
        "wants": [parameter.requires_grad for parameter in model.parameters()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "identities": [id(parameter) for parameter in model.parameters()],
        "random": torch.get_rng_state(),
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for name in ("training", "wants", "identities"):
        assert before[name] == after[name], name
    assert all(torch.equal(value, after["values"][key]) for key, value in before["values"].items())
    assert torch.equal(before["random"], after["random"])
    for old, new in zip(before["gradients"], after["gradients"], strict=True):
        assert (old is None) == (new is None)
        assert old is None or torch.equal(old, new)


@pytest.mark.parametrize("training", [True, False], ids=["was training", "was evaluating"])
@pytest.mark.parametrize("dtype", [None, "fp32", "bf16", "fp64"])
@pytest.mark.parametrize("mode", MODES)
def test_the_model_is_left_as_it_was(mode: str, dtype: str | None, training: bool) -> None:
    model = Net().train(training)
    model(torch.randn(4, 8)).sum().backward()
    before = state_of(model)
    with Workload(model, (X,), mode=mode, dtype=dtype) as workload:
        for size in (3, 1 if mode == "inference" else 2):
            workload.prepare(size)()
        workload.measure_peak_bytes(4)
        workload.predict_peak(4)
    assert_same(before, state_of(model))


def test_a_model_that_raises_is_left_as_it_was_too() -> None:
    class Fails(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.norm.running_mean.zero_()  # type: ignore[union-attr]
            raise LookupError("no such token")

    model = Fails()
    model.norm.running_mean.fill_(3.0)  # type: ignore[union-attr]
    before = state_of(model)
    with Workload(model, (X,)) as workload, pytest.raises(LookupError, match="no such token"):
        workload.prepare(2)()
    assert_same(before, state_of(model))


def test_inference_runs_the_users_own_model_at_the_wanted_size() -> None:
    model = Net()
    with Workload(model, (X,)) as workload:
        assert workload.model is model
        assert not model.training
        output = workload.prepare(5)()
        assert isinstance(output, Tensor)
        assert output.shape == (5, 4) and not output.requires_grad
        assert torch.equal(output[:2], output[2:4]), "items are the example's, repeated"
    assert (workload.batch_size, workload.dtype) == (2, "fp32")


@pytest.mark.parametrize("dtype", ["fp64", "bf16", "fp16"])
def test_another_dtype_converts_floats_and_leaves_ids(dtype: str) -> None:
    class Embeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 8)
            self.seen: list[torch.dtype] = []

        def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
            self.seen[:] = [ids.dtype, scale.dtype]
            result: Tensor = self.table(ids) * scale
            return result

    model = Embeds()
    with Workload(model, (torch.tensor([1, 9]),), {"scale": torch.ones(2, 1)}, dtype=dtype) as workload:
        output = workload.prepare(3)()
        assert isinstance(output, Tensor)
        copied = workload.model
    assert isinstance(copied, Embeds) and copied is not model
    assert copied.seen == [torch.int64, output.dtype]
    assert workload.dtype == dtype and output.dtype != torch.float32


def test_training_does_forward_backward_and_a_step() -> None:
    steps: list[str] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            steps.append("step")
            assert all(p.grad is not None for p in self.param_groups[0]["params"])
            super().step()

    with Workload(Net(), (X,), mode="training", optimizer=lambda p: Watched(p, lr=100.0)) as workload:
        step = workload.prepare(4)
        before = copy.deepcopy(workload.model.state_dict())
        for _ in range(3):
            step()
        assert steps == ["step"] * 3
        assert all(p.grad is None for p in workload.model.parameters())
        weights = workload.model.state_dict()
        assert torch.equal(weights["last.weight"], before["last.weight"]), "profiling must not move the weights"
        assert not torch.equal(weights["norm.running_mean"], before["norm.running_mean"]), "it did run in training mode"


def test_a_step_that_failed_leaves_no_gradients_to_the_next() -> None:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        output.sum().backward(retain_graph=True)
        raise MemoryError

    with Workload(nn.Linear(8, 4), (X,), mode="training", loss=loss) as workload:
        with pytest.raises(MemoryError):
            workload.prepare(2)()
        assert any(p.grad is not None for p in workload.model.parameters())
        workload.prepare(1)
        assert all(p.grad is None for p in workload.model.parameters())


def test_a_model_that_fake_tensors_cannot_follow_raises_and_can_be_asked_again() -> None:
    class Depends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.sum().item() if len(x) > 4 else x

    with Workload(Depends(), (X,)) as workload:
        assert workload.predict_peak(3).peak_bytes > 0
        for _ in range(2):
            with pytest.raises(Exception, match="_local_scalar_dense"):
                workload.predict_peak(8)
        assert workload.predict_peak(3).batch_size == 3
        assert torch.as_tensor(workload.prepare(8)()).shape == (8, 8)


def test_frozen_parts_stay_in_eval_mode() -> None:
    model = Net()
    model.norm.eval()
    with Workload(model, (X,), mode="training") as workload:
        assert workload.model.training and not workload.model.norm.training  # type: ignore[union-attr]


def test_the_users_loss_gets_output_and_batch() -> None:
    seen: list[Any] = []

    def loss(output: Tensor, batch: Any) -> dict[str, tuple[Tensor, float]]:
        seen.append(batch)
        return {"a": (output.sum(), 4.0), "b": (output.square().sum(), 2.0)}

    model = nn.Linear(8, 4)
    with Workload(model, (X,), mode="training", loss=loss) as workload:
        value = workload.prepare(2)()
    output = model(X)
    assert torch.equal(seen[0], X)
    assert torch.allclose(torch.as_tensor(value), (output.sum() / 4 + output.square().sum() / 2).detach())


@pytest.mark.parametrize(
    ("args", "kwargs", "wanted"),
    [((1,), {}, 1), ((1, 2), {}, (1, 2)), ((), {"x": 1}, {"x": 1}), ((1,), {"x": 2}, ((1,), {"x": 2}))],
)
def test_the_batch_has_the_form_of_the_call(args: tuple[Any, ...], kwargs: dict[str, Any], wanted: object) -> None:
    seen: list[object] = []

    def loss(output: Tensor, batch: object) -> tuple[Tensor, int]:
        seen.append(batch)
        return output, 1

    loss_of(loss, torch.ones(1, requires_grad=True).sum(), args, kwargs, 1)
    assert seen == [wanted]


def test_without_a_loss_every_floating_output_counts() -> None:
    w = torch.full((2, 3), 2.0, requires_grad=True)
    output = {"logits": w, "more": (w[:, :1], [torch.ones(2), None, torch.tensor([1, 2])])}
    assert loss_of(None, output, (), {}, 2).item() == (6 * 4 + 2 * 4) / 2


@pytest.mark.parametrize(
    ("loss", "error", "text"),
    [
        (lambda output, batch: output.sum(), InvalidSettings, "sum, weight"),
        (lambda output, batch: (output.detach().sum(), 1), InvalidModel, "depends on no parameter"),
    ],
)
def test_a_loss_that_cannot_be_trained_for(loss: Callable[..., Any], error: type[Exception], text: str) -> None:
    with Workload(nn.Linear(8, 4), (X,), mode="training", loss=loss) as workload, pytest.raises(error, match=text):
        workload.prepare(2)()


def test_a_model_without_anything_to_train_is_refused() -> None:
    with pytest.raises(InvalidModel, match="no parameter to train"):
        Workload(nn.ReLU(), (X,), mode="training")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "evaluate"}, "no mode 'evaluate'"),
        ({"loss": lambda output, batch: (output, 1)}, "no loss"),
        ({"dtype": "int3"}, "'int3'"),
        ({"dtype": "tf32"}, "no tf32 on cpu"),
        ({"mode": "training", "optimizer": torch.optim.SGD([torch.zeros(1)])}, "bound to the model's own"),
    ],
)
def test_settings_that_make_no_sense(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidSettings, match=text):
        Workload(nn.Linear(8, 4), (X,), **options)


def test_an_example_with_two_batch_sizes_is_refused() -> None:
    with pytest.raises(InvalidModel, match="two batch sizes"):
        Workload(nn.Bilinear(8, 8, 4), (X, torch.zeros(3, 8)))


class Grows(nn.Module):
    """Appends to its cache, as a decoder with a key-value cache does."""

    def forward(self, x: Tensor, *, cache: list[Tensor]) -> Tensor:
        cache.append(x)
        return torch.cat(cache)


def test_every_call_gets_the_same_cache() -> None:
    cache = [torch.zeros(2, 8)]
    with Workload(Grows(), (X,), {"cache": cache}) as workload:
        step = workload.prepare(3)
        shapes = [torch.as_tensor(step()).shape for _ in range(3)]
    assert shapes == [(6, 8)] * 3
    assert len(cache) == 1


@pytest.mark.parametrize("mode", MODES)
def test_peaks_are_predicted(mode: str) -> None:
    with Workload(Net(), (X,), mode=mode) as workload:
        for size in (2, 64):
            wanted = workload.measure_peak_bytes(size)
            assert workload.predict_peak(size).peak_bytes == pytest.approx(wanted, rel=0.05)


def test_one_graph_for_each_size_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    limit = torch._dynamo.config.recompile_limit
    sizes = range(2, 2 + limit + 3)
    with Workload(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), (X,), compile=True) as workload:
        for size in sizes:
            step = workload.prepare(size)
            assert torch.as_tensor(step()).shape == (size, 8)
            step()
        assert workload.compile_count == len(sizes)
        assert workload.compile_seconds is not None and workload.compile_seconds > 0
    assert torch._dynamo.config.recompile_limit == limit


def test_without_compiling_there_is_nothing_to_count() -> None:
    with Workload(nn.Linear(8, 4), (X,)) as workload:
        assert workload.compile_count is None and workload.compile_seconds is None


def test_the_structure_knows_shapes_and_classes_but_no_dtype() -> None:
    model = Net()
    assert structure_of(model) == structure_of(Net().double())
    assert structure_of(nn.Linear(8, 4)) != structure_of(nn.Linear(4, 8))
    assert structure_of(nn.Sequential(nn.ReLU())) != structure_of(nn.Sequential(nn.GELU()))
    assert len(structure_of(model)) == 64


def test_an_example_made_by_size_is_what_the_model_gets() -> None:
    seen: list[Tensor] = []

    class Watcher(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x)
            return x

    def make(batch: int) -> tuple[tuple[object, ...], dict[str, object]]:
        return (torch.arange(batch, dtype=torch.float32)[:, None],), {}

    args, kwargs = make(2)
    with Workload(Watcher(), args, kwargs, mode="decode", example_at=make) as work:
        work.prepare(5)()
        assert not work.trains and not work.repeats_rows
    assert seen[0].flatten().tolist() == [0, 1, 2, 3, 4]


class SleepyOptimizer(torch.optim.SGD):
    """An update that takes at least 20 ms."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        time.sleep(0.02)
        super().step()


def test_the_update_is_timed_apart_from_forward_and_backward() -> None:
    class SleepyModel(Net):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.03)
            return super().forward(x)

    with Workload(SleepyModel(), (X,), mode="training", optimizer=lambda p: SleepyOptimizer(p, lr=0.1)) as workload:
        before = workload.update_seconds
        assert before is None, "nothing ran yet"
        whole = time_call(workload.prepare(4))
        assert workload.update_seconds is not None
        assert 0.02 <= workload.update_seconds <= whole - 0.03
    with Workload(Net(), (X,)) as workload:
        workload.prepare(4)()
        assert workload.update_seconds is None


def test_adding_gradients_is_timed_on_those_of_the_model() -> None:
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 4))
    with Workload(model, (torch.tensor([1, 2]),), mode="training", optimizer=torch.optim.SGD) as workload:
        seconds = workload.time_adding(3)
        assert len(seconds) == TIMES_ADDED and all(value > 0 for value in seconds)
        assert all(parameter.grad is None for parameter in workload.model.parameters())
    weight, idle = nn.Parameter(torch.full((2,), 3.0)), nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(2)
    add_weights_to_gradients([weight, idle])
    assert weight.grad.tolist() == [4.0, 4.0] and idle.grad is None


@pytest.mark.parametrize("size", [2, 64])
def test_peaks_beside_the_gradients_of_earlier_pieces_are_predicted(size: int) -> None:
    """The real thing: forward, backward and update while gradients stand, against a prediction that ran nothing."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    with Workload(model, (torch.randn(2, 64),), mode="training") as workload:
        alone = workload.predict_peak(size).peak_bytes
        beside = workload.predict_peak(size, beside_gradients=True).peak_bytes
        step = workload.prepare(size)
        step()
        for parameter in workload.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        held = [*workload.model.parameters(), *(p.grad for p in workload.model.parameters() if p.grad is not None)]
        optimizer = workload._optimizer
        assert optimizer is not None
        held += [value for state in optimizer.state.values() for value in state.values()]
        args, _ = workload.example(size)
        wanted = measure_peak_bytes(step, held=[*held, *(a for a in args if isinstance(a, Tensor))])
    assert beside == pytest.approx(wanted, rel=0.05)
    assert beside >= alone
