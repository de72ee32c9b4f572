"""Where a forward goes through a batch norm: seen whoever calls it, and done with the statistics of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from microbatch.training.joint.batch_norm import Moments
from microbatch.training.joint.going_back import next_number


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a batch norm, as `torch.nn.functional.batch_norm` is called."""

    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5

    @property
    def same(self) -> tuple[object, ...]:
        """What is the same for every piece at the same call."""
        return self.input.shape[1], id(self.running_mean), id(self.weight), self.eps

    def scaled_back(self, moments: Moments) -> Tensor:
        """x̂, at least in fp32."""
        wide = self.input.detach().to(moments.mean.dtype)
        return (wide - self.by_channel(moments.mean)) * self.by_channel(self.over_deviation(moments))

    def over_deviation(self, moments: Moments) -> Tensor:
        """1/σ."""
        return (moments.variance + self.eps).rsqrt()

    def by_channel(self, values: Tensor) -> Tensor:
        """In a shape that broadcasts over the input."""
        return values.reshape(1, -1, *[1] * (self.input.dim() - 2))

    def output(self, moments: Moments) -> Tensor:
        """y = γ·x̂ + β in the input's dtype."""
        scaled = self.scaled_back(moments)
        if self.weight is not None:
            scaled = scaled * self.by_channel(self.weight.detach())
        if self.bias is not None:
            scaled = scaled + self.by_channel(self.bias.detach())
        return scaled.to(self.input.dtype)


def _of_torch(
    values: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float,
    eps: float, _cudnn: bool = False,
) -> Call:  # fmt: skip
    return Call(values, running_mean, running_var, weight, bias, training, momentum, eps)


_READ: dict[Any, Callable[..., Call]] = {functional.batch_norm: Call, torch.batch_norm: _of_torch}


class Watch(TorchFunctionMode):
    """Hands every batch norm that takes the statistics of its input to someone else."""

    def __init__(
        self,
        answer: Callable[[int, Call], Tensor],
        counters: Mapping[int, Tensor],
        see: Callable[[Any], None] | None = None,
    ) -> None:
        """
        Args:
            answer: gives the output of a call, given its number.
            counters: tensors by id that are not counted up, since another piece does it.
            see: is given what every operation returns.
        """
        super().__init__()
        self._passed = 0
        self._answer, self._counters, self._see = answer, counters, see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READ:
            call = _READ[func](*args, **(kwargs or {}))
            if call.training:
                self._passed += 1
                return self._answer(self._passed - 1, call)
        if func is Tensor.add_ and id(args[0]) in self._counters:
            return args[0]
        result = func(*args, **(kwargs or {}))
        if self._see is not None:
            self._see(result)
        return result


def counters_of(model: nn.Module) -> dict[int, Tensor]:
    """The counters of batches of all batch norms, by id."""
    found = [getattr(module, "num_batches_tracked", None) for module in model.modules()]
    return {id(tensor): tensor for tensor in found if isinstance(tensor, Tensor)}


@dataclass(frozen=True, slots=True)
class Cut:
    """Where the graph of a piece is cut: at a batch norm, whose output begins anew.

    Attributes:
        number: of torch's, of the node of the output.
        call: what was normalised; None outside of the window.
        node: of the output, which nothing goes back through; None without gradient.
    """

    number: int
    call: Call | None
    node: Node | None

    @classmethod
    def at(cls, call: Call, moments: Moments, anchor: Tensor, *, kept: bool) -> tuple[Cut, Tensor]:
        """The cut, and the batch norm's output."""
        output: Tensor = _Cut.apply(call.input, anchor, call, moments)  # type: ignore[no-untyped-call]
        node = output.grad_fn
        return cls(next_number() if node is None else node._sequence_nr(), call if kept else None, node), output


class _Cut(torch.autograd.Function):
    """Ties an output to its input in the graph, for those who walk along it; nothing goes back through it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, anchor: Tensor, call: Call, moments: Moments) -> Tensor:  # noqa: ARG004
        return call.output(moments)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # noqa: ARG004
        raise AssertionError("a cut is not gone back through")


@dataclass
class Keep:
    """What operations save for their way back is dropped outside of a window.

    The graph holds this object and what is kept, so neither may hold the graph: Python's collector does not see such a
    circle.

    Attributes:
        window: batch norms that are gone back through; each with the operations after it.
        passed: batch norms so far.
    """

    window: range
    passed: int = 0

    def saved(self) -> AbstractContextManager[object]:
        """Around a forward."""
        return saved_tensors_hooks(self._packed, _unpacked)

    def _packed(self, tensor: Tensor) -> Tensor | None:
        inside = self.passed - 1 in self.window or self.passed == self.window.start == 0
        return tensor.detach() if inside else None


def _unpacked(kept: Any) -> Any:
    assert kept is not None, "an operation outside of the window goes back"
    return kept
