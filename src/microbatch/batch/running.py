"""How a model is called with a batch, where it is, and the module behind ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

Forward = Callable[[nn.Module, Any], Any]
"""``forward(model, batch) -> output``."""


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first parameter is, else its first buffer, else the CPU."""
    tensor = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if tensor is None else tensor.device


def call(model: Callable[..., Any], batch: Any, *, list_of_samples: bool | None = None) -> Any:
    """The model on a batch: a mapping as keywords, a tuple or a list of members as arguments, else as it is."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple) or (isinstance(batch, list) and not list_of_samples):
        return model(*batch)
    return model(batch)


def is_compiled(model: object) -> bool:
    """Whether a call of the model is one of ``torch.compile``."""
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[nn.Module]:
    """The module behind ``torch.compile``, and those compiled in place as they were before."""
    plain = getattr(model, "_orig_mod", model)
    compiled = [(module, module._compiled_call_impl) for module in plain.modules() if module._compiled_call_impl]
    try:
        for module, _ in compiled:
            module._compiled_call_impl = None
        yield plain
    finally:
        for module, call_ in compiled:
            module._compiled_call_impl = call_
