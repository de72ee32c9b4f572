"""What a training run is made of besides its data: taken from a step as plain values and tensors, and put back.

Everything is named by the model's own names, so that a wrapper (DistributedDataParallel, fully_shard, torch.compile)
or another number of ranks finds its own part again. What belongs to one rank (random state, what it has learnt about
its memory) is kept for each; every rank holds it all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    _get_fqns,
    _init_optim_state,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.optim import Optimizer

from microbatch.errors import InvalidCheckpoint
from microbatch.training.checkpoints import rank_state, stages
from microbatch.training.checkpoints.plain_values import Packer, Place, places, unpack
from microbatch.training.noise_scale import RunningNoise
from microbatch.training.ranks.distributed import is_pipeline

if TYPE_CHECKING:
    from microbatch.training.step import TrainStep

logger = logging.getLogger(__name__)

VERSION = 1

OTHER = "Load it into the model and optimizer that it was saved from, made by the same code."


def take(step: TrainStep) -> tuple[Any, dict[str, Tensor]]:
    """Everything that a step needs to go on: plain values for JSON, and the tensors that they name. On all ranks.

    Raises:
        InvalidCheckpoint: the scheduler, the optimizer or the model's extra state holds something else.
    """
    scaler = step.scaler if step.scaler is not None and step.scaler.is_enabled() else None
    packer, own = Packer(), _model_state(step.model)
    packed = packer.pack(
        {
            "version": VERSION,
            "steps": step.steps,
            "samples": step.samples,
            "outside": _outside(step.model, step.optimizer),
            "optimizer": _optimizer_state(step.model, step.optimizer),
            "scheduler": None if step.scheduler is None else step.scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "noise": None if step._noise is None else asdict(step._noise.running),
        }
    )
    packed["model"] = {
        name: packer.pack(value, f"model/{_first_name(step.model, name)}") for name, value in own.items()
    }
    if is_pipeline(step.model):
        optimizer = packed["optimizer"]
        optimizer["groups"] = stages.without_placeholders(
            step.optimizer, optimizer["groups"], _names(step.model, step.optimizer)
        )
        packed = stages.joined(step._ranks.share(packed))
    return packed | {"ranks": packer.pack(rank_state.take_from_all(step))}, packer.tensors


def own_part(step: TrainStep, packed: Any) -> Any:
    """What a checkpoint has for this rank: all of it, but for the stages of a pipeline.

    Raises:
        InvalidCheckpoint: of another model.
    """
    if not is_pipeline(step.model):
        return packed
    return stages.own_part(step.model, _groups(step.model, step.optimizer), packed)  # type: ignore[arg-type]


def check(step: TrainStep, packed: Any) -> None:
    """That saved values belong to this model and optimizer.

    Raises:
        InvalidCheckpoint: they do not, or another version wrote them.
    """
    if packed.get("version") != VERSION:
        raise InvalidCheckpoint(f"The checkpoint has version {packed.get('version')}, not {VERSION}.", OTHER)
    _check_names_and_shapes(_model_state(step.model), packed["model"])
    _check_names_and_shapes(_outside(step.model, step.optimizer), packed["outside"])
    _check_groups(_groups(step.model, step.optimizer), packed["optimizer"]["groups"])


def targets(step: TrainStep, packed: Any) -> dict[str, Tensor]:
    """A tensor to read each saved one into: the model's own, and new ones for the rest."""
    state = _model_state(step.model)
    own: dict[str, Any] = {f"model/{_first_name(step.model, name)}": value for name, value in state.items()}
    own |= {f"outside/{name}": value for name, value in _outside(step.model, step.optimizer).items()}
    parameters = {name: parameter for parameter, name in _names(step.model, step.optimizer).items()}
    needed = {place.key: place for place in places(packed)}
    return {key: own[key] if key in own else _room(place, parameters) for key, place in needed.items()}


def room_before_first_step(step: TrainStep) -> dict[str, Tensor]:
    """Tensors to read the optimizer's state into where it has none yet, made by torch in a step of size 0."""
    if step.optimizer.state:
        return {}
    _init_optim_state(step.optimizer)
    packer = Packer()
    packer.pack({"optimizer": _optimizer_state(step.model, step.optimizer)})
    step.optimizer.state.clear()  # it has made no step: Adam would count it
    return packer.tensors


def put_back(step: TrainStep, packed: Any, tensors: Mapping[str, Tensor]) -> None:
    """A step as it was saved, whatever the number of ranks and pieces.

    Args:
        step: of the same model and optimizer, see `check`.
        packed: the plain values.
        tensors: those that they name.
    """
    state = unpack(packed, tensors)
    _load_optimizer(step.model, step.optimizer, state["optimizer"])
    if is_pipeline(step.model):
        step.model.load_state_dict(state["model"])
    else:
        set_model_state_dict(step.model, state["model"])
    with torch.no_grad():
        for name, parameter in _outside(step.model, step.optimizer).items():
            parameter.copy_(state["outside"][name])
    _load("scheduler", step.scheduler, state["scheduler"])
    _load("scaler", step.scaler if step.scaler is not None and step.scaler.is_enabled() else None, state["scaler"])
    step.steps, step.samples = state["steps"], state["samples"]
    if step._noise is not None and state["noise"] is not None:
        step._noise.running = RunningNoise(**state["noise"])
    rank_state.put_back(step, state["ranks"])


