"""Joint losses and exact batch norms over ranks, equal to one process with the joint batch; run by `nursery.py`."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from microbatch.errors import MicrobatchError
from microbatch.training.step import TrainStep
from tests.reference.training_step import full_batch_step
from tests.training.batch_norm_jobs import by_sample, made, some_samples
from tests.training.jobs import difference
from tests.training.joint_jobs import (
    BALANCED,
    ITEMS,
    balanced_whole,
    both,
    clip,
    experts,
    info_nce,
    pairs,
    sim_cse,
    token_batch,
    towers,
)
from tests.training.nursery import Phase

SHARES = {"unequal": {2: [3, ITEMS], 3: [3, 4, ITEMS]}, "one idle": {2: [0, ITEMS], 3: [5, 5, ITEMS]}}


def mine(batch: Any, shares: str) -> Any:
    ends = [0, *SHARES[shares][dist.get_world_size()]]
    start, stop = ends[dist.get_rank() : dist.get_rank() + 2]
    if start == stop:
        return None
    return (
        batch[start:stop] if isinstance(batch, Tensor) else {name: value[start:stop] for name, value in batch.items()}
    )


def whole(model: nn.Module, loss: Any, forward: Any, batch: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    found = full_batch_step(model, SGD(model.parameters(), lr=0.1), loss, forward, batch)
    return {name: value for name, value in found.items() if name != "loss"}, model.state_dict()


def step_of(model: nn.Module, loss: Any, forward: Any, kind: str, **options: Any) -> TrainStep:
    wrapped: Any = model
    if kind == "ddp":
        wrapped = DistributedDataParallel(model)
    elif kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    options["process_group"] = dist.group.WORLD if kind == "plain" else None
    return TrainStep(wrapped, SGD(model.parameters(), lr=0.1), loss, forward=forward, **options)


def plain(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def judged(
    model: nn.Module, step: TrainStep, batch: Any, gradients: dict[str, Tensor], state: dict[str, Tensor]
) -> dict[str, Any]:
    step.accumulate(batch)
    found = {name: plain(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    off = difference(found, gradients)
    result = step(batch)
    after = {name: plain(value) for name, value in model.state_dict().items()}
    parameters = [name for name, _ in model.named_parameters()]
    return {
        "gradients": off,
        "weights": difference({n: after[n] for n in parameters}, {n: state[n] for n in parameters}),
        "loss": result.loss,
        "attempts": [attempt.micro_batch_size for attempt in result.attempts],
    }


def contrastive(kind: str, shares: str) -> dict[str, Any]:
    model, batch = towers(), pairs()
    own = copy.deepcopy(model)
    gradients, state = whole(own, clip(own), both, batch)
    step = step_of(model, clip(model), both, kind, joint="outputs", micro_batch_size=2 + dist.get_rank())
    return judged(model, step, mine(batch, shares), gradients, state)


def shared_encoder(kind: str, shares: str) -> dict[str, Any]:
    """No parameter in the loss, so that it may be sharded too; the labels come out of forward."""
    model, batch = towers().image, pairs()

    def forward(m: Any, b: Any) -> Any:
        return {"one": m(b["image"]), "labels": b["labels"], "scale": 3.0}

    def loss(output: Any, _: Any) -> Any:
        weights = 1.0 + output["labels"].double()
        other = output["one"] * weights[:, None]
        return info_nce(output["one"], other.roll(1, 1), output["scale"]), weights.sum()

    gradients, state = whole(copy.deepcopy(model), loss, forward, batch)
    step = step_of(model, loss, forward, kind, joint="outputs", micro_batch_size=3)
    return judged(model, step, mine(batch, shares), gradients, state)


def balanced(name: str, kind: str, shares: str) -> dict[str, Any]:
    model, batch = experts(), token_batch()

    def forward(m: Any, b: Any) -> Any:
        return m(b["tokens"])

    gradients, state = whole(copy.deepcopy(model), balanced_whole, forward, batch)
    step = step_of(model, BALANCED[name], forward, kind, joint="terms", micro_batch_size=2)
    return judged(model, step, mine(batch, shares), gradients, state)


def normalised(name: str, kind: str, shares: str) -> dict[str, Any]:
    """Gradients from one model, the state after a step from another: running statistics move each time."""
    (model, x), (stepped, _) = made(name), made(name)
    loss = some_samples if shares == "unequal" else by_sample
    gradients, state = whole(copy.deepcopy(model), loss, lambda m, b: m(b), x)
    size = 2 + dist.get_rank()
    step_of(model, loss, None, kind, batch_norm="exact", micro_batch_size=size).accumulate(mine(x, shares))
    step_of(stepped, loss, None, kind, batch_norm="exact", micro_batch_size=size)(mine(x, shares))
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    after = stepped.state_dict()
    counters = {name: int(value) for name, value in after.items() if name.endswith("num_batches_tracked")}
    return {
        "gradients": difference(found, gradients),
        "weights": difference(after, state),
        "counters": sorted(set(counters.values())),
    }


def out_of_memory(call: int, phase: str) -> dict[str, Any]:
    """The last rank runs out of memory; with dropout the ranks must begin again together."""
    logging.disable(logging.WARNING)
    model, batch, last = towers(), pairs(), dist.get_rank() == dist.get_world_size() - 1
    own = copy.deepcopy(model)
    _, state = whole(own, clip(own), both, batch)
    step = step_of(model, clip(model), both, "ddp", joint="outputs", micro_batch_size=4)
    calls = [0]

    def fail(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == call:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    if last:
        register = (
            model.image[2].register_forward_pre_hook
            if phase == "forward"
            else model.image[2].register_full_backward_hook
        )
        register(fail)
    result = step(mine(batch, "unequal"))
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return {
        "weights": difference(parameters, {name: state[name] for name in parameters}),
        "attempts": [attempt.micro_batch_size for attempt in result.attempts],
    }


def errors(what: str) -> dict[str, Any]:
    logging.disable(logging.WARNING)
    model, batch, rank = towers(), pairs(), dist.get_rank()
    before = [p.detach().clone() for p in model.parameters()]

    def loss(output: Any, b: Any) -> Any:
        if what == "a rank fails" and rank == 1:
            raise ValueError("three is not four")
        if what == "the batch is read":
            b["labels"]
        return sim_cse(model)((output["image"], output["image"]), b)

    step = step_of(model, loss, both, "ddp", joint="outputs", micro_batch_size=3)
    try:
        step(mine(batch, "unequal"))
    except (MicrobatchError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
    return {"text": text, "same": all(torch.equal(a, b) for a, b in zip(before, model.parameters()))}


def cases(ranks: int) -> dict[str, tuple[Any, dict[str, Any]]]:
    """What a group of that many ranks runs: a function and its arguments by name."""
    found: dict[str, tuple[Any, dict[str, Any]]] = {}
    for shares in SHARES:
        for kind in ("ddp", "plain"):
            found[f"contrastive {kind} {shares}"] = contrastive, {"kind": kind, "shares": shares}
        if ranks == 3:
            found[f"normalised cumulative {shares}"] = (
                normalised,
                {"name": "cumulative", "kind": "ddp", "shares": shares},
            )
            continue
        for name, kind in (("residual", "ddp"), ("twice", "plain")):
            found[f"normalised {name} {shares}"] = normalised, {"name": name, "kind": kind, "shares": shares}
        for kind in ("ddp", "fsdp"):
            found[f"shared encoder {kind} {shares}"] = shared_encoder, {"kind": kind, "shares": shares}
        for name, kind in (("means", "plain"), ("rows", "fsdp")):
            found[f"balanced {name} {kind} {shares}"] = balanced, {"name": name, "kind": kind, "shares": shares}
    if ranks == 2:
        for phase, call in (("forward", 2), ("forward", 5), ("backward", 1), ("backward", 3)):
            found[f"out of memory {phase} {call}"] = out_of_memory, {"call": call, "phase": phase}
        for what in ("a rank fails", "the batch is read"):
            found[f"error: {what}"] = errors, {"what": what}
    return found


def run(_: Path, ranks: int) -> dict[str, Any]:
    return {name: function(**arguments) for name, (function, arguments) in cases(ranks).items()}


GROUPS = {str(ranks): [Phase(ranks, run, {"ranks": ranks})] for ranks in (2, 3)}
