"""Captured work against counts at other sizes and closed forms written here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from microbatch.capture.count import count
from microbatch.capture.work import Example, capture_work
from microbatch.errors import InvalidModel, InvalidSettings
from microbatch.models.built_in import build
from microbatch.work.operators import Operator, Work


def rows(*shape: int) -> Example:
    """Examples of one float tensor, (batch, *shape)."""
    return lambda batch, _: ((torch.zeros(batch, *shape),), {})


EXAMPLES: dict[str, Example] = {
    "mlp:depth=3,width=16": rows(16),
    "cnn": rows(3, 32, 32),
    "transformer:depth=3,width=16,heads=2,sequence=6": rows(6, 16),
    "decoder:cache=false,depth=4,width=16,heads=4,kv_heads=2,vocabulary=32,context=5": lambda batch, _: (
        (torch.zeros(batch, 6, dtype=torch.long),), {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("spec", EXAMPLES)
def test_work_equals_a_count_at_a_size_that_was_not_seen(spec: str, mode: str) -> None:
    model, example = build(spec).model, EXAMPLES[spec]
    work = capture_work(model, example, mode=mode)
    model.train(mode == "training")
    counted = count(model, *example(11, None), mode=mode)
    assert work.flops(11) == counted.flops
    # Fused attention writes no statistics here, as they are the kernel's own business.
    assert work.moved_bytes(11) == pytest.approx(counted.moved_bytes, rel=0.02)
    assert work.uncounted == () and work.warnings == ()
    assert work.weight_bytes == counted.weight_bytes


def test_identical_blocks_are_kept_once() -> None:
    spec = "transformer:depth=7,width=16,heads=2,sequence=6"
    repeats = {operator.repeat for operator in capture_work(build(spec).model, rows(6, 16)).operators}
    assert repeats == {7, 1}


def test_linear_layer() -> None:
    work = capture_work(nn.Linear(5, 7), rows(3, 5))
    (linear,) = work.operators
    assert (linear.name, linear.kind, linear.dtype) == ("aten::addmm", "matmul", "fp32")
    assert linear.gemm is not None
    assert [str(part) for part in (linear.gemm.m, linear.gemm.n, linear.gemm.k, linear.gemm.count)] == [
        "3·b", "7", "5", "1",
    ]  # fmt: skip
    assert str(linear.flops) == f"{2 * 3 * 5 * 7}·b"
    assert str(linear.weight_bytes) == str(4 * (5 * 7 + 7))
    assert (str(linear.read_bytes), str(linear.written_bytes)) == (f"{4 * 3 * 5}·b", f"{4 * 3 * 7}·b")


def test_a_model_on_the_meta_device_is_the_same() -> None:
    with torch.device("meta"):
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)
    real = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)
    work = capture_work(model.eval(), lambda b, _: ((torch.zeros(b, 6, 16, device="meta"),), {}))
    assert work == capture_work(real.eval(), rows(6, 16))
    assert next(model.parameters()).is_meta


def test_data_dependent_shapes_name_the_operator_and_the_module() -> None:
    class Selects(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x > 0]

    with pytest.raises(InvalidModel, match=r"aten::index in 1 \(Selects\)"):
        capture_work(nn.Sequential(nn.Linear(4, 4), Selects()), rows(4))


def test_mistakes_are_named() -> None:
    with pytest.raises(InvalidSettings, match="'train'"):
        capture_work(nn.Linear(2, 2), rows(2), mode="train")
    with pytest.raises(InvalidSettings, match="bf8"):
        capture_work(nn.Linear(2, 2), rows(2), dtype="bf8")


def of_kind(work: Work, kind: str) -> list[Operator]:
    return [operator for operator in work.operators if operator.kind == kind]


def test_mixture_of_experts() -> None:
    work = capture_work(build("moe:depth=2,width=8,hidden=16,experts=4,top_k=2").model, rows(8))
    up, down = of_kind(work, "experts")
    for operator in (up, down):
        assert operator.routed is not None and (operator.routed.experts, operator.routed.top_k) == (4, 2)
        assert str(operator.flops) == f"{2 * 2 * 8 * 16}·b" and str(operator.weight_bytes) == str(4 * 4 * 8 * 16)
        assert operator.repeat == 2


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).relu())
        return out


class LoopOverExperts(nn.Module):
    """As many write it: each expert picks its tokens by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts, self.top_k = nn.Linear(8, 4), nn.ModuleList(Expert() for _ in range(4)), 2

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, 8)
        shares, chosen = self.gate(tokens).softmax(-1).topk(self.top_k, dim=-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            out = out.index_add(0, rows, expert(tokens[rows]) * shares[rows, place, None])
        return out.reshape(x.shape)


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_loop_over_experts_of_the_user(mode: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), LoopOverExperts(), LoopOverExperts())
    work = capture_work(model, rows(3, 8), mode=mode)
    kept = of_kind(work, "experts")
    forward = [operator for operator in kept if not operator.backward]
    assert {operator.layer for operator in forward} == {"1.experts.0.up", "1.experts.0.down"}
    for operator in forward:
        assert operator.repeat == 2 and operator.weight_bytes(5) == 4 * 4 * 8 * 16
        assert operator.flops(5) == 2 * 5 * 3 * 2 * 8 * 16
        assert operator.gemm is not None and operator.gemm.m(5) == 5 * 3 * 2 / 4 and operator.gemm.count(5) == 4
        assert operator.routed is not None and operator.routed.tokens(5) == 15
    if mode == "training":
        backward = sum(operator.repeat * operator.flops(5) for operator in kept if operator.backward)
        assert backward == 2 * sum(operator.repeat * operator.flops(5) for operator in forward)
    model(torch.randn(2, 3, 8))  # its own forward is back
