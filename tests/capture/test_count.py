"""Counted work against closed forms written here from shapes alone, and the model left as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from microbatch.capture.count import Count, count
from microbatch.errors import InvalidModel, InvalidSettings
from microbatch.models.built_in import BUILT_IN, build


class Calls(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> object:
        return self.function(*args)


def _flops(function: Callable[..., object], *args: Tensor) -> float:
    counted = count(Calls(function), args, {})
    assert counted.uncounted == ()
    return counted.flops


def _training(model: nn.Module, *args: Tensor) -> Count:
    return count(model, args, {}, mode="training")


MATRICES: dict[str, tuple[Callable[..., object], tuple[tuple[int, ...], ...], int]] = {
    "mm": (torch.mm, ((3, 5), (5, 7)), 2 * 3 * 5 * 7),
    "bmm": (torch.bmm, ((2, 3, 5), (2, 5, 7)), 2 * 2 * 3 * 5 * 7),
    "addmm": (torch.addmm, ((7,), (3, 5), (5, 7)), 2 * 3 * 5 * 7),
    "baddbmm": (torch.baddbmm, ((2, 3, 7), (2, 3, 5), (2, 5, 7)), 2 * 2 * 3 * 5 * 7),
    "addbmm": (torch.addbmm, ((3, 7), (2, 3, 5), (2, 5, 7)), 2 * 2 * 3 * 5 * 7),
    "mv": (torch.mv, ((3, 5), (5,)), 2 * 3 * 5),
    "dot": (torch.dot, ((5,), (5,)), 2 * 5),
    "linear": (functional.linear, ((2, 3, 5), (7, 5)), 2 * 6 * 5 * 7),
    "matmul, broadcast": (torch.matmul, ((4, 3, 5), (5, 7)), 2 * 4 * 3 * 5 * 7),
    "einsum": (lambda a, b: torch.einsum("bik,bjk->bij", a, b), ((2, 3, 5), (2, 7, 5)), 2 * 2 * 3 * 7 * 5),
    "relu": (torch.relu, ((3, 5),), 15),
    "add": (torch.add, ((3, 5), (3, 5)), 15),
    "sum": (torch.sum, ((3, 5),), 15),
    "softmax": (lambda x: x.softmax(-1), ((3, 5),), 5 * 15),
    "view, transpose": (lambda x: x.t().reshape(-1), ((3, 1),), 0),
    "concatenation": (lambda x: torch.cat([x, x]), ((3, 5),), 0),
    "max pool": (lambda x: functional.max_pool2d(x, 3, stride=2), ((2, 4, 9, 9),), 2 * 4 * 4 * 4 * 9),
    "mean pool": (lambda x: functional.avg_pool2d(x, (2, 3)), ((2, 4, 8, 9),), 2 * 4 * 4 * 3 * 6),
}


@pytest.mark.parametrize("name", MATRICES)
def test_operators(name: str) -> None:
    function, shapes, expected = MATRICES[name]
    assert _flops(function, *(torch.zeros(shape) for shape in shapes)) == expected


CONVOLUTIONS: dict[str, tuple[nn.Module, tuple[int, ...], int]] = {
    # 2·B·Ho·Wo·Co·(Ci/groups)·k²
    "plain": (nn.Conv2d(4, 6, 3, padding=1, bias=False), (2, 4, 8, 8), 2 * 2 * 64 * 6 * 4 * 9),
    "strided": (nn.Conv2d(4, 6, 3, stride=2, bias=False), (2, 4, 9, 9), 2 * 2 * 16 * 6 * 4 * 9),
    "dilated": (nn.Conv2d(4, 6, 3, dilation=2, bias=False), (2, 4, 9, 9), 2 * 2 * 25 * 6 * 4 * 9),
    "grouped": (nn.Conv2d(4, 6, 3, groups=2, padding=1, bias=False), (2, 4, 8, 8), 2 * 2 * 64 * 6 * 2 * 9),
    "depthwise": (nn.Conv2d(4, 4, 3, groups=4, padding=1, bias=False), (2, 4, 8, 8), 2 * 2 * 64 * 4 * 9),
    "one dimension": (nn.Conv1d(4, 6, 5, bias=False), (2, 4, 12), 2 * 2 * 8 * 6 * 4 * 5),
    "three dimensions": (nn.Conv3d(2, 3, 2, bias=False), (2, 2, 4, 4, 4), 2 * 2 * 27 * 3 * 2 * 8),
    # Transposed: every input pixel meets the whole kernel of every output channel of its group.
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2, bias=False), (2, 4, 5, 5), 2 * 2 * 25 * 4 * 6 * 9),
    "transposed, grouped": (
        nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, bias=False), (2, 4, 5, 5), 2 * 2 * 25 * 4 * 3 * 9,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_forward_and_backward(name: str) -> None:
    layer, shape, forward = CONVOLUTIONS[name]
    assert count(layer, (torch.zeros(shape),), {}).flops == forward
    # The input needs no gradient, so the backward is the weight's alone.
    assert _training(layer, torch.zeros(shape)).flops == 2 * forward
    # With a gradient for the input as well: three passes.
    assert _training(layer, torch.zeros(shape, requires_grad=True)).flops == 2 * forward
    both = nn.Sequential(nn.Identity(), _Scale(), layer)
    scaled = torch.zeros(shape).numel()
    grad_of_scale = 2 * scaled  # grad·x and its sum
    assert _training(both, torch.zeros(shape)).flops == 3 * forward + scaled + grad_of_scale


class _Scale(nn.Module):
    """x·s with one parameter, so that what follows needs a gradient for its input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_bias_of_a_convolution_is_a_sum_in_its_backward() -> None:
    forward = 2 * 2 * 64 * 6 * 4 * 9
    counted = _training(nn.Conv2d(4, 6, 3, padding=1), torch.zeros(2, 4, 8, 8))
    assert counted.flops == 2 * forward + 2 * 64 * 6


