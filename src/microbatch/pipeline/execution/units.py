"""What a model is cut between: its units, which are numbered blocks (``layers.3``) and other modules with weights.

Between units runs the model's own forward. It runs on every stage, with a stand-in for each unit of another stage, so
that masks, positions and everything else that follows from the model's input are made where they are needed, by the
code that makes them in one process. A stage gets from the stage before it the outputs of units that its own work
depends on; which these are is found by following values through that code once (`probe.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

from torch import nn

from microbatch.pipeline.layer_costs import block_of

Replace = Callable[[str, nn.Module], nn.Module | None]
"""What stands for the module of a name; None to look into it."""


def unit_names(model: nn.Module) -> list[str]:
    """Names of the outermost modules that are cut apart, in the order of definition.

    What holds numbered blocks is looked into; else a module is a unit if it is a block or has weights.
    """
    holders = {""}
    for name, _ in model.named_modules(remove_duplicate=False):
        if _has_number(name):
            above = block_of(name).split(".")[:-1]
            holders.update(".".join(above[:count]) for count in range(1, len(above) + 1))
    return list(_units("", model, holders))


def _has_number(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def _units(name: str, module: nn.Module, holders: set[str]) -> Iterator[str]:
    if name in holders:
        for child, inner in module._modules.items():
            if inner is not None:
                yield from _units(joined(name, child), inner, holders)
    elif isinstance(module, nn.ParameterList | nn.ParameterDict):
        return  # is never called
    elif name.rpartition(".")[2].isdigit() or next(module.parameters(), None) is not None:
        yield name


def joined(name: str, child: str) -> str:
    """Name of a child."""
    return f"{name}.{child}" if name else child


def inside(name: str, units: Iterator[str] | list[str]) -> bool:
    """Whether a parameter or buffer of this name is in a unit."""
    return any(name.startswith(f"{unit}.") for unit in units)


def skeleton(model: nn.Module, replace: Replace) -> nn.Module:
    """The model with some modules replaced. The model itself stays as it is; what is kept is shared with it.

    Tables of parameters and buffers of modules that are looked into are copies, so that entries can be replaced.
    """
    return _copied("", model, replace, {})


def _copied(name: str, module: nn.Module, replace: Replace, done: dict[int, nn.Module]) -> nn.Module:
    instead = replace(name, module) if name else None
    if instead is not None:
        return instead
    if id(module) in done:
        return done[id(module)]
    twin = copy.copy(module)
    done[id(module)] = twin
    for table in ("_parameters", "_buffers"):
        twin.__dict__[table] = dict(module.__dict__[table])
    twin.__dict__["_modules"] = {
        child: None if inner is None else _copied(joined(name, child), inner, replace, done)
        for child, inner in module._modules.items()
    }
    return twin
