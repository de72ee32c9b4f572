"""The operators of one call of a model, with their sizes as functions of the batch b and the sequence s."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from microbatch.work.polynomial import ZERO, Polynomial, constant

KINDS = (
    "matmul",  # matrix products: linear layers, attention written out, batched products
    "attention",  # fused attention
    "convolution",
    "recurrent",  # LSTM and GRU
    "experts",  # the grouped products of a mixture of experts
    "lookup",  # embeddings, gathers: rows of a table
    "normalisation",
    "reduction",  # pooling, softmax, sums
    "elementwise",
    "copy",  # moves without arithmetic
    "communication",  # between devices
    "optimizer",
)
"""What an operator is to the hardware; `roofline` times each kind in its own way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemm:
    """`count` independent products (m × k)·(k × n)."""

    m: Polynomial
    n: Polynomial
    k: Polynomial
    count: Polynomial = field(default_factory=lambda: constant(1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Routed:
    """How a mixture of experts spreads `tokens` over `experts`, `top_k` each.

    Attributes:
        probabilities: chance that a token picks each expert at all (they add up to `top_k`); empty for even routing.
    """

    experts: int
    top_k: int
    tokens: Polynomial
    probabilities: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """One operator, run `repeat` times in one call (identical layers are kept once).

    Attributes:
        name: of the operator, as in ``aten::addmm``.
        layer: name of the module that runs it, as in ``layers.0.mlp.up``; of the first one where layers repeat.
        kind: one of `KINDS`.
        dtype: our spelling of the dtype of the arithmetic.
        flops: floating-point operations of one run; a multiply-add is two.
        weight_bytes: parameters read by one run, as stored; for experts those of all experts together.
        read_bytes: other tensors read by one run: activations, and for decode the keys and values of the cache.
        written_bytes: written by one run.
        gemm: the shape, for products, with m on the side of the batch: the rows of a linear layer; for a convolution
            the pixels of its im2col product; for attention the queries of its first product, one for each head; for a
            recurrent layer one step, `count` steps; for experts the mean rows of one expert, tokens·top_k/experts,
            `count` experts (how unevenly they are spread, `routed` says). Weight gradients have the batch in k.
        routed: for ``experts``.
        weight_dtype: dtype in which the weights are stored, where it is not `dtype`.
        backward: belongs to the backward pass.
        repeat: identical runs in one call.
    """

    name: str
    kind: str
    layer: str = ""
    dtype: str = "fp32"
    flops: Polynomial = ZERO
    weight_bytes: Polynomial = ZERO
    read_bytes: Polynomial = ZERO
    written_bytes: Polynomial = ZERO
    gemm: Gemm | None = None
    routed: Routed | None = None
    weight_dtype: str | None = None
    backward: bool = False
    repeat: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A model's operators in the order in which they run.

    Attributes:
        model: as the user wrote it.
        mode: inference, training, prefill or decode.
        operators: all of them; views and free operators are left out.
        dtype: of the model's floating-point weights.
        weight_bytes: all parameters as stored, tied ones once.
        parameters: their number.
        unit: what one item of the batch is called.
        uncounted: operators that compute and have no formula: `flops` lacks them, and a report says so.
        sequence: the sequence or context length at which sizes hold; None where they are functions of it, or where
            the model has none.
        sequence_free: the sizes are functions of the sequence too.
        cache_bytes: keys and values that a decode step reads, as a function of b and s.
        warnings: sentences a reader must know.
    """

    operators: tuple[Operator, ...]
    model: str = ""
    mode: str = "inference"
    dtype: str = "fp32"
    weight_bytes: int = 0
    parameters: int = 0
    unit: str = "rows"
    uncounted: tuple[str, ...] = ()
    sequence: int | None = None
    sequence_free: bool = False
    cache_bytes: Polynomial = ZERO
    warnings: tuple[str, ...] = ()

    def flops(self, batch: float, sequence: float = 1.0) -> float:
        """Floating-point operations of one call."""
        return sum(o.repeat * o.flops(batch, sequence) for o in self.operators)

    def moved_bytes(self, batch: float, sequence: float = 1.0) -> float:
        """Bytes if every operator reads its inputs and writes its results once, all experts included."""
        return sum(
            o.repeat
            * (o.weight_bytes(batch, sequence) + o.read_bytes(batch, sequence) + o.written_bytes(batch, sequence))
            for o in self.operators
        )

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and numbers; polynomials as text."""
        result: dict[str, Any] = _plain(asdict(self))
        return result


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"terms"}:
            return str(Polynomial(value["terms"]))
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value
