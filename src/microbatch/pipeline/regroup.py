"""The costs of a model cut into another number of stages: neighbours joined, or each stage shared out evenly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from microbatch.errors import InvalidCosts
from microbatch.pipeline.costs import PER_STAGE, Costs, Floats


def stages_in(costs: Costs, ranks: int) -> int:
    """How many stages the costs speak of; as many as ranks where every figure is one number for all."""
    sizes = {len(np.asarray(getattr(costs, name))) for name in PER_STAGE if np.ndim(getattr(costs, name)) > 0}
    if len(sizes) > 1:
        raise InvalidCosts(f"Costs are given for {' and '.join(map(str, sorted(sizes)))} stages.", "Give one number.")
    stages = sizes.pop() if sizes else ranks
    if stages % ranks:
        raise InvalidCosts(
            f"{stages} stages do not lie evenly on {ranks} ranks.",
            f"Nearest: {max(stages // ranks, 1) * ranks} stages.",
        )
    return stages


def regroup(costs: Costs, given: int, stages: int) -> Costs:
    """The same model in ``stages`` stages. A single number is what one of ``given`` equal stages costs.

    Raises:
        InvalidCosts: neither number of stages is a multiple of the other.
    """
    if given == stages:
        return costs
    if stages % given and given % stages:
        raise InvalidCosts(f"{given} stages can be neither joined nor cut into {stages}.", f"Give {stages} values.")
    changed: dict[str, Any] = {
        name: _regrouped(getattr(costs, name), given, stages) for name in PER_STAGE if getattr(costs, name) is not None
    }
    return replace(costs, **changed, message=_links(costs, given, stages))


def _regrouped(value: Any, given: int, stages: int) -> Floats | float:
    values = np.asarray(value, dtype=float)
    if values.ndim == 0:
        return float(values) * given / stages
    if stages > given:
        return np.repeat(values, stages // given, axis=0) * given / stages
    joined: Floats = values.reshape(stages, given // stages, *values.shape[1:]).sum(axis=1)
    return joined


def _links(costs: Costs, given: int, stages: int) -> Floats | float:
    """A link between the halves of a stage is as fast as the one behind the stage."""
    if np.ndim(costs.message) == 0:
        return float(np.asarray(costs.message, dtype=float))
    links = costs.links(given)
    if stages > given:
        return np.repeat(np.append(links, links[-1:]), stages // given)[: stages - 1]
    return links[given // stages - 1 :: given // stages][: stages - 1]
