"""Adds up operators while a model runs, and knows which module ran each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from microbatch.capture.formulas import FLOPS, FREE, MOVES, PER_ELEMENT, Arguments
from microbatch.capture.moved import moved_bytes, tensors_in


@dataclass(slots=True)
class Work:
    """What one module did."""

    flops: float = 0.0
    moved_bytes: float = 0.0


class Tally(TorchDispatchMode):
    """Counts every operator that runs inside `tallying`.

    An operator of the forward pass belongs to the innermost module that is running. One of the backward pass belongs
    to the module whose forward made the autograd node that is being undone; nodes are numbered in the order in which
    they are made, so the number is the link.

    Attributes:
        work: by the module's name, in the order in which modules first ran an operator.
        uncounted: operators that compute and have no formula.
        running: names of the modules that are running, the innermost last.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: dict[str, Work] = {}
        self.uncounted: set[str] = set()
        self.running: list[str] = []
        self._maker_of_node: dict[int, str] = {}

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
        out = func(*args, **kwargs)
        self._add(operator, operator.named(args, kwargs), out)
        return out

    def _add(self, operator: Operator, given: Arguments, out: object) -> None:
        owner = self._owner()
        if operator.free:
            return
        work = self.work.setdefault(owner, Work())
        work.moved_bytes += moved_bytes(operator.written_name, given, out)
        flops = operator.flops(given, out)
        if flops is None:
            self.uncounted.add(operator.full_name)
        else:
            work.flops += flops

    def _owner(self) -> str:
        if self.running:
            maker = self.running[-1]
            self._maker_of_node.setdefault(torch._C._autograd._get_sequence_nr() - 1, maker)
            return maker
        node = torch._C._current_autograd_node()
        return self._maker_of_node.get(node._sequence_nr(), "") if node is not None else ""


@contextmanager
def tallying(model: nn.Module) -> Iterator[Tally]:
    """Counts the operators that run inside, by the modules of `model`.

    The hooks are torch's hooks on all modules at once, so nothing is attached to the model itself.
    """
    tally = Tally()
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
class Operator:
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
def operator_of(func: OpOverload) -> Operator:
    """The description of one of torch's operators."""
    written_name = str(func._schema.name).removeprefix("aten::")
    name = written_name.rstrip("_") or written_name
    return Operator(
        full_name=str(func._schema.name),
        name=name,
        written_name=written_name,
        defaults={argument.name: argument.default_value for argument in func._schema.arguments},
        free=func.is_view or name in FREE,
        pointwise=torch.Tag.pointwise in func.tags,
    )
