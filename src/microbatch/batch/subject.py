"""A model under examination: run as a copy on the CPU in float64, without chance, and never changed."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from microbatch.batch.example import map_tensors, tensors_in
from microbatch.batch.quiet import Quiet, default_dtype, seeded
from microbatch.batch.trace import Tracer
from microbatch.errors import InvalidModel, NoAnswer
from microbatch.units import format_bytes

Forward = Callable[[Any, Any], Any]
"""``forward(model, batch) -> output``."""


class Subject:
    """Runs copies of one model; each starts from the state in which the model was given.

    Attributes:
        model: a copy on the CPU, in the mode and dtype of the examination; runs are made with copies of it.
        draws: random operators that a run had and that were put aside.
    """

    def __init__(self, model: nn.Module, forward: Forward | None, mode: str, dtype: torch.dtype | None) -> None:
        """
        Args:
            forward: by default `call`.
            mode: training or inference; anything else leaves the model in its own.
            dtype: of floating-point weights and inputs; None: as they are.

        Raises:
            InvalidModel: the model cannot be copied.
        """
        self._forward, self._dtype = forward or call, dtype
        self.model = _copied(unwrapped(model), dtype)
        self.draws = 0
        if mode == "inference":
            self.model.eval()
        elif mode == "training" and not self.model.training:  # frozen parts of one that trains stay in eval mode
            self.model.train()

    def fresh(self) -> nn.Module:
        """A copy in the state at the start, on the same parameters."""
        return copy.deepcopy(self.model, {id(parameter): parameter for parameter in self.model.parameters()})

    def run(self, batch: object, model: nn.Module | None = None, *, tracer: Tracer | None = None) -> Any:
        """One forward without gradients over a copy of the batch; what the model raises passes through.

        Args:
            model: a copy that keeps its state from an earlier run; by default a fresh one.
            tracer: of that model.
        """
        model = self.fresh() if model is None else model
        own = self.placed(batch)
        with torch.no_grad(), ExitStack() as stack:
            root = stack.enter_context(tracer.recording()) if tracer else None
            stack.enter_context(self.quietly(tracer))
            output = self._forward(model, own)
        if root is not None:
            root.inputs, root.outputs = tuple(tensors_in(own)), tuple(t.detach().clone() for t in tensors_in(output))
        return output

    def differentiate(self, batch: object, total: Callable[[Any, Any], Tensor | None]) -> None:
        """Forward and backward; gradients are added to those of the parameters of `model`.

        Args:
            total: from the output and the batch to what is differentiated; None for nothing.
        """
        model, own = self.fresh(), self.placed(batch)
        with torch.enable_grad(), self.quietly():  # activation checkpoints run the forward again in the backward
            value = total(self._forward(model, own), self.placed(batch))
            if value is not None and value.requires_grad:
                value.backward()

    @contextmanager
    def quietly(self, tracer: Tracer | None = None) -> Iterator[None]:
        """What holds while the model runs: the same random state, no chance, float64, no compilation."""
        quiet = Quiet(wide=self._dtype is torch.float64, noticed=None if tracer is None else tracer.notice)
        with seeded(), default_dtype(self._dtype), not_compiled(), quiet:
            yield
        self.draws = max(self.draws, quiet.draws)

    def outputs(self, batch: object, model: nn.Module | None = None) -> tuple[Tensor, ...]:
        """Every tensor of the output, in order."""
        return tuple(tensor.detach() for tensor in tensors_in(self.run(batch, model)))

    def placed(self, batch: object) -> Any:
        """A copy of the batch as the model gets it."""
        return map_tensors((batch,), {}, self._placed)[0][0]

    def _placed(self, _: str, tensor: Tensor) -> Tensor:
        dtype = self._dtype if tensor.is_floating_point() else None
        return tensor.detach().to(device="cpu", dtype=dtype, copy=True)


@contextmanager
def not_compiled() -> Iterator[None]:
    """Compiled parts run as written. Where no compiler is loaded there are none, and none is loaded for this."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def call(model: Any, batch: Any) -> Any:
    """``model(**batch)`` for a mapping, ``model(*batch)`` for a tuple or list, else ``model(batch)``."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile` and data parallel wrappers."""
    while True:
        if isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        elif isinstance(model, DataParallel | DistributedDataParallel):
            model = model.module
        else:
            return model


def _copied(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy on the CPU. Each tensor is brought over on its own, so that no second model lies on its device."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device="cpu", dtype=dtype if tensor.is_floating_point() else None, copy=True)

    _check_memory(model, dtype)
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():  # what a module keeps of an earlier call may hang on a graph
            for tensor in tensors_in(value) if isinstance(value, Tensor | list | tuple | dict) else ():
                if not isinstance(tensor, nn.Parameter) and type(tensor) is Tensor:
                    memo[id(tensor)] = moved(tensor)
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter:
            memo[id(parameter)] = nn.Parameter(moved(parameter), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = moved(buffer)
    try:
        return copy.deepcopy(model, memo).to(device="cpu", dtype=dtype)
    except Exception as error:
        raise InvalidModel(
            f"The model cannot be copied ({type(error).__name__}: {error}), and it must not be changed.",
            "Make it work with copy.deepcopy.",
        ) from error


def _check_memory(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Refuses a copy that does not fit: the system would end the process without a word. And one without weights."""
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        raise InvalidModel("The model has lazy layers without weights.", "Run it once on the batch, then check it.")
    each = 0 if dtype is None else dtype.itemsize
    needed = sum(p.numel() * (each if p.is_floating_point() and each else p.element_size()) for p in model.parameters())
    free = psutil.virtual_memory().available
    if needed > free:
        raise NoAnswer(
            f"A copy of the model in float64 takes {format_bytes(needed)}; {format_bytes(free)} are free.",
            "Check the same model with fewer layers: layers of one kind behave alike.",
        )
