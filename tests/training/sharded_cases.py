"""What ranks with a shard each do in a process group, FSDP2 and HSDP; run by `ranks.py`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from microbatch.training.step import TrainStep
from tests.training.jobs import LOSSES, by_token, difference, forward, reference, sequences, tagger
from tests.training.replicated_cases import out_of_memory, part, said_of, shares_of, watched

MESHES = {"fsdp": 1, "hsdp": 2}


def sharded(mesh: str = "fsdp", dtype: torch.dtype = torch.float64, *, reshard: bool = True) -> Any:
    model: Any = tagger(dtype)
    world = dist.get_world_size()
    shards = 2 if world == 4 else 1
    shape, names = ((world,), ("shard",)) if mesh == "fsdp" else ((world // shards, shards), ("replica", "shard"))
    devices = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in (model.block, model.head, model):
        fully_shard(layer, mesh=devices, reshard_after_forward=reshard)
    return model


def whole(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach() for n, t in tensors.items()}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return whole(dict(model.named_parameters()))


def step_of(model: nn.Module, loss: Any, *, lr: float = 0.1, **options: Any) -> TrainStep:
    return TrainStep(model, torch.optim.SGD(model.parameters(), lr=lr), loss, forward=forward, **options)


def gradients() -> Iterator[tuple[str, Any]]:
    """Losses × splits × meshes; ranks have 3, 1 and 9 rows or none, so different numbers of pieces."""
    world = dist.get_world_size()
    for index, name in enumerate(LOSSES):
        for size in (2, 5, 100):
            order = ("as drawn", "sorted", "idle")[(index + size) % 3]
            mesh = ("fsdp", "hsdp")[index % 2]
            model, batch, loss = sharded(mesh), sequences(order=order), LOSSES[name]
            expected = reference(tagger(), loss, batch)
            mine = part(batch, shares_of(world, 13, one_is_idle=order == "idle"))
            step = step_of(model, loss, micro_batch_size=size)
            step.accumulate(mine)
            found = whole({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
            result = step(mine)
            yield (
                f"{mesh} {name} {size} {order}",
                {
                    "difference": difference(found, expected.gradients),
                    "weights": difference(weights(model), expected.weights),
                    "loss": abs(result.loss - expected.loss) / abs(expected.loss),
                },
            )


def two_by_two() -> Iterator[tuple[str, Any]]:
    """HSDP on four ranks, two replicas of two shards; the last rank has half of the rows, the first may have none."""
    for order in ("as drawn", "idle"):
        for name in ("by_token", "own_weights"):
            model, batch, loss = sharded("hsdp"), sequences(order=order), LOSSES[name]
            expected = reference(tagger(), loss, batch)
            mine = part(batch, [2, 4, 7, 13] if order == "as drawn" else [0, 4, 7, 13])
            step = step_of(model, loss, micro_batch_size=3)
            step.accumulate(mine)
            found = whole({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
            result = step(mine)
            yield (
                f"{name} {order}",
                {
                    "difference": difference(found, expected.gradients),
                    "weights": difference(weights(model), expected.weights),
                    "loss": abs(result.loss - expected.loss) / abs(expected.loss),
                },
            )


def recoveries() -> Iterator[tuple[str, Any]]:
    """The last rank runs out of memory in a layer: all ranks go through the batch again at the same smaller size."""
    world = dist.get_world_size()
    for mesh in MESHES:
        for phase in ("forward", "backward"):
            for call in (2, 3):
                model, batch = sharded(mesh), sequences()
                expected = reference(tagger(), by_token, batch)
                step = step_of(model, by_token, micro_batch_size=4)
                fails = dist.get_rank() == world - 1
                logging.disable(logging.WARNING)
                begun = time.monotonic()
                with out_of_memory(model, phase, call if fails else 10**6):
                    result = step(part(batch, shares_of(world, 13)))
                seconds = time.monotonic() - begun
                logging.disable(logging.NOTSET)
                yield (
                    f"{mesh} {phase} {call}",
                    {
                        "difference": difference(weights(model), expected.weights),
                        "seconds": seconds,
                        "sizes": [attempt.micro_batch_size for attempt in result.attempts],
                    },
                )


def errors() -> Iterator[tuple[str, Any]]:
    """The last rank alone goes wrong at its second piece, in forward or backward, for good."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for what in ("forward", "backward", "fits not", "batch"):
        model, batch = sharded(), sequences()
        step, wrong = step_of(model, by_token, micro_batch_size=4), rank == world - 1
        mine: Any = dict(batch)
        if wrong and what == "batch":
            mine["tokens"] = mine["tokens"][:3]
        error = MemoryError("nothing left") if what == "fits not" else ValueError("three is not four")
        calls = [0]

        def fail(*_: Any, error: Exception = error, calls: list[int] = calls) -> None:
            calls[0] += 1
            if calls[0] >= 3:
                raise error

        before = weights(model)
        handles = []
        if wrong and what != "batch":
            register = (
                model.block.register_full_backward_hook if what == "backward" else model.block.register_forward_pre_hook
            )
            handles = [register(fail)]
        begun, caught = time.monotonic(), None
        logging.disable(logging.WARNING)
        try:
            step(mine)
        except Exception as raised:
            caught = raised
        logging.disable(logging.NOTSET)
        seconds = time.monotonic() - begun
        for handle in handles:
            handle.remove()
        after = weights(model)
        expected = reference(tagger(), by_token, batch)
        step(batch)
        yield (
            f"error {what}",
            {
                "type": type(caught).__name__,
                "text": str(caught),
                "seconds": seconds,
                "same": all(torch.equal(after[n], before[n]) for n in before),
                "next": difference(weights(model), expected.weights),
            },
        )


