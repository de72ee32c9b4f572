"""The job that `training_peers` gives to every framework, and what is watched while it runs.

A tagger scores each token of sequences whose lengths are log-uniform; padding has no targets. Its memory is played:
from a given piece on, a forward of more rows than a limit raises what torch's CPU allocator raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import Dataset

WORDS, IGNORED, LR = 64, -100, 0.1
REFUSED = (
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
)

Batch = dict[str, Tensor]


class Memory:
    """Room for so many rows per forward, from piece `after` on; shared by copies of a model, so that all count."""

    def __init__(self, rows: int | None = None, after: int = 0) -> None:
        self.rows, self.after = rows, after
        self.passes = self.failures = 0

    def ask(self, rows: int) -> None:
        self.passes += 1
        if self.rows is not None and self.passes > self.after and rows > self.rows:
            self.failures += 1
            raise RuntimeError(f"{REFUSED} {rows} rows.")

    def __deepcopy__(self, memo: dict[int, Any]) -> Memory:
        return self


class Scorer(nn.Module):
    """Each token alone; returns its loss where it is given labels."""

    def __init__(self, width: int, memory: Memory | None = None) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = (
            nn.Embedding(WORDS, width),
            nn.Linear(width, width),
            nn.Linear(width, WORDS),
        )
        self.memory = memory or Memory()
        self.trained: Callable[[int], None] = _nothing

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        self.memory.ask(len(tokens))
        scores = self.head(torch.relu(self.hidden(self.embed(tokens))))
        if scores.requires_grad:
            rows = len(tokens)
            scores.register_hook(lambda _: self.trained(rows))
        return {"logits": scores} if labels is None else {"loss": mean(scores, labels), "logits": scores}


def _nothing(rows: int) -> None:
    """Nobody counts."""


def mean(scores: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def sum_and_weight(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    targets = batch["labels"].flatten()
    losses = cross_entropy(output["logits"].flatten(0, 1), targets, ignore_index=IGNORED, reduction="sum")
    return losses, (targets != IGNORED).sum()


class Sequences(Dataset[Batch]):
    """As many rows as asked for; those of one batch, over and over."""

    def __init__(self, batch: Batch, rows: int) -> None:
        self.batch, self.rows = batch, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Batch:
        return {name: value[index % len(value)] for name, value in self.batch.items()}


def sequences(rows: int, longest: int, *, in_order: bool) -> Batch:
    """Lengths from 1 to `longest`, log-uniform; as drawn, or sorted."""
    generator = torch.Generator().manual_seed(0)
    lengths = (longest ** torch.rand(rows, generator=generator)).round().long()
    if in_order:
        lengths = lengths.sort().values
    tokens, labels = (torch.randint(WORDS, (rows, longest), generator=generator) for _ in range(2))
    labels[torch.arange(longest) >= lengths[:, None]] = IGNORED
    return {"tokens": tokens, "labels": labels}


@dataclass
class Watch:
    """What one training did.

    Attributes:
        gradients: of the first update, as the optimizer got them.
        samples: rows behind the gradients of each update.
        size: rows of the largest piece of the first update, or what a finder named.
        before: passes and failures before those of the first update, or before a finder was done.
        after_step: called when an update has ended.
    """

    gradients: list[Tensor] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    size: int | None = None
    before: tuple[int, int] | None = None
    after_step: Callable[[], None] = lambda: None
    _pieces: list[int] = field(default_factory=list)

    def attach(self, model: Scorer, optimizer: torch.optim.Optimizer) -> None:
        """Count the pieces whose gradients are added up since there were none."""
        model.trained = lambda rows: self._add(rows, first=model.head.weight.grad is None)
        optimizer.register_step_post_hook(lambda *_: self._step(model))  # Lightning runs backward inside the step

    def _add(self, rows: int, *, first: bool) -> None:
        self._pieces = [rows] if first else [*self._pieces, rows]

    def _step(self, model: Scorer) -> None:
        if not self.samples:
            self.gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            self.size = max(self._pieces)
            self.before = (model.memory.passes - len(self._pieces), model.memory.failures)
        self.samples.append(sum(self._pieces))
        self.after_step()


@dataclass
class Run:
    """One training: `rows` per piece and `pieces` per update, over `data`.

    Attributes:
        name: of the framework's loop.
    """

    rows: int
    pieces: int
    steps: int
    batch: Batch
    width: int = 32
    dtype: torch.dtype = torch.float32
    memory: Memory = field(default_factory=Memory)
    watch: Watch = field(default_factory=Watch)

    def __post_init__(self) -> None:
        self.make()

    def make(self) -> None:
        """Model and optimizer from the start."""
        torch.manual_seed(0)
        self.model = Scorer(self.width, self.memory).to(self.dtype)
        self.optimizer = SGD(self.model.parameters(), lr=LR)
        self.watch.attach(self.model, self.optimizer)

    @property
    def data(self) -> Sequences:
        return Sequences(self.batch, self.rows * self.pieces * self.steps)


def full_batch_gradients(run: Run) -> list[Tensor]:
    """The reference: one pass over the whole batch in float64, in plain torch."""
    torch.manual_seed(0)
    model = Scorer(run.width).to(run.dtype).double()
    mean(model(run.batch["tokens"])["logits"], run.batch["labels"]).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    """Largest difference over the largest gradient."""
    largest = max(value.abs().max().item() for value in expected)
    return max((a.double() - b).abs().max().item() for a, b in zip(found, expected, strict=True)) / largest


def pieces_of(batch: Batch, rows: int) -> Iterator[Batch]:
    for start in range(0, len(batch["labels"]), rows):
        yield {name: value[start : start + rows] for name, value in batch.items()}
