"""What ranks with a replica each do in a process group; run by `ranks.py`, judged by `test_distributed.py`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from microbatch.training.step import TrainStep
from tests.training.jobs import LOSSES, by_token, difference, forward, gradients_of, reference, sequences, tagger

SIZES = (1, 2, 5, 100)
WRAPPED = {"ddp": True, "plain": False}


def part(batch: dict[str, Tensor], shares: list[int]) -> dict[str, Tensor] | None:
    """This rank's rows; shares are cumulative ends."""
    ends = [0, *shares]
    rank = dist.get_rank()
    start, stop = ends[rank], ends[rank + 1]
    return {name: value[start:stop] for name, value in batch.items()} if stop > start else None


def shares_of(world: int, items: int, *, one_is_idle: bool = False) -> list[int]:
    """Very unequal parts: with two ranks 3 and the rest."""
    if one_is_idle and world > 1:
        return [0] * (world - 1) + [items]
    return {1: [items], 2: [3, items], 3: [3, 4, items]}[world]


def step_of(model: nn.Module, loss: Any, *, ddp: bool, lr: float = 0.1, **options: Any) -> TrainStep:
    options.setdefault("forward", forward)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    if ddp:
        wrapped: Any = DistributedDataParallel(model)
        return TrainStep(wrapped, optimizer, loss, **options)
    return TrainStep(model, optimizer, loss, process_group=dist.group.WORLD, **options)


def equal_on_ranks(model: nn.Module) -> bool:
    """Bit for bit, buffers too."""
    own = torch.cat([t.detach().double().flatten() for t in [*model.parameters(), *model.buffers()]])
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    return all(torch.equal(one, own) for one in every)


def gradients_case(name: str, size: int, kind: str, order: str, dtype: torch.dtype) -> dict[str, Any]:
    world = dist.get_world_size()
    model, batch, loss = tagger(dtype), sequences(order=order), LOSSES[name]
    mine = part(batch, shares_of(world, 13, one_is_idle=order == "idle"))
    exact = reference(tagger(dtype).double(), loss, batch)
    full = difference(reference(model, loss, batch).gradients, exact.gradients)
    step = step_of(model, loss, ddp=WRAPPED[kind], micro_batch_size=size + dist.get_rank())
    worst = 0.0
    for _ in range(2):
        step.accumulate(mine)
        worst = max(worst, difference(gradients_of(model), exact.gradients))
    result = step(mine)
    return {
        "difference": worst,
        "full": full,
        "loss": abs(result.loss - exact.loss) / abs(exact.loss),
        "equal": equal_on_ranks(model),
    }


def gradients() -> Iterator[tuple[str, Any]]:
    for name in LOSSES:
        for size in SIZES:
            kind, order = ("ddp", "plain")[size % 2], ("as drawn", "sorted", "idle")[size % 3]
            yield f"{name} {size} {kind} {order} float64", gradients_case(name, size, kind, order, torch.float64)
        yield f"{name} 2 ddp sorted float32", gradients_case(name, 2, "ddp", "sorted", torch.float32)