def _model_state(model: nn.Module) -> dict[str, Any]:
    """Parameters and buffers; of a pipeline those of this rank's stages."""
    return model.state_dict() if is_pipeline(model) else get_model_state_dict(model)


def _first_name(model: nn.Module, name: str) -> str:
    """Under which a parameter is saved: of a weight that several stages hold, one and the same."""
    return model.first_name(name) if is_pipeline(model) else name  # type: ignore[operator]


def _names(model: nn.Module, optimizer: Optimizer) -> dict[Tensor, str]:
    """The name of every parameter, without what wrappers put before it; those outside of the model by their place."""
    names: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters():
        names[parameter] = _first_name(model, name) if is_pipeline(model) else next(iter(_get_fqns(model, name)))
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            names.setdefault(parameter, f"group {group_index} parameter {index}")
    return names


def _outside(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Parameters that the optimizer trains and the model does not have, as a learnt temperature of the loss."""
    own = set(model.parameters())
    names = _names(model, optimizer)
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    others = [parameter for parameter in trained if parameter not in own and not stages.is_placeholder(parameter)]
    return {names[parameter]: parameter.detach() for parameter in others}


def _optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's own ``state_dict``, by the names of the parameters instead of their numbers.

    torch's ``get_optimizer_state_dict`` is not used: before the first step it makes one of its own, after which Adam
    counts a step too many, and it refuses parameters that never had a gradient.
    """
    names, state = _order(model, optimizer), optimizer.state_dict()
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state.pop("param_groups")]
    for group in groups:
        group.pop("param_names", None)  # they depend on wrappers
    return {**state, "state": {names[number]: values for number, values in state["state"].items()}, "groups": groups}


def _groups(model: nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each group of the optimizer, with the names of its parameters."""
    names = _names(model, optimizer)
    groups = optimizer.param_groups
    return [{**group, "params": [names[parameter] for parameter in group["params"]]} for group in groups]


def _load_optimizer(model: nn.Module, optimizer: Optimizer, saved: dict[str, Any]) -> None:
    numbers = {name: number for number, name in enumerate(_order(model, optimizer))}
    now = [[numbers[name] for name in group["params"]] for group in _groups(model, optimizer)]
    groups = [{**group, "params": params} for group, params in zip(saved["groups"], now, strict=True)]
    state = {numbers[name]: values for name, values in saved["state"].items()}
    rest = {key: value for key, value in saved.items() if key not in ("state", "groups")}
    optimizer.load_state_dict({**rest, "state": state, "param_groups": groups})
    _keep_dtypes(optimizer, state)


def _keep_dtypes(optimizer: Optimizer, saved: Mapping[int, Mapping[str, Any]]) -> None:
    """``load_state_dict`` casts state to its parameter's dtype; fp32 state of bf16 weights would lose bits."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, values in saved.items():
        state = optimizer.state[parameters[number]]
        for name, value in values.items():
            if isinstance(value, Tensor) and isinstance(state[name], Tensor) and state[name].dtype != value.dtype:
                state[name] = value.to(state[name].device)


def _order(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Names in the order of the optimizer's numbers."""
    names = _names(model, optimizer)
    ordered = dict.fromkeys(parameter for group in optimizer.param_groups for parameter in group["params"])
    return [names[parameter] for parameter in ordered]


def _room(place: Place, parameters: Mapping[str, Tensor]) -> Tensor:
    """A new tensor: state of a parameter that has its shape is where it is and sharded as it is."""
    name = place.key.removeprefix("optimizer/state/").rpartition("/")[0]
    like = parameters.get(name)
    if like is not None and tuple(like.shape) == place.shape:
        return torch.zeros_like(like.detach(), dtype=place.dtype)
    return torch.zeros(place.shape, dtype=place.dtype)


def _check_names_and_shapes(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Of the tensors of a model, against those that were saved."""
    if missing := saved.keys() - own.keys():
        raise InvalidCheckpoint(f"The model has no {_listed(missing)}, which the checkpoint has.", OTHER)
    if missing := own.keys() - saved.keys():
        raise InvalidCheckpoint(f"The checkpoint has no {_listed(missing)}, which the model has.", OTHER)
    for name, value in own.items():
        theirs = places(saved[name]) if isinstance(value, Tensor) else []
        if theirs and (tuple(value.shape), value.dtype) != (theirs[0].shape, theirs[0].dtype):
            raise InvalidCheckpoint(
                f"{name} is {theirs[0].dtype} of shape {theirs[0].shape} in the checkpoint, {value.dtype} of shape "
                f"{tuple(value.shape)} in the model.",
                OTHER,
            )


def _check_groups(own: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    mine, theirs = ([set(group["params"]) for group in groups] for groups in (own, saved))
    if mine != theirs:
        sizes = " and ".join(str([len(group) for group in groups]) for groups in (theirs, mine))
        raise InvalidCheckpoint(
            f"The groups of the checkpoint's optimizer and of this one hold {sizes} parameters, or others.", OTHER
        )


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")


def _load(what: str, target: Any, saved: Any) -> None:
    if (target is None) != (saved is None):
        logger.warning(
            "The checkpoint has %s %s and the step has %s: it stays as it is.",
            "no" if saved is None else "a", what, "one" if target is not None else "none",
        )  # fmt: skip
    elif target is not None:
        target.load_state_dict(saved)
