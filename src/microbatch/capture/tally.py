"""Records operators while a model runs, and knows which module ran each of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from microbatch.capture.formulas import FLOPS, FREE, MOVES, PER_ELEMENT, Arguments
from microbatch.capture.moved import tensors_in
from microbatch.capture.record import Record, Run, measured


class Tally(TorchDispatchMode):
    """Records every operator that runs inside `tallying`.

    An operator of the forward pass belongs to the innermost module that is running. One of the backward pass belongs
    to the module whose forward made the autograd node that is being undone; nodes are numbered in the order in which
    they are made, so the number is the link.

    Attributes:
        records: in the order in which operators ran; free ones are left out.
        running: names of the modules that are running, the innermost last.
        run: the repeated block that is running.
        weights: storages that belong to the model.
    """

    def __init__(self, weights: Collection[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records: list[Record] = []
        self.running: list[str] = []
        self.run: Run | None = None
        self.weights = weights
        self._maker_of_node: dict[int, tuple[str, Run | None]] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operator = operator_of(func)
        if not operator.known:
            # An operator that torch defines by other operators counts as those.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = self._call(operator, func, args, kwargs)
        layer, run, backward = self.owner()
        if not operator.free:
            given = operator.named(args, kwargs)
            names = operator.full_name, operator.name, operator.written_name
            flops = operator.flops(given, out)
            self.records.append(
                measured(names, flops, given, out, weights=self.weights, layer=layer, run=run, backward=backward)
            )
        return out

    def _call(self, operator: TorchOperator, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as reason:
            raise DependsOnData(operator.full_name, self.owner()[0]) from reason

    def owner(self) -> tuple[str, Run | None, bool]:
        """Who runs an operator now: the module's name, the repeated block, and whether it undoes a forward."""
        if self.running:
            maker = self.running[-1], self.run
            self._maker_of_node.setdefault(torch._C._autograd._get_sequence_nr() - 1, maker)
            return *maker, False
        node: torch.autograd.graph.Node | None = torch._C._current_autograd_node()
        if node is None:
            return "", None, False
        return *self._maker_of_node.get(node._sequence_nr(), ("", None)), True

    def made(self, node: torch.autograd.graph.Node) -> None:
        """The running module made an autograd node of its own."""
        self._maker_of_node[node._sequence_nr()] = self.running[-1], self.run


class DependsOnData(Exception):
    """An operator whose result has a shape, or decides a path, that only the data knows."""

    def __init__(self, operator: str, layer: str) -> None:
        super().__init__(operator, layer)
        self.operator, self.layer = operator, layer


@contextmanager
def tallying(model: nn.Module, weights: Collection[int] = ()) -> Iterator[Tally]:
    """Records the operators that run inside, by the modules of `model`.

    The hooks are torch's hooks on all modules at once, so nothing is attached to the model itself.
    """
    tally = Tally(weights)
    names = {id(module): name for name, module in reversed(list(model.named_modules(remove_duplicate=False)))}

    def enter(module: nn.Module, _: Any) -> None:
        if id(module) in names:
            tally.running.append(names[id(module)])

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        if id(module) in names:
            tally.running.pop()

    with register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True), tally:
        yield tally


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchOperator:
    """What is known of one operator before it runs.

    Attributes:
        full_name: ``aten::add_``.
        name: the key of the tables of formulas: ``add``; other namespaces stay, as in ``quantized::linear_dynamic``.
        written_name: the same with its underscore where the operator writes into its first argument: ``add_``.
        defaults: its arguments in order, by name, with their defaults.
        free: it moves no byte.
        pointwise: it computes each element of its result from the elements at the same place.
    """

    full_name: str
    name: str
    written_name: str
    defaults: dict[str, Any]
    free: bool
    pointwise: bool

    @property
    def known(self) -> bool:
        """Whether it needs no formula or has one."""
        return self.free or self.pointwise or any(self.name in table for table in (FLOPS, MOVES, PER_ELEMENT))

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of one call by name."""
        return self.defaults | dict(zip(self.defaults, args)) | kwargs

    def flops(self, given: Arguments, out: object) -> float | None:
        """Floating-point operations of one call, or None where no formula is known."""
        if self.name in FLOPS:
            return FLOPS[self.name](given, out)
        if self.name in MOVES:
            return 0.0
        rate = PER_ELEMENT.get(self.name, 1.0 if self.pointwise else None)
        return None if rate is None else rate * max((t.numel() for t in tensors_in(given, out)), default=0)


@cache
def operator_of(func: OpOverload) -> TorchOperator:
    """The description of one of torch's operators."""
    written_name = str(func._schema.name).removeprefix("aten::")
    name = written_name.rstrip("_") or written_name
    return TorchOperator(
        full_name=str(func._schema.name),
        name=name,
        written_name=written_name,
        defaults={argument.name: argument.default_value for argument in func._schema.arguments},
        free=func.is_view or name in FREE,
        pointwise=torch.Tag.pointwise in func.tags,
    )
