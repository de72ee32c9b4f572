"""Models with batch norms that the tests share: residual branches, one layer at two places, every kind and option."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ITEMS = 13


class Block(nn.Module):
    """Two convolutions beside a shortcut, which has a batch norm of its own where it narrows (He et al. 2016)."""

    def __init__(self, width: int, out: int, *, inplace: bool = True) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(width, out, 3, padding=1, bias=False), nn.Conv2d(out, out, 3, padding=1)
        self.norm_one, self.norm_other = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.short = nn.Sequential(nn.Conv2d(width, out, 1), nn.BatchNorm2d(out)) if width != out else nn.Identity()
        self.relu = nn.ReLU(inplace=inplace)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm_other(self.other(self.relu(self.norm_one(self.one(x)))))
        out += self.short(x)
        result: Tensor = self.relu(out)
        return result


class Residual(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), Block(4, 4), Block(4, 6), Block(6, 6),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
        )  # fmt: skip


class Twice(nn.Module):
    """One batch norm at two places, values of a first layer used late, a frozen part, and a branch without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(12, 3)
        self.norm, self.frozen = nn.BatchNorm1d(6), nn.BatchNorm1d(6).requires_grad_(False)
        self.still, self.fixed = nn.BatchNorm1d(8), nn.BatchNorm1d(6).eval()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.still(x)
        early = self.first(x)
        hidden = self.norm(early).tanh()
        hidden = self.frozen(self.second(hidden) * 3 + 1)
        hidden = self.fixed(self.norm(hidden + early))
        result: Tensor = self.head(torch.cat([hidden, early.square()], 1))
        return result


def rows() -> Tensor:
    return torch.randn(ITEMS, 8, generator=torch.Generator().manual_seed(0)).double()


def images(dimensions: int) -> Tensor:
    return torch.randn(ITEMS, 2, *[6] * dimensions, generator=torch.Generator().manual_seed(0)).double()


def layers(**options: Any) -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 6), nn.BatchNorm1d(6, **options), nn.Tanh(),
        nn.Linear(6, 5), nn.BatchNorm1d(5, **options), nn.ReLU(), nn.Linear(5, 3),
    )  # fmt: skip


def convolutions(dimensions: int) -> nn.Module:
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dimensions - 1]
    return nn.Sequential(
        convolution(2, 3, 3), norm(3), nn.GELU(), convolution(3, 3, 2), norm(3), nn.Flatten(), nn.LazyLinear(3)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "residual": (Residual, lambda: images(2)),
    "twice": (Twice, rows),
    "two layers": (layers, rows),
    "cumulative": (lambda: layers(momentum=None), rows),
    "not affine": (lambda: layers(affine=False), rows),
    "not tracked": (lambda: layers(track_running_stats=False), rows),
    "first": (lambda: nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3)), rows),
    "last": (lambda: nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3, eps=0.1)), rows),
    **{f"{n}d": (partial(convolutions, n), partial(images, n)) for n in (1, 2, 3)},
}


def by_sample(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    targets = (batch.flatten(1)[:, 1] > 0).long()
    return functional.cross_entropy(output, targets, reduction="sum"), len(output)


def some_samples(output: Tensor, batch: Tensor) -> dict[str, Any]:
    """Terms of different weights; a piece may have none, and counts for the statistics all the same."""
    kept = batch.flatten(1)[:, 0] > 0.3
    return {
        "some": (output[kept].square().sum(), kept.sum()),
        "all": (0.1 * output.abs().sum(), len(output)),
    }


def made(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    model, batch = MODELS[name]
    torch.manual_seed(0)
    made, x = model().double(), batch()
    with torch.no_grad():
        copy.deepcopy(made).eval()(x)  # lazy layers
        if any(isinstance(p, nn.UninitializedParameter) for p in made.parameters()):
            made.eval()(x)
            made.train()
    return made.to(dtype), x.to(dtype)
