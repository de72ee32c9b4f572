"""Training runs that are killed and go on with other ranks and pieces; `nursery.py` runs them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from microbatch.training.checkpoints.folder import checkpoints
from microbatch.training.checkpoints.samples import GlobalBatches
from microbatch.training.step import TrainStep
from tests.reference.training_step import full_batch_step
from tests.training.jobs import Tagger, by_token, forward, sequences
from tests.training.nursery import Phase

ITEMS, BATCH, SEED, EVERY, LAST = 40, 13, 3, 2, 8


def model_of(kind: str, dropout: float) -> Any:
    torch.manual_seed(0)
    model: Any = Tagger(dropout).to(torch.float64)
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model.block, model.head, model):
            fully_shard(layer, mesh=mesh)
    return model


def parts_of(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """Weight decay in one of two groups, and a schedule in two parts."""
    head = [p for name, p in model.named_parameters() if "head" in name]
    rest = [p for name, p in model.named_parameters() if "head" not in name]
    groups = [{"params": rest, "weight_decay": 0.1}, {"params": head, "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-6)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
    steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)
    return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, steps], [3])


def step_of(kind: str, micro_batch_size: int, dropout: float) -> TrainStep:
    model = model_of(kind, dropout)
    optimizer, scheduler = parts_of(model)
    group = dist.group.WORLD if kind == "replicas" else None
    return TrainStep(
        model, optimizer, by_token, forward=forward, scheduler=scheduler, max_norm=1.0,
        micro_batch_size=micro_batch_size, process_group=group,
    )  # fmt: skip


def rows(data: dict[str, Tensor], indices: list[int]) -> dict[str, Tensor] | None:
    return {name: values[indices] for name, values in data.items()} if indices else None


def whole_weights(model: nn.Module) -> list[float]:
    tensors = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    values: list[float] = torch.cat([tensor.detach().flatten() for tensor in tensors]).tolist()
    return values


def uninterrupted(folder: Path) -> dict[str, Any]:
    """The plain loop over whole batches."""
    model = model_of("one", 0.0)
    (optimizer, scheduler), data = parts_of(model), sequences(items=ITEMS)
    batches = GlobalBatches(length=ITEMS, global_batch_size=BATCH, seed=SEED, epochs=None)
    for _, indices in zip(range(LAST), batches):
        full_batch_step(model, optimizer, by_token, forward, rows(data, indices), 1.0)
        scheduler.step()
    return {"weights": whole_weights(model), "lr": [group["lr"] for group in optimizer.param_groups]}


def train(
    folder: Path, kind: str, micro_batch_size: int, *, dropout: float = 0.0, kill: int | None = None, until: int = LAST
) -> dict[str, Any]:
    """Goes on from what there is; saves every second step; dies after step `kill`, not having saved it."""
    step, data = step_of(kind, micro_batch_size, dropout), sequences(items=ITEMS)
    torch.manual_seed(100 + (dist.get_rank() if dist.is_initialized() else 0))
    loaded = step.load(folder / "checkpoints")
    batches = GlobalBatches(length=ITEMS, global_batch_size=BATCH, seed=SEED, epochs=None, start=step.samples)
    for indices in batches:
        step(rows(data, indices))
        if step.steps == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if step.steps % EVERY == 0:
            step.save(folder / "checkpoints")
        if step.steps == until:
            break
    return {
        "weights": whole_weights(step.model),
        "lr": [group["lr"] for group in step.optimizer.param_groups],
        "from": None if loaded is None else loaded.name,
        "samples": step.samples,
    }


def own_checkpoint(folder: Path, kind: str, until: int) -> dict[str, Any]:
    """Inside a checkpoint of the user's own, in torch's own format."""
    step, data = step_of(kind, 4, 0.0), sequences(items=ITEMS)
    path, epoch = folder / "own", {"epoch": torch.tensor(7)}
    if path.exists():
        epoch["epoch"].zero_()
        _quietly(load, {"step": step, "mine": epoch}, path)
    for indices in GlobalBatches(length=ITEMS, global_batch_size=BATCH, seed=SEED, epochs=None, start=step.samples):
        if step.steps == until:
            break
        step(rows(data, indices))
    _quietly(save, {"step": step, "mine": epoch}, path)
    return {"weights": whole_weights(step.model), "epoch": int(epoch["epoch"]), "samples": step.samples}


def _quietly(call: Any, state: dict[str, Any], path: Path) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call(state, checkpoint_id=path)


def killed_while_saving(folder: Path) -> dict[str, Any]:
    """Dies at the first, second, ... touch of the file system in a save; each time a complete checkpoint is there."""
    step, data = step_of("one", 5, 0.0), sequences(items=ITEMS)
    step(rows(data, list(range(BATCH))))
    where = folder / "checkpoints"
    step.save(where, keep=1)
    known = whole_weights(step.model)
    found, at = [], 0
    while True:
        at += 1
        child = os.fork()
        if child == 0:
            step.steps += at
            _die_at(at, where)
            step.save(where, keep=1)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        fresh = step_of("one", 5, 0.0)
        loaded = fresh.load(where)
        same = whole_weights(fresh.model) == known
        found.append({"loaded": str(loaded), "same": same, "left": len(checkpoints(where))})
        if not os.WIFSIGNALED(status):
            return {"kills": at - 1, "found": found}


def _die_at(number: int, folder: Path) -> None:
    """SIGKILL at the n-th opening, making, renaming or removing of something in the folder."""
    seen = [0]

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and str(folder) in str(arguments):
            seen[0] += 1
            if seen[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


GROUPS: dict[str, list[Phase]] = {
    "reference": [Phase(1, uninterrupted)],
    "ddp 2 1 3": [
        Phase(2, train, {"kind": "ddp", "micro_batch_size": 4, "kill": 5}),
        Phase(1, train, {"kind": "one", "micro_batch_size": 3, "kill": 7}),
        Phase(3, train, {"kind": "ddp", "micro_batch_size": 2}),
    ],
    "replicas 3 2": [
        Phase(3, train, {"kind": "replicas", "micro_batch_size": 1, "kill": 3}),
        Phase(2, train, {"kind": "replicas", "micro_batch_size": 100}),
    ],
    "fsdp 3 2 1 2": [
        Phase(3, train, {"kind": "fsdp", "micro_batch_size": 4, "kill": 3}),
        Phase(2, train, {"kind": "fsdp", "micro_batch_size": 3, "kill": 5}),
        Phase(1, train, {"kind": "one", "micro_batch_size": 100, "kill": 7}),
        Phase(2, train, {"kind": "fsdp", "micro_batch_size": 2}),
    ],
    "dropout whole": [Phase(2, train, {"kind": "ddp", "micro_batch_size": 3, "dropout": 0.3})],
    "dropout": [
        Phase(2, train, {"kind": "ddp", "micro_batch_size": 3, "dropout": 0.3, "kill": 5}),
        Phase(2, train, {"kind": "ddp", "micro_batch_size": 3, "dropout": 0.3}),
    ],
    "own": [
        Phase(2, own_checkpoint, {"kind": "ddp", "until": 0}),
        Phase(1, own_checkpoint, {"kind": "one", "until": 3}),
        Phase(2, own_checkpoint, {"kind": "ddp", "until": LAST}),
    ],
    "own fsdp": [
        Phase(2, own_checkpoint, {"kind": "fsdp", "until": 3}),
        Phase(1, own_checkpoint, {"kind": "one", "until": LAST}),
    ],
    "killed while saving": [Phase(1, killed_while_saving)],
}
