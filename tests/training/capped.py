"""A training job whose address space is capped, so that memory really runs out; run as a script by the tests.

Prints, in one JSON line, what each step did, and whether the weights equal those of the same steps without a cap.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from microbatch.training.step import TrainStep

ITEMS, STEPS = 64, 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.MultiheadAttention(64, 4, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.block(x, x, x)
        result: Tensor = self.feed(x + mixed)
        return result


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 64))


def feed() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 32))


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 4, 3, padding=1))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], torch.dtype | None]] = {
    "mlp": (mlp, (512, 64), None),
    "conv": (conv, (3, 64, 64), None),
    "attention": (Attention, (128, 64), None),
    "bf16": (feed, (512, 32), torch.bfloat16),
}
"""Model, shape of an item, dtype of autocast."""


def loss(output: Tensor, _: Tensor) -> tuple[Tensor, int]:
    return output.float().square().sum(), len(output)


def run(kind: str, seed: int, sizes: list[int] | None) -> tuple[list[Any], list[Tensor]]:
    """Results of the steps and the weights after them, at sizes given per step or found."""
    make, shape, autocast = MODELS[kind]
    torch.manual_seed(seed)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    step = TrainStep(model, optimizer, loss, micro_batch_size=ITEMS, autocast=autocast)
    results = []
    for number in range(STEPS):
        if sizes is not None:
            step.micro_batch_size = sizes[number]
        generator = torch.Generator().manual_seed(seed + number)
        results.append(step(torch.randn(ITEMS, *shape, generator=generator)))
    return results, [parameter.detach().clone() for parameter in model.parameters()]


def cap(room: int) -> tuple[int, int]:
    """Let the address space grow by so many bytes; the limits before."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + room, before[1]))
    return before


def main(kind: str, seed: int, room: int) -> None:
    torch.set_num_threads(1)
    run("mlp", 0, [2] * STEPS)  # libraries load what they load at first use
    make, shape, autocast = MODELS[kind]
    with torch.autocast("cpu", autocast) if autocast else torch.enable_grad():
        make()(torch.zeros(1, *shape)).sum().backward()
    before = cap(room)
    results, weights = run(kind, seed, None)
    resource.setrlimit(resource.RLIMIT_AS, before)
    _, expected = run(kind, seed, [result.micro_batch_size for result in results])
    difference = max(float((one - other).abs().max()) for one, other in zip(weights, expected, strict=True))
    attempts = [[attempt.micro_batch_size for attempt in result.attempts] for result in results]
    phases = sorted({str(attempt.phase) for result in results for attempt in result.attempts if attempt.phase})
    reasons = sorted({str(attempt.reason) for result in results for attempt in result.attempts if attempt.reason})
    report = {"attempts": attempts, "difference": difference, "phases": phases, "reasons": reasons}
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(float(sys.argv[3])))