@contextmanager
def out_of_memory(model: nn.Module, phase: str, call: int) -> Iterator[None]:
    """The model's block runs out of memory in a phase of its `call`-th piece, once."""
    calls = [0]

    def fail(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == call:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    block: Any = model.block
    register = block.register_forward_pre_hook if phase == "forward" else block.register_full_backward_hook
    handle = register(fail)
    yield
    handle.remove()


def recoveries() -> Iterator[tuple[str, Any]]:
    """The last rank runs out of memory; the others do not notice. Losses of one and of several weights."""
    world = dist.get_world_size()
    for kind in WRAPPED:
        for phase in ("forward", "backward"):
            for name, call in (("by_token", 1), ("by_token", 3), ("own_weights", 5)):
                model, batch, loss = tagger(), sequences(), LOSSES[name]
                expected = reference(model, loss, batch)
                step = step_of(model, loss, ddp=WRAPPED[kind], micro_batch_size=4)
                fails = dist.get_rank() == world - 1
                logging.disable(logging.WARNING)
                begun = time.monotonic()
                with out_of_memory(model, phase, call if fails else 10**6):
                    result = step(part(batch, shares_of(world, 13)))
                seconds = time.monotonic() - begun
                logging.disable(logging.NOTSET)
                weights = {n: p.detach() for n, p in model.named_parameters()}
                yield (
                    f"{kind} {phase} {name} {call}",
                    {
                        "difference": difference(weights, expected.weights),
                        "equal": equal_on_ranks(model),
                        "seconds": seconds,
                        "attempts": len(result.attempts),
                    },
                )


def clipped() -> Iterator[tuple[str, Any]]:
    world = dist.get_world_size()
    for max_norm in (1e-3, 1e3):
        model, batch = tagger(), sequences()
        expected = reference(model, by_token, batch, max_norm=max_norm, lr=10.0)
        step = step_of(model, by_token, ddp=True, lr=10.0, micro_batch_size=3, max_norm=max_norm)
        result = step(part(batch, shares_of(world, 13)))
        norm = torch.stack([g.square().sum() for g in expected.gradients.values()]).sum().sqrt().item()
        assert result.grad_norm is not None
        yield (
            f"max_norm {max_norm}",
            {
                "difference": difference({n: p.detach() for n, p in model.named_parameters()}, expected.weights),
                "norm": abs(result.grad_norm / norm - 1),
            },
        )


class Forked(nn.Module):
    """Rows with a positive first value go through one layer, the others through another; a third is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative, self.never = (nn.Linear(4, 3, dtype=torch.float64) for _ in range(3))
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64, eps=1e9)  # scales alike whatever the batch: rows stay apart
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        positive = bool((x[:, 0] > 0).all())
        self.steps += 1
        out: Tensor = (self.positive if positive else self.negative)(x)
        return out


def unused() -> Iterator[tuple[str, Any]]:
    """Rank 0 sees only positive rows, the others negative ones; weight decay must leave the unused layer alone."""
    for kind in WRAPPED:
        torch.manual_seed(0)
        model, rank, world = Forked(), dist.get_rank(), dist.get_world_size()
        model.norm.requires_grad_(False)
        before = model.never.weight.detach().clone()
        x = (
            torch.rand(4 * world, 4, dtype=torch.float64)
            * torch.cat([torch.ones(4), -torch.ones(4 * world - 4)])[:, None]
        )
        expected = [(model.positive(x[:4]).square().sum(), model.positive)]
        if world > 1:
            expected.append((model.negative(x[4:]).square().sum(), model.negative))
        wanted = [torch.autograd.grad(total / (4 * world), list(layer.parameters())) for total, layer in expected]
        step = step_of(
            model, lambda o, b: (o.square().sum(), len(o)), ddp=WRAPPED[kind], forward=None, micro_batch_size=2
        )
        step.optimizer.param_groups[0]["weight_decay"] = 0.1
        step.accumulate(x[4 * rank : 4 * rank + 4])
        found = [[p.grad for p in layer.parameters()] for _, layer in expected]
        differences = [(g - w).abs().max().item() for a, b in zip(found, wanted) for g, w in zip(a, b) if g is not None]
        step(x[4 * rank : 4 * rank + 4])
        yield (
            f"unused {kind}",
            {
                "difference": max(differences),
                "gradients": len(differences),
                "untouched": bool((model.never.weight == before).all()),
                "equal": equal_on_ranks(model),
            },
        )


def skipped() -> Iterator[tuple[str, Any]]:
    for what in ("no targets", "no rows"):
        model, batch = tagger(), sequences()
        batch["targets"][:] = -100
        before = [p.detach().clone() for p in model.parameters()]
        logging.disable(logging.WARNING)
        result = step_of(model, by_token, ddp=True, micro_batch_size=3)(batch if what == "no targets" else None)
        logging.disable(logging.NOTSET)
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
        yield f"skipped {what}", {"why": result.skipped, "same": same, "weight": result.weight}


def only_a_number(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return by_token(output, batch)[0]


def errors() -> Iterator[tuple[str, Any]]:
    """One rank alone goes wrong: every rank raises at once, weights stay, and the next step works."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for what in ("loss", "batch", "model", "fits not", *(["parameters"] if world > 1 else [])):
        model, batch = tagger(), sequences()
        wrong = rank == world - 1
        if what == "parameters" and wrong:
            model.head.bias.requires_grad_(False)
        step = step_of(model, only_a_number if wrong and what == "loss" else by_token, ddp=False, micro_batch_size=1)
        mine: Any = dict(batch)
        if wrong and what == "batch":
            mine["tokens"] = mine["tokens"][:3]
        if wrong and what in ("model", "fits not"):
            error = ValueError("three is not four") if what == "model" else MemoryError("nothing left")

            def fail(*_: Any, error: Exception = error) -> None:
                raise error

            handle = model.head.register_forward_pre_hook(fail)
        before = [p.detach().clone() for p in model.parameters()]
        begun, caught = time.monotonic(), None
        try:
            step(mine)
        except Exception as error:
            caught = error
        seconds = time.monotonic() - begun
        if wrong and what in ("model", "fits not"):
            handle.remove()
        model.head.bias.requires_grad_(True)
        after = step_of(model, by_token, ddp=False, micro_batch_size=4)
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
        yield (
            f"error {what}",
            {
                "type": type(caught).__name__,
                "text": str(caught),
                "seconds": seconds,
                "same": same,
                "next": after(batch).skipped,
            },
        )


def proofs() -> Iterator[tuple[str, Any]]:
    """`check` on ranks of very unequal parts: exact, exact with several weights, and a rank alone that is not."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for what, loss in (("exact", by_token), ("weights", LOSSES["own_weights"]), ("idle", by_token), ("one", by_token)):
        model, batch = tagger(), sequences()
        if what == "one" and rank == world - 1:  # rows of this rank alone see each other
            model.head.register_forward_hook(lambda _, args, output: output * (1 + args[0].square().mean()))
        step = step_of(model, loss, ddp=what == "exact", micro_batch_size=2)
        mine = part(batch, shares_of(world, 13, one_is_idle=what == "idle"))
        before = [p.detach().clone() for p in model.parameters()]
        report = step.check(mine)
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
        yield f"proof {what}", said_of(report) | {"same": same, "next": step(mine).skipped}


def said_of(report: Any) -> dict[str, Any]:
    """What every rank must say alike."""
    return {
        "exact": report.exact,
        "difference": report.largest_difference,
        "culprits": [culprit.module for culprit in report.culprits],
        "notes": list(report.notes),
    }


class Counting(TorchDispatchMode):
    """Counts the collectives that reach torch's process groups, whoever calls them."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def watched(step: TrainStep, batch: Any) -> tuple[Any, int]:
    """A step's result, and the collectives that torch counts in it."""
    with Counting() as counting:  # type: ignore[no-untyped-call]
        result = step(batch)
    return result, counting.calls


def wire() -> Iterator[tuple[str, Any]]:
    """Bytes and calls for 1, 4 and 16 pieces, as the result says and as torch counts the calls."""
    for kind in WRAPPED:
        for pieces in (1, 4, 16):
            model, batch = tagger(), sequences(items=16)
            step = step_of(model, by_token, ddp=WRAPPED[kind], micro_batch_size=16 // pieces)
            result, counted = watched(step, batch)
            numel = sum(p.numel() for p in model.parameters())
            yield (
                f"wire {kind} {pieces}",
                {
                    "bytes": result.sent_bytes,
                    "calls": result.communication_calls,
                    "counted": counted,
                    "pieces": result.num_micro_batches,
                    "payload": 8 * numel,
                },
            )