def _heads(batch: int, heads: int, sequence: int, width: int) -> Tensor:
    return torch.zeros(batch, heads, sequence, width)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (4, 8), (8, 4), (1, 8)])
def test_fused_attention(queries: int, keys: int, causal: bool) -> None:
    pairs = sum(min(query + 1, keys) if causal else keys for query in range(queries))
    counted = _flops(
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=causal),
        _heads(2, 4, queries, 16), _heads(2, 4, keys, 16), _heads(2, 4, keys, 16),
    )  # fmt: skip
    assert counted == 2 * 4 * pairs * (2 * 16 + 2 * 16)


def test_grouped_attention_counts_query_heads() -> None:
    counted = _flops(
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        _heads(2, 8, 6, 16), _heads(2, 2, 6, 16), _heads(2, 2, 6, 16),
    )  # fmt: skip
    assert counted == 4 * 2 * 8 * 6 * 6 * 16


class _Attends(nn.Module):
    """Attention over scaled inputs; `fused` in one operator, or in matrix products."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.scale = nn.ParameterList(torch.ones(()) for _ in range(3))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (scale * x for scale, x in zip(self.scale, (q, k, v)))
        if self.fused:
            return functional.scaled_dot_product_attention(q, k, v)
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


@pytest.mark.parametrize(("fused", "backward"), [(True, 2.5), (False, 2.0)])
def test_attention_backward_conventions(fused: bool, backward: float) -> None:
    # Large heads, so that element work is small beside the products.
    inputs = tuple(_heads(1, 1, 256, 256) for _ in range(3))
    model, forward = _Attends(fused=fused), 4 * 256**3
    assert count(model, inputs, {}).flops == pytest.approx(forward, rel=0.02)
    assert _training(model, *inputs).flops == pytest.approx((1 + backward) * forward, rel=0.02)


@pytest.mark.parametrize(("layers", "directions"), [(1, 1), (2, 1), (2, 2)])
def test_lstm(layers: int, directions: int) -> None:
    model = nn.LSTM(12, 20, num_layers=layers, bidirectional=directions == 2, batch_first=True)
    widths = [12] + [20 * directions] * (layers - 1)
    forward = sum(2 * 3 * 5 * 4 * 20 * (width + 20) * directions for width in widths)
    example = torch.zeros(3, 5, 12)
    assert count(model, (example,), {}).flops == forward
    assert count(model, (example,), {}).uncounted == ()
    # Where two directions meet, their input gradients are added up.
    assert _training(model, example).flops == pytest.approx(3 * forward, rel=1e-3)


def test_gru_counts_every_step() -> None:
    model = nn.GRU(32, 64, batch_first=True)
    products = 2 * 3 * 5 * 3 * 64 * (32 + 64)
    assert count(model, (torch.zeros(3, 5, 32),), {}).flops == pytest.approx(products, rel=0.06)


def test_encoder_layer_is_the_same_with_and_without_the_fast_path() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    example = (torch.zeros(2, 6, 32),)
    products = 2 * 12 * (4 * 32 * 32 + 2 * 32 * 64) + 4 * 2 * 6 * 6 * 32
    trained, evaluated = count(layer.train(), example, {}), count(layer.eval(), example, {})
    assert trained.flops == evaluated.flops == pytest.approx(products, rel=0.06)
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.filterwarnings("ignore")
def test_dynamic_int8_linear() -> None:
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(16, 8)), {nn.Linear})
    counted = count(model, (torch.zeros(4, 16),), {})
    assert counted.flops == 2 * 4 * 16 * 8
    assert counted.weight_bytes == 16 * 8
    assert counted.moved_bytes == 16 * 8 + 4 * (4 * 16 + 4 * 8)


def test_mlp_by_layer() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    counted = count(model, (torch.zeros(5, 16),), {})
    assert [(layer.name, layer.kind) for layer in counted.layers] == [("0", "Linear"), ("1", "ReLU"), ("2", "Linear")]
    assert [layer.flops for layer in counted.layers] == [2 * 5 * 16 * 8, 5 * 8, 2 * 5 * 8 * 4]
    assert [layer.parameter_bytes for layer in counted.layers] == [4 * (16 * 8 + 8), 0, 4 * (8 * 4 + 4)]
    first = counted.layers[0].moved_bytes
    assert first == 4 * (5 * 16 + 16 * 8 + 8 + 5 * 8)
    assert counted.weight_bytes == 4 * (16 * 8 + 8 + 8 * 4 + 4)
    assert counted.flops == sum(layer.flops for layer in counted.layers)
    assert counted.moved_bytes == sum(layer.moved_bytes for layer in counted.layers)


def test_training_attributes_the_backward_to_the_layer_that_made_it() -> None:
    model = nn.Sequential(nn.Linear(16, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False))
    work = {layer.name: layer.flops for layer in _training(model, torch.zeros(5, 16)).layers}
    assert work["0"] == 2 * (2 * 5 * 16 * 8)  # forward and weight gradient; no gradient of the input
    assert work["1"] == 2 * 5 * 8
    assert work["2"] == 3 * (2 * 5 * 8 * 4)
    assert work.get("", 0) == 0


def test_a_module_used_twice_counts_twice_under_its_first_name() -> None:
    shared = nn.Linear(8, 8, bias=False)
    counted = count(nn.Sequential(shared, nn.ReLU(), shared), (torch.zeros(2, 8),), {})
    assert [(layer.name, layer.flops) for layer in counted.layers] == [("0", 2 * 2 * 2 * 64), ("1", 16)]
    assert counted.weight_bytes == 4 * 64


def test_a_lookup_reads_its_rows_only() -> None:
    counted = count(nn.Embedding(1000, 8), (torch.zeros(3, dtype=torch.long),), {})
    assert counted.moved_bytes == 3 * 8 + 2 * 3 * 8 * 4
    assert counted.weight_bytes == 1000 * 8 * 4
    assert counted.flops == 0 and counted.uncounted == ()


def test_views_move_nothing_and_expanded_tensors_are_read_once() -> None:
    assert count(Calls(lambda x: x.view(-1).unsqueeze(0).expand(9, -1)), (torch.zeros(4, 4),), {}).moved_bytes == 0
    added = count(Calls(lambda x: x.expand(9, 4) + 1), (torch.zeros(1, 4),), {})
    assert added.moved_bytes == 4 * 4 + 9 * 4 * 4


def test_operators_without_formula_are_named_never_a_silent_zero() -> None:
    counted = count(Calls(torch.fft.rfft), (torch.zeros(2, 8),), {})
    assert counted.uncounted == ("aten::_fft_r2c",)
    assert counted.moved_bytes > 0


def test_a_custom_operator_is_named() -> None:
    with _library() as operator:
        counted = count(Calls(operator), (torch.zeros(2, 8),), {})
    assert counted.uncounted == ("microbatch_test::double",)


@contextmanager
def _library() -> Iterator[Callable[[Tensor], Tensor]]:
    with torch.library._scoped_library("microbatch_test", "DEF") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CPU")
        library.impl("double", torch.empty_like, "Meta")
        yield torch.ops.microbatch_test.double.default


def test_work_grows_in_proportion_to_the_batch() -> None:
    model = build("transformer:depth=1,width=16,heads=2,sequence=4").model
    one, four = (count(model, (torch.zeros(batch, 4, 16),), {}) for batch in (1, 4))
    assert four.flops == 4 * one.flops
    activations = (four.moved_bytes - one.moved_bytes) / 3
    assert one.moved_bytes - activations == one.weight_bytes


def test_no_memory_is_needed_at_any_batch_size() -> None:
    example = torch.zeros(1, 1024).expand(10**9, 1024)
    assert count(nn.Linear(1024, 1024), (example,), {}).flops == 2 * 10**9 * 1024**2


class _Loops(nn.Module):
    """As many times through the layer as the data says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(x.sum())):
            x = self.layer(x)
        return x


