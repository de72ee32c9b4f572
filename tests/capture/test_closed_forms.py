"""Products of one layer as functions of the batch and the sequence, against closed forms written here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence

from microbatch.capture.runs import Example
from microbatch.capture.work import capture_work
from microbatch.errors import InvalidModel
from microbatch.work.operators import Operator, Work

PRODUCTS = {"matmul", "convolution", "attention", "recurrent", "experts"}
IN, WIDE, STEPS = 6, 10, 7


def sequences(width: int = IN, *, batch_first: bool = True) -> Example:
    """(batch, sequence, width)."""

    def example(batch: int, sequence: int | None) -> tuple[tuple[object, ...], dict[str, object]]:
        shape = (batch, sequence or STEPS, width)
        return (torch.zeros(shape if batch_first else (shape[1], shape[0], width)),), {}

    return example


def product_flops(work: Work, batch: int, sequence: int) -> float:
    """FLOPs of the products of the forward pass."""
    kept = (o for o in work.operators if o.kind in PRODUCTS and not o.backward)
    return sum(o.repeat * o.flops(batch, sequence) for o in kept)


def recurrent(gates: int, layers: int = 1, directions: int = 1, projected: int = 0) -> Callable[[int, int], int]:
    """2·b·s·(each gate's matrices for input and state), and the projection's."""
    out = projected or WIDE

    def flops(batch: int, sequence: int) -> int:
        widths = [IN] + [out * directions] * (layers - 1)
        matrices = sum(gates * WIDE * (width + out) + projected * WIDE for width in widths) * directions
        return 2 * batch * sequence * matrices

    return flops


def encoder(width: int = 8, inner: int = 12) -> Callable[[int, int], int]:
    def flops(batch: int, sequence: int) -> int:
        linear = 2 * batch * sequence * (4 * width**2 + 2 * width * inner)
        return linear + 4 * batch * sequence**2 * width

    return flops


class Calls(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> object:
        return self.function(*args)


class SelfAttention(nn.Module):
    """nn.MultiheadAttention on one tensor; without weights it may take the fast path."""

    def __init__(self, *, weights: bool) -> None:
        super().__init__()
        self.inner, self.weights = nn.MultiheadAttention(8, 2, batch_first=True), weights

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.inner(x, x, x, need_weights=self.weights)[0]
        return mixed


LAYERS: dict[str, tuple[nn.Module, Example, Callable[[int, int], int]]] = {
    "LSTM": (nn.LSTM(IN, WIDE, batch_first=True), sequences(), recurrent(4)),
    "LSTM, steps first": (nn.LSTM(IN, WIDE), sequences(batch_first=False), recurrent(4)),
    "LSTM, deep, both ways": (
        nn.LSTM(IN, WIDE, num_layers=3, bidirectional=True, batch_first=True), sequences(), recurrent(4, 3, 2),
    ),
    "LSTM, no bias, projected": (
        nn.LSTM(IN, WIDE, num_layers=2, bias=False, proj_size=4, batch_first=True), sequences(),
        recurrent(4, 2, projected=4),
    ),
    "GRU": (nn.GRU(IN, WIDE, batch_first=True), sequences(), recurrent(3)),
    "GRU, deep, both ways": (
        nn.GRU(IN, WIDE, num_layers=2, bidirectional=True, batch_first=True), sequences(), recurrent(3, 2, 2),
    ),
    "RNN": (nn.RNN(IN, WIDE, batch_first=True), sequences(), recurrent(1)),
    "encoder layer": (
        nn.TransformerEncoderLayer(8, 2, 12, batch_first=True).eval(), sequences(8), encoder(),
    ),
    "encoder": (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 3).eval(), sequences(8),
        lambda b, s: 3 * encoder()(b, s),
    ),
    "multi-head attention": (
        SelfAttention(weights=False), sequences(8), lambda b, s: 2 * b * s * 4 * 8**2 + 4 * b * s**2 * 8,
    ),
    "multi-head attention with weights": (
        SelfAttention(weights=True), sequences(8), lambda b, s: 2 * b * s * 4 * 8**2 + 4 * b * s**2 * 8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.filterwarnings("ignore")
def test_layers_in_batch_and_sequence(name: str, mode: str) -> None:
    model, example, expected = LAYERS[name]
    work = capture_work(model, example, mode=mode, sequence=12, free_sequence=True)
    assert work.sequence_free and work.warnings == () and work.uncounted == ()
    for batch, sequence in ((1, 1), (2, 12), (11, 100)):
        assert product_flops(work, batch, sequence) == expected(batch, sequence)


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_are_whole_operators(name: str) -> None:
    work = capture_work(LAYERS[name][0], LAYERS[name][1], mode="training", sequence=12, free_sequence=True)
    forward = [o for o in work.operators if o.kind == "recurrent" and not o.backward]
    backward = [o for o in work.operators if o.kind == "recurrent" and o.backward]
    assert len(forward) == len(backward) == 1
    assert backward[0].flops(3, 5) == 2 * forward[0].flops(3, 5)
    gemm = forward[0].gemm
    assert gemm is not None
    assert (gemm.m(3, 5), gemm.count(3, 5)) == (3, 5)  # one product of the whole batch for each step
    assert 2 * gemm.m(3, 5) * gemm.n(3, 5) * gemm.k(3, 5) * gemm.count(3, 5) == forward[0].flops(3, 5)
    assert forward[0].weight_bytes(3, 5) == sum(p.nbytes for p in LAYERS[name][0].parameters())


@pytest.mark.parametrize("batch_first", [False, True])
def test_a_recurrent_layer_both_ways(batch_first: bool) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.LSTM(IN, WIDE, num_layers=2, bidirectional=True, batch_first=batch_first)
            self.tags = nn.Linear(2 * WIDE, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            tags: Tensor = self.tags(self.inner(x)[0])
            return tags

    work = capture_work(Tagger(), sequences(batch_first=batch_first), sequence=12, free_sequence=True)
    *layers, tags = work.operators
    assert tags.flops(3, 5) == 2 * 3 * 5 * 2 * WIDE * 3
    widths = [IN, IN, 2 * WIDE, 2 * WIDE]
    for layer, width in zip([layer for layer in layers if layer.kind == "recurrent"], widths, strict=True):
        assert layer.gemm is not None
        gemm = layer.gemm
        assert [part(3, 5) for part in (gemm.m, gemm.n, gemm.k, gemm.count)] == [3, 4 * WIDE, width + WIDE, 5]


def test_packing_is_named_as_dependent_on_data() -> None:
    class Packs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.GRU(IN, WIDE, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            lengths = torch.full((len(x),), x.shape[1], dtype=torch.long)
            out: Tensor = self.inner(pack_padded_sequence(x, lengths, batch_first=True))[0].data
            return out

    with pytest.raises(InvalidModel, match="aten::_pack_padded_sequence in Packs depends on the data"):
        capture_work(Packs(), sequences())


def heads(*shape: int) -> Tensor:
    return torch.zeros(shape)


ATTENTION: dict[str, tuple[Callable[..., Tensor], Example, Callable[[int, int], int]]] = {
    "all pairs": (
        functional.scaled_dot_product_attention,
        lambda b, s: ((heads(b, 4, s or 1, 8), heads(b, 4, s or 1, 8), heads(b, 4, s or 1, 8)), {}),
        lambda b, s: 2 * b * 4 * s * s * 16,
    ),
    "causal": (
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda b, s: ((heads(b, 4, s or 1, 8), heads(b, 4, s or 1, 8), heads(b, 4, s or 1, 8)), {}),
        lambda b, s: 2 * b * 4 * (s * (s + 1) // 2) * 16,
    ),
    "decode, grouped": (
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        lambda b, s: ((heads(b, 8, 1, 16), heads(b, 2, s or 1, 16), heads(b, 2, s or 1, 16)), {}),
        lambda b, s: 2 * b * 8 * s * 32,
    ),
    "latent: values of another width": (
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda b, s: ((heads(b, 4, s or 1, 24), heads(b, 4, s or 1, 24), heads(b, 4, s or 1, 16)), {}),
        lambda b, s: 2 * b * 4 * (s * (s + 1) // 2) * 40,
    ),
    "an explicit mask hides nothing": (
        functional.scaled_dot_product_attention,
        lambda b, s: (
            (heads(b, 4, s or 1, 8), heads(b, 4, s or 1, 8), heads(b, 4, s or 1, 8), torch.zeros(s or 1, s or 1)), {}
        ),
        lambda b, s: 2 * b * 4 * s * s * 16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_one_operator(name: str) -> None:
    function, example, expected = ATTENTION[name]
    work = capture_work(Calls(function), example, sequence=12, free_sequence=True)
    (attention,) = work.operators
    assert attention.kind == "attention" and work.warnings == ()
    for batch, sequence in ((1, 1), (5, 12), (3, 97)):
        assert attention.flops(batch, sequence) == expected(batch, sequence)
        args, _ = example(batch, sequence)
        read = sum(tensor.nbytes for tensor in args if isinstance(tensor, Tensor))
        assert attention.read_bytes(batch, sequence) == read
        out = Calls(function)(*args)
        assert isinstance(out, Tensor) and attention.written_bytes(batch, sequence) == out.nbytes


def test_a_layer_on_attention_sees_the_shapes_of_real_attention() -> None:
    def joined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(len(q), -1)

    example = ATTENTION["all pairs"][1]
    work = capture_work(Calls(joined), example, sequence=12)
    assert [operator.kind for operator in work.operators] == ["attention"]  # heads are joined without a copy
    assert isinstance(joined(*example(2, 3)[0]), Tensor)  # type: ignore[arg-type]


CONVOLUTIONS: dict[str, tuple[nn.Module, tuple[int, ...], tuple[int, int, int, int]]] = {
    # (m per item, n, k, groups)
    "plain": (nn.Conv2d(4, 6, 3, padding=1), (4, 8, 8), (64, 6, 36, 1)),
    "grouped": (nn.Conv2d(4, 6, 3, groups=2, padding=1), (4, 8, 8), (64, 3, 18, 2)),
    "depthwise": (nn.Conv2d(4, 8, 3, groups=4, padding=1), (4, 8, 8), (64, 2, 9, 4)),
    "one dimension": (nn.Conv1d(4, 6, 5), (4, 12), (8, 6, 20, 1)),
    "three dimensions": (nn.Conv3d(2, 3, 2), (2, 4, 4, 4), (27, 3, 16, 1)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2), (4, 5, 5), (25, 54, 4, 1)),
    "transposed, grouped": (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (4, 5, 5), (25, 27, 2, 2)),
    "transposed, one dimension": (nn.ConvTranspose1d(4, 6, 4), (4, 5), (5, 24, 4, 1)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str) -> None:
    model, shape, (m, n, k, groups) = CONVOLUTIONS[name]
    (convolution,) = capture_work(model, lambda batch, _: ((torch.zeros(batch, *shape),), {})).operators
    assert convolution.kind == "convolution" and convolution.gemm is not None
    gemm = convolution.gemm
    assert [part(5) for part in (gemm.m, gemm.n, gemm.k, gemm.count)] == [5 * m, n, k, groups]
    assert convolution.flops(5) == 2 * 5 * m * n * k * groups
    assert convolution.weight_bytes(5) == sum(p.nbytes for p in model.parameters())


def only(work: Work, kind: str) -> Operator:
    (operator,) = (operator for operator in work.operators if operator.kind == kind)
    return operator


@pytest.mark.filterwarnings("ignore")
def test_dynamic_int8_linear() -> None:
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(16, 8), nn.ReLU()), {nn.Linear})
    work = capture_work(model, lambda batch, _: ((torch.zeros(batch, 16),), {}))
    linear = only(work, "matmul")
    assert (linear.dtype, str(linear.flops), str(linear.weight_bytes)) == ("int8", f"{2 * 16 * 8}·b", str(16 * 8))
    assert linear.gemm is not None and [part(3) for part in (linear.gemm.m, linear.gemm.n, linear.gemm.k)] == [3, 8, 16]
    assert work.weight_bytes == 16 * 8


class Packed(nn.Module):
    """torch's weight-only products."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits
        if bits == 8:
            self.register_buffer("weight", torch.zeros(64, 32, dtype=torch.int8))
            self.register_buffer("scales", torch.ones(64, dtype=torch.bfloat16))
        else:
            self.register_buffer("weight", torch.zeros(64, 16, dtype=torch.uint8))
            self.register_buffer("scales", torch.ones(1, 64, 2, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        operators = torch.ops.aten
        if self.bits == 8:
            out: Tensor = operators._weight_int8pack_mm(x, self.weight, self.scales)
        else:
            out = operators._weight_int4pack_mm_for_cpu(x, self.weight, 32, self.scales)
        return out


@pytest.mark.parametrize("bits", [8, 4])
def test_weight_only_products(bits: int) -> None:
    work = capture_work(Packed(bits), lambda batch, _: ((torch.zeros(batch, 32, dtype=torch.bfloat16),), {}))
    product = only(work, "matmul")
    assert (product.dtype, product.weight_dtype) == ("bf16", f"int{bits}")
    assert str(product.flops) == f"{2 * 64 * 32}·b"
    scales = 2 * 64 * (1 if bits == 8 else 2)
    assert product.weight_bytes(1) == 64 * 32 * bits // 8 + scales


@pytest.mark.parametrize(
    ("dtype", "arithmetic", "stored", "width"),
    [
        ("fp32", "fp32", None, 4), ("tf32", "tf32", None, 4), ("bf16", "bf16", None, 2), ("fp16", "fp16", None, 2),
        ("fp8", "fp8", "fp8", 1), ("int8", "bf16", "int8", 1), ("int4", "bf16", "int4", 0.5),
    ],
)  # fmt: skip
def test_a_model_in_another_dtype(dtype: str, arithmetic: str, stored: str | None, width: float) -> None:
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU())
    work = capture_work(model, lambda batch, _: ((torch.zeros(batch, 32),), {}), dtype=dtype)
    linear, relu = work.operators
    assert (linear.dtype, linear.weight_dtype) == (arithmetic, stored)
    assert linear.weight_bytes(1) == work.weight_bytes == 32 * 64 * width
    assert linear.read_bytes(1) == 32 * (4 if dtype in ("fp32", "tf32") else 2)
    assert relu.dtype in ("fp32", "bf16", "fp16") and next(model.parameters()).dtype == torch.float32
