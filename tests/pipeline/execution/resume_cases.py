"""Pipelines that are killed and go on with other ranks, stages and schedules; `tests/training/nursery.py` runs them."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from microbatch.errors import MicrobatchError
from microbatch.pipeline.execution.pipeline import Pipeline
from microbatch.training.checkpoints.samples import GlobalBatches
from microbatch.training.step import TrainStep
from tests.pipeline.execution.jobs import TIED, chain, decoder, sentences
from tests.pipeline.execution.situations import full
from tests.reference.training_step import full_batch_step
from tests.training.nursery import Phase

ITEMS, BATCH, SEED, EVERY, LAST = 41, 13, 3, 2, 8


def parts_of(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """Weight decay in one of two groups; a rank may have no parameters in one."""
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    rest = [p for name, p in model.named_parameters() if "norm" not in name]
    optimizer = torch.optim.AdamW([{"params": rest, "weight_decay": 0.1}, {"params": norms, "lr": 0.02}], eps=1e-6)
    return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)


def batches_of(start: int, replica: int = 0, replicas: int = 1) -> GlobalBatches:
    return GlobalBatches(
        length=ITEMS, global_batch_size=BATCH, seed=SEED, epochs=None, start=start, rank=replica, num_ranks=replicas
    )


def rows(data: dict[str, Tensor], indices: list[int]) -> dict[str, Tensor] | None:
    return {name: values[indices] for name, values in data.items()} if indices else None


def uninterrupted(folder: Path) -> dict[str, Any]:
    """The plain loop over whole batches, without a pipeline."""
    model = decoder(tied=True)
    (optimizer, scheduler), data = parts_of(model), sentences(ITEMS)
    for _, indices in zip(range(LAST), batches_of(0), strict=False):
        full_batch_step(model, optimizer, TIED.loss, TIED.forward, rows(data, indices), 1.0)
        scheduler.step()
    return {"weights": {name: value.flatten().tolist() for name, value in model.state_dict().items()}}


def step_of(schedule: str, mesh: tuple[int, int] | None, *, sharded: bool) -> tuple[TrainStep, int, int]:
    """Plain where there is no schedule; else with replicas where there is a mesh."""
    model: Any = decoder(tied=True)
    if not schedule:
        optimizer, scheduler = parts_of(model)
        step = TrainStep(model, optimizer, TIED.loss, forward=TIED.forward, scheduler=scheduler, max_norm=1.0)
        return step, 0, 1
    devices = None if mesh is None else init_device_mesh("cpu", mesh, mesh_dim_names=("pp", "dp"))
    pipe = Pipeline(model, TIED.example(sentences()), schedule=schedule, mesh=devices, num_micro_batches=3)
    for stage in pipe.stages if sharded else ():
        fully_shard(stage.module, mesh=devices["dp"])  # type: ignore[index]
    optimizer, scheduler = parts_of(pipe)
    step = TrainStep(pipe, optimizer, TIED.loss, forward=TIED.forward, scheduler=scheduler, max_norm=1.0)
    return step, pipe.layout.replica, pipe.layout.replicas


def train(
    folder: Path,
    schedule: str,
    *,
    mesh: tuple[int, int] | None = None,
    sharded: bool = False,
    kill: int | None = None,
) -> dict[str, Any]:
    """Goes on from what there is; saves every second step; dies after step `kill`, not having saved it."""
    (step, replica, replicas), data = step_of(schedule, mesh, sharded=sharded), sentences(ITEMS)
    loaded = step.load(folder / "checkpoints")
    for indices in batches_of(step.samples, replica, replicas):
        step(rows(data, indices))
        if step.steps == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if step.steps % EVERY == 0:
            step.save(folder / "checkpoints")
        if step.steps == LAST:
            break
    return said(step) | {"from": None if loaded is None else loaded.name}


def said(step: TrainStep) -> dict[str, Any]:
    weights = {name: full(value).flatten().tolist() for name, value in step.model.state_dict().items()}
    return {"weights": weights, "samples": step.samples, "lr": [group["lr"] for group in step.optimizer.param_groups]}


def own_checkpoint(folder: Path, schedule: str, until: int) -> dict[str, Any]:
    """Inside a checkpoint of the user's own, in torch's own format."""
    (step, _, _), data, path = step_of(schedule, None, sharded=False), sentences(ITEMS), folder / "own"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if path.exists():
            load({"step": step}, checkpoint_id=path)
        for indices in batches_of(step.samples):
            if step.steps == until:
                break
            step(rows(data, indices))
        save({"step": step}, checkpoint_id=path)
    return said(step)


def other_model(folder: Path) -> dict[str, Any]:
    """A checkpoint of another model is refused on every rank."""
    step, _, _ = step_of("one_f_one_b", None, sharded=False)
    step.save(folder / "checkpoints")
    pipe = Pipeline(chain(), torch.zeros(2, 6, dtype=torch.float64), schedule="one_f_one_b", num_micro_batches=1)
    other = TrainStep(pipe, parts_of(pipe)[0], TIED.loss)
    try:
        other.load(folder / "checkpoints")
    except MicrobatchError as error:
        return {"type": type(error).__name__, "text": str(error), "rank": dist.get_rank()}
    return {"type": "none", "text": ""}


GROUPS: dict[str, list[Phase]] = {
    "reference": [Phase(1, uninterrupted)],
    "2 4 1 2": [
        Phase(2, train, {"schedule": "one_f_one_b", "kill": 3}),
        Phase(4, train, {"schedule": "interleaved", "kill": 5}),
        Phase(1, train, {"schedule": "", "kill": 7}),
        Phase(2, train, {"schedule": "zb_v"}),
    ],
    "replicas, shards, one pipeline": [
        Phase(4, train, {"schedule": "one_f_one_b", "mesh": (2, 2), "kill": 3}),
        Phase(4, train, {"schedule": "zb_h1", "mesh": (2, 2), "sharded": True, "kill": 5}),
        Phase(3, train, {"schedule": "gpipe"}),
    ],
    "own": [
        Phase(2, own_checkpoint, {"schedule": "one_f_one_b", "until": 3}),
        Phase(1, own_checkpoint, {"schedule": "", "until": 5}),
        Phase(3, own_checkpoint, {"schedule": "zb_h1", "until": LAST}),
    ],
    "other model": [Phase(2, other_model)],
}