def test_a_path_that_depends_on_data_is_counted_by_a_real_run() -> None:
    x = torch.zeros(2, 8)
    x[0, 0] = 3
    counted = count(_Loops(), (x,), {})
    assert counted.computed
    assert {layer.name: layer.flops for layer in counted.layers}["layer"] == 3 * 2 * 2 * 64
    assert not count(nn.Linear(8, 8), (x,), {}).computed


def test_the_models_own_error_comes_through() -> None:
    def fails(_: Tensor) -> Tensor:
        raise LookupError("no such token")

    with pytest.raises(LookupError, match="no such token"):
        count(Calls(fails), (torch.zeros(2),), {})
    with pytest.raises(RuntimeError, match="shapes"):
        count(nn.Linear(4, 4), (torch.zeros(2, 5),), {})


def test_hooks_are_gone_after_an_error() -> None:
    def fails(_: Tensor) -> Tensor:
        raise LookupError

    with pytest.raises(LookupError):
        count(Calls(fails), (torch.zeros(2),), {})
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not torch.nn.modules.module._global_forward_hooks_always_called


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("computed", [False, True])
def test_the_model_is_left_as_it_was(mode: str, computed: bool) -> None:
    tail = nn.Sequential(*([_Loops()] if computed else []), nn.Dropout(0.5))
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), tail).train()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    example, state = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), torch.get_rng_state()
    kept = example.clone()
    assert count(model, (example,), {}, mode=mode).computed == computed
    assert torch.equal(state, torch.get_rng_state()) and torch.equal(kept, example)
    assert model.training and torch.is_grad_enabled()
    for name, value in model.state_dict().items():
        assert type(value) is Tensor and torch.equal(value, before[name]), name
    for parameter in model.parameters():
        assert parameter.grad is not None and (parameter.grad == 7).all()
        assert parameter.requires_grad and not parameter._backward_hooks
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    model(example)


