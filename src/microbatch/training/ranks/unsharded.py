"""A model without FSDP2: the same modules around whole parameters, with no collectives."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from microbatch.batch.subject import unwrapped

_OWN = ("torch.distributed", "microbatch.")
"""Where hooks are from that only serve the sharding."""

_COMPOSED = "__composable_api"
"""Names under which torch keeps what `fully_shard` knows of a module."""


def unsharded(model: nn.Module) -> nn.Module:
    """The model itself where nothing is sharded; else a copy on the CPU, which every rank has to ask for."""
    model = unwrapped(model)
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return model
    memo: dict[int, Any] = {id(module): _new(module) for module in model.modules()}
    for tensor in [*model.parameters(), *model.buffers()]:
        memo[id(tensor)] = _whole(tensor)
    for module in model.modules():
        own = {n: _without_sharding(n, value) for n, value in vars(module).items() if not n.startswith(_COMPOSED)}
        memo[id(module)].__dict__.update(copy.deepcopy(own, memo))
    twin: nn.Module = memo[id(model)]
    return twin


def _new(module: nn.Module) -> nn.Module:
    """An empty one of the class that the module had before it was sharded."""
    kinds = [kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule)]
    kind: Any = kinds[0] if isinstance(module, FSDPModule) else type(module)
    empty: nn.Module = kind.__new__(kind)
    return empty


def _whole(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        full = full.detach().to("cpu", copy=True)
    return nn.Parameter(full, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else full


def _without_sharding(name: str, value: Any) -> Any:
    """Hooks of the user's own stay; those that load and save state are of no use to a copy that only runs."""
    if not name.endswith("_hooks") or not isinstance(value, dict):
        return value
    if "state_dict" in name:
        return OrderedDict()
    return OrderedDict((key, hook) for key, hook in value.items() if not _module_of(hook).startswith(_OWN))


def _module_of(hook: Any) -> str:
    return str(getattr(hook, "__module__", ""))