def clipped() -> Iterator[tuple[str, Any]]:
    for mesh in MESHES:
        model, batch = sharded(mesh), sequences()
        expected = reference(tagger(), by_token, batch, max_norm=1e-2, lr=10.0)
        step = step_of(model, by_token, lr=10.0, micro_batch_size=3, max_norm=1e-2)
        result = step(part(batch, shares_of(dist.get_world_size(), 13)))
        norm = torch.stack([g.square().sum() for g in expected.gradients.values()]).sum().sqrt().item()
        assert result.grad_norm is not None
        yield (
            f"clipped {mesh}",
            {
                "difference": difference(weights(model), expected.weights),
                "norm": abs(result.grad_norm / norm - 1),
            },
        )


def skipped() -> Iterator[tuple[str, Any]]:
    for what in ("no targets", "no rows"):
        model, batch = sharded(), sequences()
        batch["targets"][:] = -100
        before = weights(model)
        logging.disable(logging.WARNING)
        result = step_of(model, by_token, micro_batch_size=3)(batch if what == "no targets" else None)
        logging.disable(logging.NOTSET)
        after = weights(model)
        yield (
            f"skipped {what}",
            {
                "why": result.skipped,
                "same": all(torch.equal(before[n], after[n]) for n in before),
                "weight": result.weight,
            },
        )