def test_keyword_and_nested_examples() -> None:
    model = Calls(lambda pair: pair[0] @ pair[1]["b"])
    assert count(model, ([torch.zeros(2, 3), {"b": torch.zeros(3, 5)}],), {}).flops == 2 * 2 * 3 * 5
    assert count(nn.Linear(3, 5), (), {"input": torch.zeros(2, 3)}).flops == 2 * 2 * 3 * 5


def test_training_sums_every_output_that_has_a_gradient() -> None:
    layer = nn.Linear(4, 4, bias=False)

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> dict[str, object]:
            return {"a": self.layer(x), "b": [self.layer(x), x], "c": 3}

    assert _training(Named(), torch.zeros(2, 4)).flops >= 4 * 2 * 2 * 16


def test_mistakes_are_named() -> None:
    with pytest.raises(InvalidSettings, match=r"'train'.*inference, training"):
        count(nn.Linear(2, 2), (torch.zeros(1, 2),), {}, mode="train")
    with pytest.raises(InvalidModel, match="returned int"):
        count(Calls(len), (torch.zeros(1, 2),), {}, mode="training")


def test_a_compiled_model_counts_as_the_one_it_was_made_from() -> None:
    layer = nn.Linear(4, 4)
    compiled = torch.compile(layer, backend="eager")
    assert isinstance(compiled, nn.Module)
    assert count(compiled, (torch.zeros(2, 4),), {}) == count(layer, (torch.zeros(2, 4),), {})


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_model_is_counted_whole(name: str, mode: str) -> None:
    small = {"mlp": "depth=2,width=8", "decoder": "depth=1,context=8", "transformer": "depth=1"}
    loaded = build(f"{name}:{small.get(name, '')}")
    counted = count(loaded.model, loaded.args, loaded.kwargs, mode=mode)
    assert counted.uncounted == () and counted.flops > 0 and counted.moved_bytes > 0


def test_decode_step_moves_the_cache_once() -> None:
    def step(context: int) -> Count:
        loaded = build(f"decoder:depth=2,width=16,heads=4,kv_heads=2,vocabulary=8,context={context}")
        return count(loaded.model, loaded.args, {})

    batch, layers, kv_heads, width, heads = 2, 2, 2, 4, 4
    grown = step(200), step(100)
    flops = grown[0].flops - grown[1].flops
    moved = grown[0].moved_bytes - grown[1].moved_bytes
    products = 4 * batch * 100 * layers * heads * width
    cache = 2 * 4 * batch * 100 * layers * kv_heads * width
    assert flops == pytest.approx(products, rel=0.5) and flops > products
    assert cache < moved < 3 * cache
