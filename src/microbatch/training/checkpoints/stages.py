"""Checkpoints of pipelines: a rank has the state of its own stages, a checkpoint that of the whole model.

All names are those of the whole model, and a weight that several stages hold has the first of its names. So a run goes
on with any number of ranks and stages, in any schedule, or in one process; and one that began there goes on in stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from microbatch.errors import InvalidCheckpoint

if TYPE_CHECKING:
    from microbatch.pipeline.execution.pipeline import Pipeline

Packed = dict[str, Any]
"""What `microbatch.training.checkpoints.state` writes as JSON."""


def joined(every: Sequence[Packed]) -> Packed:
    """What the ranks have packed, each for its stages, as one process packs it.

    Raises:
        InvalidCheckpoint: optimizers with different numbers of groups, or parameters that no stage has.
    """
    outside = {name: value for one in every for name, value in one["outside"].items()}
    if outside:
        raise InvalidCheckpoint(
            f"The optimizer trains {next(iter(outside))}, which no stage has.", "Make it a parameter of the model."
        )
    numbers = sorted({len(one["optimizer"]["groups"]) for one in every})
    if len(numbers) > 1:
        raise InvalidCheckpoint(
            f"The optimizers of the ranks have {' and '.join(map(str, numbers))} groups of parameters.",
            "Give each the same groups; those without parameters of a rank are empty.",
        )
    optimizers = [one["optimizer"] for one in every]
    state = {name: values for one in reversed(optimizers) for name, values in one["state"].items()}
    model = {name: value for one in reversed(every) for name, value in one["model"].items()}
    groups = [_joined_group(same) for same in zip(*(one["groups"] for one in optimizers), strict=True)]
    return {**every[0], "model": model, "optimizer": {**optimizers[0], "state": state, "groups": groups}}


def own_part(pipe: Pipeline, groups: Sequence[Mapping[str, Any]], packed: Packed) -> Packed:
    """What a checkpoint of the whole model has for the stages of this rank.

    Args:
        pipe: the pipeline.
        groups: of this rank's optimizer, with names of parameters.
        packed: of the checkpoint.

    Raises:
        InvalidCheckpoint: it is of another model.
    """
    whole, saved, optimizer = pipe.whole_names(), packed["model"], packed["optimizer"]
    other = sorted(whole ^ saved.keys())
    if other or len(groups) != len(optimizer["groups"]):
        what = f"only one has {other[0]}" if other else f"{len(optimizer['groups'])} groups and {len(groups)} groups"
        raise InvalidCheckpoint(
            f"The checkpoint and the pipeline do not go together: {what}.",
            "Load it into a pipeline of the model that it was saved from, with the same groups of parameters.",
        )
    mine = {name for group in groups for name in group["params"]}
    held = {pipe.first_name(name) for name, _ in pipe.named_parameters()}
    own_groups = [
        {
            **theirs,
            "params": [name for name in theirs["params"] if name in held]
            + [name for name in ours["params"] if name not in whole],
        }
        for ours, theirs in zip(groups, optimizer["groups"], strict=True)
    ]
    state = {name: values for name, values in optimizer["state"].items() if name in mine}
    model = {name: saved[name] for name in pipe.state_dict()}
    return {**packed, "model": model, "optimizer": {**optimizer, "state": state, "groups": own_groups}}


def is_placeholder(parameter: Any) -> bool:
    """Whether an optimizer has it only because it must have one, see `microbatch.training.settings.made_of`."""
    return bool(parameter.numel() == 0 and not parameter.requires_grad)


def without_placeholders(optimizer: Optimizer, groups: Sequence[Packed], names: Mapping[Any, str]) -> list[Packed]:
    """Groups with the names of parameters that the model has."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    left_out = {names[parameter] for parameter in held if is_placeholder(parameter)}
    return [{**group, "params": [name for name in group["params"] if name not in left_out]} for group in groups]


def _joined_group(same: Sequence[Packed]) -> Packed:
    return {**same[0], "params": list(dict.fromkeys(name for one in same for name in one["params"]))}
