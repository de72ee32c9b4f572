"""Captured work against counts at other sizes and closed forms written here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from microbatch.capture.count import count
from microbatch.capture.runs import Example
from microbatch.capture.work import capture_work
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


class InBlocks(nn.Module):
    """Rows are padded to whole blocks of eight, as no polynomial could say."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(nn.functional.pad(x, (0, 0, 0, -len(x) % 8)))
        return out


def test_what_is_no_polynomial_says_so() -> None:
    work = capture_work(InBlocks(), rows(8))
    (warning,) = work.warnings
    assert "is not a polynomial" in warning and "straight lines through batch 2 and 21" in warning
    assert of_kind(work, "matmul")[0].flops(2) == 2 * 8 * 64


class PairsOfRows(nn.Module):
    """Every row meets every other, as in a contrastive loss."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ x.t()


def test_quadratic_in_the_batch() -> None:
    work = capture_work(PairsOfRows(), rows(8))
    assert work.warnings == () and str(work.operators[0].flops) == "16·b^2"


class RowByRow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(row) for row in x])


def test_a_loop_over_the_batch_is_added_up() -> None:
    work = capture_work(RowByRow(), rows(8))
    product = of_kind(work, "matmul")[0]
    assert work.warnings == () and work.flops(11) == 11 * 2 * 8 * 4
    assert product.gemm is not None and (str(product.gemm.m), str(product.gemm.count)) == ("1", "b")


class Window(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, -10:].exp()


def test_a_window_is_claimed_for_its_sequence_only() -> None:
    example = {"sequence": 64, "free_sequence": True}

    def windowed(batch: int, sequence: int | None) -> tuple[tuple[object, ...], dict[str, object]]:
        return (torch.zeros(batch, sequence or 1, 4),), {}

    work = capture_work(Window(), windowed, **example)  # type: ignore[arg-type]
    assert (work.sequence, work.sequence_free) == (64, False)
    (warning,) = work.warnings
    assert "sequence of 64 only" in warning and "aten::exp" in warning
    assert work.flops(3, 64) == 3 * 10 * 4


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(3)), LoopOverExperts())
    model[0].eval()
    flags = [module.training for module in model.modules()]
    parameters, state = dict(model.named_parameters()), torch.get_rng_state()
    for mode in ("inference", "training"):
        capture_work(model, rows(8), mode=mode)
        assert flags == [module.training for module in model.modules()]
        assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
        assert all(parameter.grad is None for parameter in parameters.values())
        assert not any("forward" in vars(module) for module in model.modules())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(state, torch.get_rng_state()) and torch.backends.mha.get_fastpath_enabled()


def test_tied_weights_are_stored_once_and_read_twice() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.logits = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
            self.logits.weight = self.table.weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.logits(self.table(x))
            return out

    work = capture_work(Tied(), lambda batch, _: ((torch.zeros(batch, 3, dtype=torch.long),), {}))
    lookup, logits = work.operators
    assert work.weight_bytes == 4 * 16 * 8 and work.parameters == 16 * 8
    assert (lookup.kind, str(lookup.weight_bytes), str(lookup.read_bytes)) == ("lookup", "0", f"{3 * 8 * (1 + 4)}·b")
    assert str(logits.weight_bytes) == str(4 * 16 * 8)


class Cache:
    """Keys that a plain object holds, as caches of language models do."""

    def __init__(self, keys: Tensor) -> None:
        self.layers = [{"keys": keys}]


class ReadsCache(nn.Module):
    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        keys = torch.cat([cache.layers[0]["keys"], x], dim=1)
        cache.layers[0]["keys"] = keys
        return keys @ x.transpose(1, 2)


def test_decode_reads_a_cache_inside_of_an_object() -> None:
    made: list[Cache] = []

    def example(batch: int, sequence: int | None) -> tuple[tuple[object, ...], dict[str, object]]:
        made.append(Cache(torch.zeros(batch, sequence or 1, 8, device="meta")))
        return (torch.zeros(batch, 1, 8, device="meta"), made[-1]), {}

    work = capture_work(ReadsCache(), example, mode="decode", sequence=40, free_sequence=True)
    assert work.flops(3, 7) == 2 * 3 * (7 + 1) * 8
    # The new token has as many dimensions as the keys.
    assert str(work.cache_bytes) == "32·b·s + 32·b"
    assert all(cache.layers[0]["keys"].is_meta for cache in made)


class Counts(nn.Module):
    """Blocks that look the same and are not: the work is in a place that no attribute shows."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        Counts.calls += 1
        for _ in range(Counts.calls):
            x = self.inner(x)
        return x


class Resets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Counts() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        Counts.calls = 0
        out: Tensor = self.blocks(x)
        return out


def test_blocks_that_only_look_alike_all_run() -> None:
    work = capture_work(Resets(), rows(4))
    assert work.flops(5) == (1 + 2 + 3 + 4) * 2 * 5 * 16
