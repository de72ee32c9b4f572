"""Modules behind the engine: stacked and unstacked, padded, the same answer alone and in a batch, faster layers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from microbatch.errors import InvalidBatch, InvalidModel, InvalidOutput
from microbatch.models.packed_linear import is_available
from microbatch.serving.engine import fast_linear
from microbatch.serving.engine.batcher import DynamicBatcher
from microbatch.serving.engine.fast_linear import PackedLinear, with_fast_linear
from microbatch.serving.engine.module_runner import ModuleRunner, rows_of, serving_copy
from microbatch.serving.engine.padded import Padded, without_padding
from microbatch.serving.engine.same_answer import difference


def mlp(width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.Dropout(0.5), nn.ReLU(), nn.Linear(width, 3))


class Encoder(nn.Module):
    """Mean over tokens; with a mask as it should be, or over the padding too."""

    def __init__(self, *, masked: bool, per_token: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 6)
        self.masked, self.per_token = masked, per_token

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        states = self.embedding(input_ids)
        if self.per_token:
            return {"states": states}
        weights = attention_mask.unsqueeze(-1).float() if self.masked else torch.ones_like(states)
        return {"mean": (states * weights).sum(1) / weights.sum(1)}


async def ask(engine: DynamicBatcher, items: list[Any]) -> list[Any]:
    return await engine.submit_many(items)


def test_a_module_gives_each_item_its_row_and_is_left_alone() -> None:
    model = mlp()
    items = list(torch.randn(20, 8))
    engine = DynamicBatcher(model, examples=items[:2], max_batch_size=8)
    found = asyncio.run(ask(engine, items))
    engine.close()
    assert model.training, "the one given keeps its mode"
    with torch.no_grad():
        expected = model.eval()(torch.stack(items))
    assert torch.allclose(torch.stack(found), expected, atol=1e-6)
    assert engine.report is not None and engine.report.exact


def test_weights_are_shared_not_copied() -> None:
    model = mlp()
    copied = serving_copy(model, "cpu")
    assert not copied.training
    assert [id(p) for p in copied.parameters()] == [id(p) for p in model.parameters()]


@pytest.mark.parametrize(
    "items",
    [
        [[1.0] * 8, [2.0] * 8],
        [torch.ones(8).numpy(), torch.zeros(8).numpy()],
        [(torch.ones(8),), (torch.zeros(8),)],
    ],
)
def test_items_of_other_kinds_are_stacked(items: list[Any]) -> None:
    runner = ModuleRunner(mlp().eval())
    found = runner(items)
    assert [tuple(row.shape) for row in found] == [(3,), (3,)]


def test_shapes_share_no_batch_and_a_wrong_one_fails_alone() -> None:
    model = nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    engine = DynamicBatcher(model, examples=[torch.randn(1, 10)])
    items = [torch.randn(1, 10), torch.randn(1, 12), torch.randn(3, 10), torch.randn(1, 10)]
    found = asyncio.run(ask(engine, items))
    engine.close()
    assert isinstance(found[2], RuntimeError)
    with torch.no_grad():
        for place in (0, 1, 3):
            assert torch.allclose(found[place], model(items[place].unsqueeze(0))[0], atol=1e-6)


def sequences(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 50, (length,), generator=generator) for length in lengths]


def test_sequences_of_different_lengths_are_padded_and_masked() -> None:
    items = sequences(3, 9, 5, 4, 30, 28)
    model = Encoder(masked=True)
    engine = DynamicBatcher(model, examples=sequences(3, 4), collate=Padded(), max_batch_size=4)
    found = asyncio.run(ask(engine, items))
    metrics = engine.metrics()
    engine.close()
    for item, row in zip(items, found):
        assert torch.allclose(row["mean"], model.embedding(item).mean(0), atol=1e-6)
    assert metrics.padded_work <= 1.5 * metrics.real_work


def test_items_with_a_mask_of_their_own_are_padded_too() -> None:
    items = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in sequences(4, 5, 6)]
    engine = DynamicBatcher(Encoder(masked=True), examples=items, max_batch_size=3)
    found = asyncio.run(ask(engine, items))
    assert max(engine.metrics().batch_sizes) > 1
    engine.close()
    assert all(torch.allclose(row["mean"], engine_mean(item), atol=1e-6) for item, row in zip(items, found))


def engine_mean(item: dict[str, Tensor]) -> Tensor:
    mean: Tensor = Encoder(masked=True).embedding(item["input_ids"]).mean(0)
    return mean


def test_rows_of_padding_are_taken_out_of_results() -> None:
    items = sequences(3, 4)
    model = Encoder(masked=True, per_token=True)
    engine = DynamicBatcher(model, examples=items, collate=Padded(per_token=True))
    found = asyncio.run(ask(engine, items))
    engine.close()
    assert [tuple(row["states"].shape) for row in found] == [(3, 6), (4, 6)]


def test_ragged_items_need_no_padding_where_the_model_takes_them() -> None:
    def nested(items: list[Tensor]) -> Tensor:
        return torch.nested.nested_tensor(items, layout=torch.jagged)

    items = [torch.randn(length, 8) for length in (2, 7, 3, 5)]
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    engine = DynamicBatcher(model, examples=items[:2], collate=nested, cost=len, max_batch_size=4)
    found = asyncio.run(ask(engine, items))
    metrics = engine.metrics()
    engine.close()
    with torch.no_grad():
        assert all(torch.allclose(row, model(item), atol=1e-6) for row, item in zip(found, items))
    assert metrics.padded_work == metrics.real_work


def test_a_copy_for_each_device_and_each_process() -> None:
    model, items = mlp().eval(), list(torch.randn(24, 8))
    with torch.no_grad():
        expected = model(torch.stack(items))
    for devices, processes in ((["cpu", "cpu"], False), (["cpu"], True)):
        engine = DynamicBatcher(model, examples=items[:2], max_batch_size=4, devices=devices, processes=processes)
        found = asyncio.run(ask(engine, items))
        assert engine.metrics().workers_alive == len(devices)
        engine.close()
        assert torch.allclose(torch.stack(found), expected, atol=1e-6)


# Same answer.


def test_padding_that_leaks_does_not_start() -> None:
    with pytest.raises(InvalidModel, match="another answer in a batch"):
        DynamicBatcher(Encoder(masked=False), examples=sequences(3, 4, 4), collate=Padded()).start()


def test_a_model_that_mixes_rows_does_not_start_and_the_module_is_named() -> None:
    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0, keepdim=True)

    with pytest.raises(InvalidModel, match=r"Cause: 1 \(batch_statistic"):
        DynamicBatcher(nn.Sequential(nn.Linear(4, 4), Centred()), examples=[torch.randn(4)]).start()


def test_it_may_be_accepted(caplog: pytest.LogCaptureFixture) -> None:
    def ranks(items: list[float]) -> list[int]:
        return [sorted(items).index(item) for item in items]

    engine = DynamicBatcher(ranks, examples=[3.0, 1.0, 2.0], check="warn").start()
    assert "another answer" in caplog.text
    assert engine.report is not None and not engine.report.exact
    engine.close()
    off = DynamicBatcher(ranks, examples=[3.0, 1.0], check="off").start()
    assert off.report is None
    off.close()


def test_chance_is_named_as_the_cause() -> None:
    with pytest.raises(InvalidModel, match="second time"):
        DynamicBatcher(lambda items: [float(torch.rand(())) for _ in items], examples=[1.0]).start()


@pytest.mark.parametrize(
    ("one", "other", "gap"),
    [
        (torch.ones(3), torch.ones(3), 0.0),
        (torch.tensor([2.0, 4.0]), torch.tensor([2.0, 3.0]), 0.25),
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ({"a": "x"}, {"a": "x"}, 0.0),
        ({"a": "x"}, {"a": "y"}, float("inf")),
        ([1.0], [1.0, 2.0], float("inf")),
        (float("nan"), float("nan"), 0.0),
        (float("nan"), 1.0, float("inf")),
    ],
)
def test_difference_of_results(one: Any, other: Any, gap: float) -> None:
    assert difference(one, other) == gap


# Results.


def test_outputs_become_rows() -> None:
    output = {"a": torch.arange(4).reshape(2, 2), "b": (torch.zeros(2), torch.ones(2)), "c": None}
    first, second = rows_of(output, 2)
    assert first["a"].tolist() == [0, 1]
    assert [float(part) for part in second["b"]] == [0.0, 1.0]
    for wrong in (torch.zeros(()), torch.zeros(3, 2), "text"):
        with pytest.raises(InvalidOutput):
            rows_of(wrong, 2)


@given(st.integers(1, 9), st.integers(1, 9))
def test_padding_is_cut_once(length: int, longest: int) -> None:
    longest = max(length, longest)
    assert without_padding({"x": torch.zeros(longest, 2)}, longest, length)["x"].shape == (length, 2)


def test_an_error_of_collate_is_its_items_own() -> None:
    engine = DynamicBatcher(Encoder(masked=True), collate=Padded(), length=lambda item: 3, max_batch_size=4)
    found = asyncio.run(ask(engine, [*sequences(3, 3), torch.zeros(1, 1), *sequences(3)]))
    engine.close()
    assert [isinstance(each, InvalidBatch) for each in found] == [False, False, True, False]


def test_an_item_that_is_no_sequence() -> None:
    with pytest.raises(InvalidBatch, match="not \\(tokens,\\)"):
        Padded()([torch.zeros(2, 2)])


# Faster linear layers.

needs_packing = pytest.mark.skipif(not is_available(), reason="this torch has no packed linear layers")


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 8, 33])
def test_a_packed_layer_gives_the_same_up_to_rounding(dtype: torch.dtype, rows: int) -> None:
    if not is_available(dtype):
        pytest.skip(f"no packed linear layers in {dtype} on this processor")
    torch.manual_seed(0)
    for bias in (True, False):
        layer = nn.Linear(160, 192, bias=bias).to(dtype)
        x = torch.randn(rows, 160).to(dtype)
        with torch.no_grad():
            expected, found = layer(x), PackedLinear(layer, 8)(x)
            nested = PackedLinear(layer, 8)(x.reshape(1, rows, 160))
        bound = 1e-5 if dtype is torch.float32 else 5e-2
        assert torch.allclose(found, expected, rtol=bound, atol=bound)
        assert torch.allclose(nested[0], expected, rtol=bound, atol=bound)


@needs_packing
def test_the_model_itself_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_linear, "_best_rows", lambda layer: 8)
    model = nn.Sequential(nn.Linear(160, 160), nn.ReLU(), nn.Linear(160, 160), nn.Linear(4, 4)).eval()
    before = [type(layer) for layer in model]
    fast = with_fast_linear(model[:3])
    assert [type(layer) for layer in fast.children()] == [PackedLinear, nn.ReLU, PackedLinear]
    assert [type(layer) for layer in model] == before
    x = torch.randn(5, 160)
    with torch.no_grad():
        assert torch.allclose(fast(x), model[:3](x), atol=1e-5)


@needs_packing
def test_only_plain_layers_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_linear, "_best_rows", lambda layer: 8)

    class Own(nn.Linear):
        pass

    hooked = nn.Linear(160, 160)
    hooked.register_forward_hook(lambda *_: None)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(160, 160))
    model = nn.Sequential(Own(160, 160), hooked, normed, nn.Linear(8, 8), nn.Linear(160, 160).double())
    assert with_fast_linear(model) is model


@needs_packing
def test_a_layer_whose_answer_differs_or_that_is_not_faster_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(160, 160)
    monkeypatch.setattr(fast_linear, "FASTER", -1.0)
    assert with_fast_linear(layer) is layer
    monkeypatch.setattr(fast_linear, "FASTER", 1e9)
    assert isinstance(with_fast_linear(nn.Sequential(layer))[0], PackedLinear)  # type: ignore[index]
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: nn.functional.linear(x, layer.weight) + 1)
    assert with_fast_linear(layer) is layer


def test_a_compiled_model_runs_only_at_warmed_sizes() -> None:
    sizes: set[int] = set()

    class Seen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            sizes.add(len(x))
            return 2 * x

    model = Seen().eval()
    model._compiled_call_impl = model._call_impl  # as compile() leaves it, uncompiled
    engine = DynamicBatcher(model, examples=[torch.ones(2)], max_batch_size=8)
    engine.start()
    found = asyncio.run(ask(engine, list(torch.randn(30, 2))))
    engine.close()
    assert len(found) == 30
    assert sizes <= {1, 2, 4, 8}
