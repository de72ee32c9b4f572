"""What every module of a model got and gave in one run, as a tree of calls in the order of execution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from microbatch.batch.exactness import relative_difference
from microbatch.batch.rows import Rows, leaves, parts_of

FORWARD = "forward"
"""Name of the outermost call: the caller's own function."""


@dataclass(slots=True)
class Call:
    """One call of a module.

    Attributes:
        name: path of the module; "" is the model itself, `FORWARD` the function around it.
        module: the module; None for the function around the model.
        turn: how many calls of the same module came before.
        inputs, outputs: copies of its tensors; `outputs` is None while it runs and when it raised.
        calls: the calls that it made.
        operators: names and results of the operators that ran in it and in no module inside it, where asked for.
    """

    name: str
    module: nn.Module | None
    turn: int = 0
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] | None = None
    calls: list[Call] = field(default_factory=list)
    operators: list[tuple[str, tuple[Tensor, ...]]] = field(default_factory=list)


class Tracer:
    """Records a run of a model; a context around it.

    Args:
        model: what runs.
        operators_of: path of the module whose operators are recorded too.
        given: outputs to put in place of a module's own, by path and turn; the module's own are recorded.
        rows: which rows of those outputs belong to this run.

    Attributes:
        root: the outermost call.
        replaced: paths of the modules whose outputs were replaced.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        operators_of: str | None = None,
        given: Mapping[tuple[str, int], Sequence[Tensor]] | None = None,
        rows: Rows | None = None,
    ) -> None:
        self.root = Call(FORWARD, None)
        self.replaced: set[str] = set()
        self._model, self._operators_of = model, operators_of
        self._given, self._rows = given or {}, rows
        self._stack = [self.root]
        self._turns: dict[str, int] = {}

    def notice(self, operator: str, result: object) -> None:
        """Records an operator of the module asked for; called for every operator."""
        call = self._stack[-1]
        if call.name == self._operators_of:
            call.operators.append((operator, _copies(result)))

    @contextmanager
    def recording(self) -> Iterator[Call]:
        """The tree grows while this block runs. After an exception the calls that raised have no outputs."""
        handles = []
        for name, module in self._model.named_modules():
            handles.append(module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(self._leave, name)))
        try:
            yield self.root
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        turn = self._turns[name] = self._turns.get(name, -1) + 1
        call = Call(name, module, turn, _copies((args, kwargs)))
        self._stack[-1].calls.append(call)
        self._stack.append(call)

    def _leave(self, name: str, module: nn.Module, _: Any, output: Any) -> Any:
        # A module whose exception was caught by the model is still on the stack, above the one that now returns.
        while len(self._stack) > 2 and self._stack[-1].module is not module:
            self._stack.pop()
        call = self._stack.pop()
        call.outputs = _copies(output)
        given = self._given.get((name, call.turn))
        return output if given is None else self._replace(name, output, given)

    def _replace(self, name: str, output: Any, given: Sequence[Tensor]) -> Any:
        """The same structure around the whole batch's tensors, where their rows can be told."""
        whole = iter(given)

        def replace(tensor: Tensor) -> Tensor:
            full = next(whole, None)
            if full is None or self._rows is None or not tensor.is_floating_point():
                return tensor
            parts = parts_of(full, tensor.shape, self._rows)
            if not parts:
                return tensor
            self.replaced.add(name)
            # Where two orders of rows are possible, the one that the module's own output is nearer to.
            nearest = min(parts, key=lambda part: relative_difference(part, tensor))
            return nearest.to(tensor.dtype)

        return tree_map_only(Tensor, replace, output)


def _copies(value: object) -> tuple[Tensor, ...]:
    """A later operator may write into the originals."""
    return tuple(tensor.detach().clone() for tensor in leaves(value))
