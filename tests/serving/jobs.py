"""Models and data that the tests of offline inference share, and the plain way to run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

WIDTH, WORDS, LONGEST = 8, 31, 24


class Encoder(nn.Module):
    """Tokens to a vector per token and one per sequence; padding is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.5, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Any]:
        hidden = self.block(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
        weights = attention_mask[..., None].to(hidden)
        pooled = (hidden * weights).sum(1) / weights.sum(1)
        return {"tokens": hidden, "pooled": pooled, "scores": (self.head(pooled), None), "version": "1"}


class Pair(NamedTuple):
    mean: Tensor
    both: list[Tensor]


class Branches(nn.Module):
    """Rows to outputs of several forms; batch norm and dropout tell whether it runs in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.line = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Pair:
        y = self.line(self.drop(self.norm(x)))
        return Pair(y.mean(1), [y, y[:, None] * 2])


def encoder(dtype: torch.dtype = torch.float64) -> Encoder:
    torch.manual_seed(0)
    return Encoder().to(dtype)


def branches() -> Branches:
    torch.manual_seed(0)
    model = Branches().double()
    model(torch.randn(64, WIDTH, dtype=torch.float64))  # running statistics that are not those of a new layer
    return model


def rows(items: int, seed: int = 0) -> Tensor:
    return torch.randn(items, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def sequences(items: int, seed: int = 0) -> list[Tensor]:
    """Token ids of log-uniform length, at least one."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (LONGEST ** torch.rand(items, generator=generator)).round().long().tolist()
    return [torch.randint(1, WORDS, (length,), generator=generator) for length in lengths]


def padded(items: list[Tensor], side: str = "right", width: int | None = None) -> dict[str, Tensor]:
    """The sequences as one batch."""
    width = width or max(len(item) for item in items)
    ids = torch.zeros(len(items), width, dtype=torch.long)
    mask = torch.zeros(len(items), width, dtype=torch.long)
    for row, item in enumerate(items):
        at = slice(width - len(item), width) if side == "left" else slice(0, len(item))
        ids[row, at], mask[row, at] = item, 1
    return {"input_ids": ids, "attention_mask": mask}


def one_pass(model: nn.Module, run: Callable[[], Any]) -> Any:
    """What one large pass gives."""
    training = model.training
    model.eval()
    with torch.no_grad():
        result = run()
    model.train(training)
    return result


class PlantedOutOfMemory(nn.Module):
    """A model that fails like an accelerator at given calls, or above a number of items or tokens."""

    def __init__(self, inner: nn.Module, *, at: tuple[int, ...] = (), above: int | None = None) -> None:
        super().__init__()
        self.inner, self.at, self.above = inner, at, above
        self.calls: list[int] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first: Tensor = args[0] if args else next(iter(kwargs.values()))
        size = first.numel() if kwargs else len(first)
        self.calls.append(len(first))
        if len(self.calls) - 1 in self.at or (self.above is not None and size > self.above):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self.inner(*args, **kwargs)
