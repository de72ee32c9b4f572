"""What the tests of other frameworks train: taggers of sequences of very different lengths that return their loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from microbatch.models.torchvision_operators import make_torchvision_importable
from tests.training.jobs import Reference, Tagger, by_token, reference, sequences

make_torchvision_importable()  # transformers and Lightning's metrics import it where it is installed

ROWS, LR = 32, 0.1

Item = dict[str, Tensor]


class Items(Dataset[Item]):
    """Rows of a batch, one by one; by default every row has targets, and more of them the later it comes."""

    def __init__(self, batch: dict[str, Tensor] | None = None) -> None:
        self.batch = sequences(items=ROWS, order="sorted") if batch is None else batch
        if batch is None:
            self.batch["targets"][:, :2] = 1
        self.batch = {"tokens": self.batch["tokens"], "padding": self.batch["padding"], "labels": self.batch["targets"]}

    def __len__(self) -> int:
        return len(self.batch["labels"])

    def __getitem__(self, index: int) -> Item:
        return {name: value[index] for name, value in self.batch.items()}


class Returning(Tagger):
    """A tagger that returns a loss with its scores, as Hugging Face models do."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.loss, self.memory, self.rows, self.failures = loss, ROWS, list[int](), 0

    def forward(self, tokens: Tensor, padding: Tensor, labels: Tensor | None = None) -> Any:
        self.rows.append(len(tokens))
        if len(tokens) > self.memory:
            self.failures += 1
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")
        scores = super().forward(tokens, padding)
        return {"logits": scores} if labels is None else {"loss": self.loss(scores, labels), "logits": scores}


class Dividing(Returning):
    """Divides by what it is told, if it is told anything."""

    def forward(self, tokens: Tensor, padding: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        output = super().forward(tokens, padding, labels)
        number = kwargs.get("num_items_in_batch")
        if number is not None and labels is not None:
            output["loss"] = output["loss"] * (labels != -100).sum() / number
        return output


class Deaf(Returning):
    """Takes keywords and does not listen, as 119 models of transformers do."""

    def forward(self, tokens: Tensor, padding: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        return super().forward(tokens, padding, labels)


def by_label(scores: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)


def by_next_label(scores: Tensor, labels: Tensor) -> Tensor:
    return by_label(scores[:, :-1], labels[:, 1:])


def by_item(scores: Tensor, labels: Tensor) -> Tensor:
    losses = cross_entropy(scores.transpose(1, 2), labels, ignore_index=-100, reduction="none")
    return (losses.sum(1) / (labels != -100).sum(1)).mean()


def between_items(scores: Tensor, labels: Tensor) -> Tensor:
    """A loss of pairs of the batch's items, which no sum over pieces can give."""
    pooled = scores.mean(1)
    return by_label(scores, labels) + (pooled @ pooled.T).square().mean()


def made(kind: type[Returning] = Returning, loss: Callable[[Tensor, Tensor], Tensor] = by_label) -> Returning:
    torch.manual_seed(0)
    return kind(loss).double()


def whole_batch(model: nn.Module, loss: Callable[..., Any], batch: Item, max_norm: float | None = None) -> Reference:
    """The ordinary step over all items at once."""
    return reference(
        model, loss, batch, run=lambda m, b: m(b["tokens"], b["padding"])["logits"], max_norm=max_norm, lr=LR
    )


def token_sums(scores: Tensor, batch: Item) -> tuple[Tensor, Tensor]:
    return by_token(scores, {"targets": batch["labels"]})


def as_pair(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Item], tuple[Tensor, int]]:
    """A mean over the whole batch for the reference."""
    return lambda scores, batch: (loss(scores, batch["labels"]), 1)


def loader(rows: int, *, shuffle: bool = False, items: Items | None = None) -> DataLoader[Item]:
    return DataLoader(items or Items(), batch_size=rows, shuffle=shuffle)


def gradients_between(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    """What one step of plain SGD stepped with."""
    return {name: (before[name] - after[name]) / LR for name in before}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