def scaled() -> Iterator[tuple[str, Any]]:
    """Loss scaling in float32; then one rank's gradient is not finite, and all skip and lower the scale."""
    world = dist.get_world_size()
    for mesh in MESHES:
        model, batch = sharded(mesh, torch.float32), sequences()
        expected = reference(tagger(torch.float32), by_token, batch, max_norm=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        step = step_of(model, poisoned, micro_batch_size=3, scaler=scaler, max_norm=0.1)
        mine = part(batch, shares_of(world, 13))
        step(mine)
        found = difference(weights(model), expected.weights)
        if mine is not None and dist.get_rank() == world - 1:
            mine["advantages"][:] = torch.inf
        logging.disable(logging.WARNING)
        result = step(mine)
        logging.disable(logging.NOTSET)
        yield (
            f"scaled {mesh}",
            {
                "difference": found,
                "why": result.skipped,
                "same": difference(weights(model), expected.weights) == found,
                "scale": scaler.get_scale(),
            },
        )


def poisoned(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    losses, weight = by_token(output, batch)
    return (losses * torch.inf if batch["advantages"].isinf().any() else losses), weight


def planned() -> Iterator[tuple[str, Any]]:
    """`auto` from peaks that every rank measures: without a limit, then with one that the line puts near 5 items.

    Gloo's threads free what they sent some time later, so a peak of this small model varies by a few percent from one
    search to the next: what a rank allows is read off the line through the peaks of that very search.
    """
    world, limit = dist.get_world_size(), None
    for what in ("free", "limited"):
        model, batch = sharded(), sequences(items=13)
        expected = reference(tagger(), by_token, batch)
        step = step_of(model, by_token, micro_batch_size="auto", memory_limit=limit)
        result = step(part(batch, shares_of(world, 13)))
        assert step.choice is not None
        (small, low), (large, high) = step.choice.predicted
        slope = (high - low) / (large - small)
        allowed = 10 if limit is None else large + int((0.95 * limit - high) // slope)
        yield (
            f"planned {what}",
            {
                "difference": difference(weights(model), expected.weights),
                "size": result.micro_batch_size,
                "largest": step.choice.largest,
                "allowed": allowed,
                "tried": [probe.micro_batch_size for probe in step.choice.probes],
                "seconds": [probe.seconds for probe in step.choice.probes],
                "attempts": len(result.attempts),
                "source": step.choice.budget_source,
            },
        )
        told = [0] * world
        dist.all_gather_object(told, round((low + slope * (5.5 - small)) / 0.95))
        limit = max(told)  # the same for all


def proofs() -> Iterator[tuple[str, Any]]:
    """`check` of a sharded model: the copy that it is held against is made of whole parameters."""
    world = dist.get_world_size()
    for what in ("fsdp", "hsdp", "idle", "mixes"):
        model, batch = sharded("hsdp" if what == "hsdp" else "fsdp"), sequences()
        if what == "mixes":
            model.head.register_forward_hook(lambda _, args, output: output * (1 + args[0].square().mean()))
        step = step_of(model, by_token, micro_batch_size=2)
        mine = part(batch, shares_of(world, 13, one_is_idle=what == "idle"))
        before = weights(model)
        report = step.check(mine)
        after = weights(model)
        same = all(torch.equal(before[name], after[name]) for name in before)
        yield f"proof {what}", said_of(report) | {"same": same, "next": step(mine).skipped}


def wire() -> Iterator[tuple[str, Any]]:
    """Bytes and calls of a step after the first, and what the formula says."""
    world = dist.get_world_size()
    for reshard in (True, False):
        for pieces in (1, 4):
            model, batch = sharded(reshard=reshard), sequences(items=16)
            step = step_of(model, by_token, micro_batch_size=16 // pieces)
            step(batch)
            result, counted = watched(step, batch)
            # The root's own parameters are kept from forward to backward by FSDP2 whatever the setting of the layers.
            layers = sum(_bytes(m, world) for m in (model.block, model.head))
            root = _bytes(model.embed, world)
            gathers = 2 * (layers + root) if reshard else layers + root
            yield (
                f"wire {reshard} {pieces}",
                {
                    "bytes": result.sent_bytes,
                    "formula": pieces * (gathers + layers + root) * (world - 1) / world,
                    "calls": result.communication_calls,
                    "counted": counted,
                    "sharded modules": sum(isinstance(m, FSDPModule) for m in model.modules()),
                },
            )


def _bytes(module: nn.Module, world: int) -> int:
    """Whole parameters, each padded to equal shards of rows."""
    return sum(8 * -(-len(p) // world) * world * (p.numel() // len(p)) for p in module.parameters())
