"""What ranks do with a budget of tokens in a process group; run by `ranks.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from microbatch.batch.token_budget import TokenBudget
from tests.training import replicated_cases, sharded_cases
from tests.training.jobs import LOSSES, difference, forward, reference, sequences, tagger
from tests.training.replicated_cases import part

SHARES = {"uneven": [3, 13], "idle": [0, 13]}


def clean(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(batch, tokens=batch["tokens"].masked_fill(batch["padding"], 0))


class OutOfMemoryOnce:
    """The last rank runs out of memory once, in its second piece."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, piece: dict[str, Tensor]) -> Any:
        self.calls += 1
        if dist.get_rank() == dist.get_world_size() - 1 and self.calls == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(model, piece)


def replicas() -> Iterator[tuple[str, Any]]:
    """Weights after a step against one process's."""
    for name in ("by_token", "own_weights"):
        for kind, shares in SHARES.items():
            for fails in (False, True):
                batch, model = clean(sequences()), tagger()
                expected = reference(tagger(), LOSSES[name], batch)
                run: Any = OutOfMemoryOnce() if fails else forward
                step = replicated_cases.step_of(
                    model, LOSSES[name], ddp=kind == "uneven", micro_batch_size=TokenBudget(24), forward=run
                )
                result = step(part(batch, shares))
                found = {n: p.detach() for n, p in model.named_parameters()}
                yield (
                    f"{name} {kind} {fails}",
                    {"difference": difference(found, expected.weights), "pieces": result.num_micro_batches},
                )


def shards() -> Iterator[tuple[str, Any]]:
    """The same under FSDP2, where all ranks must make the same calls."""
    for name in ("by_token", "own_weights"):
        for kind, shares in SHARES.items():
            for tokens in (24, 1000):
                batch, model = clean(sequences()), sharded_cases.sharded()
                expected = reference(tagger(), LOSSES[name], batch)
                step = sharded_cases.step_of(model, LOSSES[name], micro_batch_size=TokenBudget(tokens))
                result = step(part(batch, shares))
                yield (
                    f"{name} {kind} {'whole' if tokens == 1000 else tokens}",
                    {
                        "difference": difference(sharded_cases.weights(model), expected.weights),
                        "pieces": result.num_micro_batches,
                    },
                )
