"""Units into stages: which units each stage holds, and the outputs of which cross from one stage to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from microbatch.errors import InvalidModel, InvalidSettings
from microbatch.pipeline.execution.probe import Record, names_of
from microbatch.pipeline.layer_costs import ADAM
from microbatch.pipeline.partition import LayerCost, Partition, partition, partition_at
from microbatch.pipeline.placement import Placement

PASSES = 3.0
"""Forward, input gradient and weight gradient, each about as much work."""

FLOPS_PER_BYTE = 16.0
"""What moving a byte counts beside arithmetic, where nothing was measured: the ridge of a CPU core or a small GPU."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A model in stages.

    Attributes:
        stages: names of the units of each stage, in the order in which they are called.
        crossing: per boundary the units whose outputs are sent over it, in that order.
        loose: per stage the parameters outside of units that it works with.
    """

    stages: tuple[tuple[str, ...], ...]
    crossing: tuple[tuple[str, ...], ...]
    loose: tuple[tuple[str, ...], ...]

    def before(self, stage: int) -> frozenset[str]:
        """Units of earlier stages."""
        return frozenset(unit for units in self.stages[:stage] for unit in units)

    def parameters(self, model: nn.Module, stage: int) -> list[str]:
        """Names of a stage's parameters in the whole model."""
        names = [name for unit in self.stages[stage] for name in names_of(model.get_submodule(unit), unit)]
        return [*names, *self.loose[stage]]


def cut(record: Record, stages: Sequence[Sequence[str]], uncalled: Sequence[str], loose: Sequence[str]) -> Cut:
    """What crosses, by going through the stages from the last to the first.

    Args:
        record: of a run that followed what depends on what.
        stages: units in the order of their calls.
        uncalled: units that the example does not reach; the first stage keeps them.
        loose: names of parameters outside of units.

    Raises:
        InvalidModel: a stage whose work cannot be followed back to the stage before it.
    """
    order = list(record.returned)
    needs = [frozenset().union(*(record.needs[unit] for unit in units)) for units in stages]
    needs[-1] |= record.at_end
    crossing: list[tuple[str, ...]] = []
    live: frozenset[str] = frozenset()
    for stage in range(len(stages) - 1, 0, -1):
        live = (live | needs[stage]) - frozenset(stages[stage])
        crossing.append(tuple(unit for unit in order if unit in live))
        if not crossing[-1]:
            raise InvalidModel(
                f"{stages[stage][0]} does not work on what {stages[stage - 1][-1]} returns.",
                "A pipeline needs layers that work on each other's results; cut elsewhere.",
            )
    owners = [tuple(name for name in loose if name in need) for need in needs]
    idle = tuple(name for name in loose if not any(name in names for names in owners))
    return Cut(
        stages=((*stages[0], *uncalled), *(tuple(units) for units in stages[1:])),
        crossing=tuple(reversed(crossing)),
        loose=((*owners[0], *idle), *owners[1:]),
    )


def divide(
    costs: Sequence[LayerCost], placement: Placement, names: Sequence[str] | None, memory_limit_bytes: float | None
) -> Partition:
    """Stages of units: where the user says, else so that the slowest rank is as fast as it can be.

    Args:
        costs: of the units, in the order of their calls.
        placement: the rank of each stage.
        names: the first unit of each stage but the first; a module that holds units stands for its first.
    """
    if names is None:
        return partition(costs, placement, memory_limit_bytes=memory_limit_bytes)
    units = [cost.name for cost in costs]
    return partition_at(costs, [_first_unit(name, units) for name in names], placement)


def _first_unit(name: str, units: Sequence[str]) -> str:
    found = next((unit for unit in units if unit == name or unit.startswith(f"{name}.")), None)
    if found is None:
        near = [unit for unit in units if unit.endswith(f".{name}")]
        raise InvalidSettings(
            f"No layer that can begin a stage is called {name!r}.",
            f"Did you mean {near[0]!r}?" if near else f"Layers are {', '.join(units[:12])}.",
        )
    return found


def modelled_costs(model: nn.Module, record: Record) -> list[LayerCost]:
    """Costs of the units from their FLOPs and bytes, which only compare units with each other."""
    shared = shared_parameters(model, list(record.returned))
    return [_modelled(model, unit, record, shared.get(unit, "")) for unit in record.returned]


def _modelled(model: nn.Module, unit: str, record: Record, shares: str) -> LayerCost:
    parameters = list(model.get_submodule(unit).parameters())
    weights = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    outputs = sum(meta.nbytes for meta in record.returned[unit].metas)
    flops = record.flops.get(unit, 0.0)
    moved = 2 * outputs + (weights if flops else 0)
    return LayerCost(
        name=unit,
        seconds=PASSES * (flops + FLOPS_PER_BYTE * moved) * 1e-12,
        weight_bytes=ADAM * weights,
        activation_bytes=float(outputs),
        shares=shares,
        shared_bytes=ADAM * max((p.numel() * p.element_size() for p in parameters), default=0) if shares else 0.0,
    )


def shared_parameters(model: nn.Module, units: Sequence[str]) -> dict[str, str]:
    """For each unit with a parameter that another unit holds too, one name for the units that share it."""
    holders: dict[int, list[str]] = {}
    for unit in units:
        for parameter in model.get_submodule(unit).parameters():
            holders.setdefault(id(parameter), []).append(unit)
    return {unit: "+".join(group) for group in holders.values() if len(group) > 1 for unit in group}


def tied_parameters(model: nn.Module, cut: Cut) -> dict[str, tuple[tuple[int, str], ...]]:
    """Parameters that stand in several stages: (stage, name there) of each place, by their first name."""
    places: dict[int, list[tuple[int, str]]] = {}
    named: Mapping[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
    for stage in range(len(cut.stages)):
        for name in cut.parameters(model, stage):
            places.setdefault(id(named[name]), []).append((stage, name))
    several = [found for found in places.values() if len({stage for stage, _ in found}) > 1]
    return {found[0][1]: tuple(found) for found in several}


def on_device(module: nn.Module, device: torch.device) -> nn.Module:
    """The module, moved unless it has no values yet."""
    return module if any(parameter.is_meta for parameter in module.parameters()) else module.to(device)
