"""Operators that are recorded whole and never run: fused attention and recurrent layers.

torch takes some operators apart before anyone can see them (a GRU into a product for every step), and picks others by
the device at hand (fused attention). Recorded whole, they are the same on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from microbatch.capture.formulas import ATTENTION_BACKWARD, attention_flops
from microbatch.capture.moved import Moved, distinct_bytes, tensors_in
from microbatch.capture.record import Record, arithmetic_of
from microbatch.capture.tally import Tally

Make = Callable[[], tuple[Tensor, ...]]


class _Opaque(torch.autograd.Function):
    """Outputs without a computation, and gradients without one."""

    @staticmethod
    def forward(ctx: Any, make: Make, undo: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.undo = undo
        ctx.save_for_backward(*inputs)
        outputs = make()
        ctx.mark_non_differentiable(*(tensor for tensor in outputs if not tensor.dtype.is_floating_point))
        return outputs

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        ctx.undo()
        wanted = zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(torch.empty_like(tensor) if asked else None for tensor, asked in wanted)


def replaced(tally: Tally, make: Make, inputs: Sequence[Tensor], undo: Callable[[], None]) -> tuple[Tensor, ...]:
    """What `make` gives, tied to `inputs` in the autograd graph where one is being built; `undo` is its backward."""
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)):
        return make()
    outputs: tuple[Tensor, ...] = _Opaque.apply(make, undo, *inputs)  # type: ignore[no-untyped-call]
    nodes = (tensor.grad_fn for tensor in outputs)
    tally.made(next(node for node in nodes if node is not None))
    return outputs


def whole(
    tally: Tally, records: Sequence[Record], make: Make, inputs: Sequence[Tensor], backward: float
) -> tuple[Tensor, ...]:
    """Records operators in place of running them; their backward does `backward` times their work.

    The backward reads and writes what the forward does, and the gradients of both: twice the bytes.
    """
    layer, run, _ = tally.owner()
    placed = [replace(record, layer=layer, run=run) for record in records]
    tally.records.extend(placed)
    undone = [_undone(record, backward) for record in reversed(placed)]
    return replaced(tally, make, inputs, lambda: tally.records.extend(undone))


def _undone(record: Record, times: float) -> Record:
    moved = Moved(record.moved.weights, 2 * record.moved.read + record.moved.weights, 2 * record.moved.written)
    product = record.product and (*record.product[:3], record.product[3] * Fraction(times))
    return replace(record, flops=times * record.flops, moved=moved, product=product, backward=True)


@contextmanager
def whole_operators(tally: Tally) -> Iterator[None]:
    """Inside, fused attention and recurrent layers are recorded whole.

    Python code that torch lets a mode override runs with the mode off, so attention inside of
    ``multi_head_attention_forward`` has to be met under its name as well.
    """
    attend = _attention(tally)
    with _Functions(tally), mock.patch.object(nn.functional, "scaled_dot_product_attention", attend):
        yield


class _Functions(TorchFunctionMode):
    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self.whole: dict[str, Callable[..., Any]] = {
            "scaled_dot_product_attention": _attention(tally),
            **{name: _recurrent(tally, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.whole.get(getattr(func, "__name__", ""), func)(*args, **kwargs or {})


def _attention(tally: Tally) -> Callable[..., Tensor]:
    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        del dropout_p, scale, enable_gqa
        inputs = tensors_in(query, key, value, attn_mask)
        record = Record(
            name="aten::scaled_dot_product_attention",
            kind="attention",
            layer="",
            dtype=arithmetic_of([query]),
            flops=attention_flops(query, key, value, causal=is_causal),
            moved=Moved(0, sum(map(distinct_bytes, inputs)), query.numel() // query.shape[-1] * _width(value)),
            product=(query.shape[-2], key.shape[-2], query.shape[-1], query.shape[:-2].numel()),
        )
        (out,) = whole(tally, [record], lambda: (_attended(query, value),), inputs, ATTENTION_BACKWARD)
        return out

    return attend


def _width(value: Tensor) -> int:
    return value.shape[-1] * value.element_size()


def _attended(query: Tensor, value: Tensor) -> Tensor:
    """(..., heads, queries, width of values), heads inside of queries in memory as fused kernels leave it."""
    *outer, heads, queries, _ = query.shape if query.dim() > 2 else (1, *query.shape)
    out = query.new_empty((*outer, queries, heads, value.shape[-1])).transpose(-2, -3)
    return out if query.dim() > 2 else out[0]


def _recurrent(tally: Tally, name: str) -> Callable[..., tuple[Tensor, ...]]:
    """torch's recurrent functions; packed sequences, whose lengths are data, are left to torch."""
    original = getattr(torch, name)

    def run(data: Tensor, states: Any, weights: Any, *settings: Any) -> tuple[Tensor, ...]:
        if isinstance(settings[0], list | tuple):  # packed: (data, sizes, states, weights, ...)
            packed: tuple[Tensor, ...] = original(data, states, weights, *settings)
            return packed
        _, layers, _, _, both_ways, batch_first = settings
        steps, hidden = data.shape[1 if batch_first else 0], tree_leaves(states)[0].shape[-1]
        directions = 2 if both_ways else 1
        group = len(weights) // (layers * directions)
        parts = [weights[at : at + group] for at in range(0, len(weights), group)]

        def make() -> tuple[Tensor, ...]:
            out = data.new_empty((*data.shape[:-1], hidden * directions))
            return out, *(torch.empty_like(state) for state in tree_leaves(states))

        records = [_one_layer(name, data, part, steps, hidden) for part in parts]
        return whole(tally, records, make, tensors_in(data, states, list(weights)), 2.0)

    return run


def _one_layer(name: str, data: Tensor, weights: Sequence[Tensor], steps: int, hidden: int) -> Record:
    """One layer in one direction: 2·(steps·batch)·(elements of its matrices); gates' element work is left out."""
    rows, size = data.numel() // data.shape[-1], data.element_size()
    matrices = [weight for weight in weights if weight.dim() == 2]
    gates, width = matrices[0].shape
    return Record(
        name=f"aten::{name}",
        kind="recurrent",
        layer="",
        dtype=arithmetic_of([data]),
        flops=2.0 * rows * sum(matrix.numel() for matrix in matrices),
        moved=Moved(sum(map(distinct_bytes, weights)), rows * width * size, rows * hidden * size),
        product=(Fraction(rows, steps), gates, width + matrices[1].shape[1], steps),
    )
