"""What a measurement must leave as it was, each as a context manager that puts it back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

_NO_LIMIT = 1_000_000
_FORWARD_AND_BACKWARD = ("_compile.compile_inner", "backward._backward_impl")
"""The backward graph is compiled when backward first runs, and counted under a name of its own."""


@contextmanager
def keep_random() -> Iterator[None]:
    """Random state of torch on the CPU and on every CUDA device in use."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


@contextmanager
def keep_model(model: nn.Module) -> Iterator[None]:
    """Training flags and buffers of a model that is run but not trained."""
    flags = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


@dataclass(frozen=True, slots=True)
class Compiling:
    """Graphs and seconds of compilation since it was made."""

    graphs_before: int
    seconds_before: float

    def count(self) -> int:
        return _graphs() - self.graphs_before

    def seconds(self) -> float:
        return _seconds() - self.seconds_before


@contextmanager
def keep_compiling() -> Iterator[Compiling]:
    """Lifts the limit on recompilations (8 by default): one graph per batch size is what is wanted here."""
    from torch._dynamo import config

    with config.patch(recompile_limit=_NO_LIMIT, accumulated_recompile_limit=_NO_LIMIT):
        yield Compiling(_graphs(), _seconds())


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _seconds() -> float:
    from torch._dynamo.utils import compilation_time_metrics

    return float(sum(sum(compilation_time_metrics.get(name, [])) for name in _FORWARD_AND_BACKWARD))
