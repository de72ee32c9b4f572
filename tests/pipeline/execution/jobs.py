"""Models, batches and losses for pipelines, and the step of one process that they are held against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.reference.training_step import full_batch_step

IN, WIDTH, OUT, VOCABULARY, LONGEST, ITEMS = 6, 16, 5, 11, 7, 13


def chain(dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> nn.Sequential:
    """Nine layers one behind the other; the activations work in place."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(IN, WIDTH)]
    for _ in range(3):
        layers += [nn.Dropout(dropout) if dropout else nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)]
    layers += [nn.Tanh(), nn.Linear(WIDTH, OUT)]
    return nn.Sequential(*layers).to(dtype)


class Block(nn.Module):
    """Attention and a layer behind it, each beside the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, *, mask: Tensor) -> Tensor:
        query, key, value = self.mix(self.norm(hidden)).chunk(3, -1)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return hidden + self.out(functional.gelu(mixed))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Tokens to scores, causal, with padding; positions are a parameter of the model itself."""

    def __init__(self, blocks: int = 6, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LONGEST, WIDTH) / 4)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        length = tokens.shape[1]
        hidden = self.embed(tokens) * 2.0 + self.positions[:length]
        seen = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()[None]
        if attention_mask is not None:
            seen = seen & (attention_mask[:, None, :] | torch.eye(length, dtype=torch.bool))
        for block in self.blocks:
            hidden = block(hidden, mask=seen)
        return {"scores": self.head(self.norm(hidden))}


class Mlp(nn.Module):
    """Two layers beside the stream, whose weights can be shared out over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(functional.gelu(self.up(hidden)))  # type: ignore[no-any-return]


class Outside(nn.Module):
    """The stream lives outside of its layers, so that several values cross every cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(IN, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(7))
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        start = stream = self.first(x)
        for layer in self.layers:
            stream = stream + torch.tanh(layer(stream))
        result: Tensor = self.head(stream * start) + x[:, :OUT]
        return result


class Gated(nn.Module):
    """Returns a second value that does not depend on what it is given, and a first one that is a view."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layer = nn.Linear(width, WIDTH)
        self.gate = nn.Parameter(torch.randn(WIDTH) / 4)

    def forward(self, given: Any) -> tuple[Tensor, Tensor]:
        gate: Any
        x, gate = given if isinstance(given, tuple) else (given, 0.0)
        made = torch.tanh(self.layer(x.flatten(1))) * (1 + gate)
        return made.unflatten(1, (4, -1)).transpose(1, 2), self.gate.exp()


class Turned(nn.Module):
    """Returns a view and nothing else."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layer = nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = torch.tanh(self.layer(x.flatten(1))).unflatten(1, (4, -1)).transpose(1, 2)
        return made


class First(nn.Module):
    """The end of a row of `Gated`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, OUT)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        result: Tensor = self.layer(given[0].flatten(1) * given[1])
        return result


def gated(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Gated(IN), *(Gated() for _ in range(7)), First()).to(dtype)


def mlps(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(IN, WIDTH), *(Mlp() for _ in range(6)), nn.Linear(WIDTH, OUT)).to(dtype)


def turned(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Turned(IN), *(Turned() for _ in range(7)), nn.Flatten(), nn.Linear(WIDTH, OUT)).to(dtype)


def decoder(dtype: torch.dtype = torch.float64, *, tied: bool = False) -> Decoder:
    torch.manual_seed(0)
    return Decoder(tied=tied).to(dtype)


def outside(dtype: torch.dtype = torch.float64) -> Outside:
    torch.manual_seed(0)
    return Outside().to(dtype)


def points(items: int = ITEMS, seed: int = 1, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(items, IN, generator=generator, dtype=torch.float64).to(dtype),
        "y": torch.randint(OUT, (items,), generator=generator),
        "importance": torch.rand(items, generator=generator, dtype=torch.float64).to(dtype),
    }


def sentences(items: int = ITEMS, seed: int = 1, longest: int = LONGEST) -> dict[str, Tensor]:
    """Of very different lengths; a quarter of the rows has no target at all."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (items,), generator=generator)
    tokens = torch.randint(VOCABULARY, (items, longest), generator=generator)
    targets = torch.randint(VOCABULARY, (items, longest), generator=generator)
    mask = torch.arange(longest)[None] < lengths[:, None]
    targets[~mask] = -100
    targets[: items // 4] = -100
    return {"tokens": tokens, "attention_mask": mask, "targets": targets}


def of_points(model: Any, batch: dict[str, Tensor]) -> Any:
    return model(batch["x"])


def of_sentences(model: Any, batch: dict[str, Tensor]) -> Any:
    return model(batch["tokens"], attention_mask=batch["attention_mask"])["scores"]


def by_item(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Any]:
    return functional.cross_entropy(output, batch["y"], reduction="sum"), len(output)


def by_token(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    targets = batch["targets"]
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), (targets >= 0).sum()


def two_terms(output: Tensor, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Any]]:
    """Of different weights."""
    losses = functional.cross_entropy(output, batch["y"], reduction="none")
    importance = batch["importance"]
    return {"plain": (losses.sum(), len(output)), "weighted": ((losses * importance).sum(), importance.sum())}


@dataclass(frozen=True)
class Job:
    """What is trained on what."""

    model: Callable[..., nn.Module]
    batch: Callable[..., dict[str, Tensor]]
    loss: Any
    forward: Any
    example: Callable[[dict[str, Tensor]], Any]
    keywords: dict[str, Any] = field(default_factory=dict)


POINTS = Job(chain, points, by_item, of_points, lambda batch: batch["x"])
TERMS = Job(chain, points, two_terms, of_points, lambda batch: batch["x"])
SENTENCES = Job(
    decoder, sentences, by_token, of_sentences,
    lambda batch: {"tokens": batch["tokens"], "attention_mask": batch["attention_mask"]},
)  # fmt: skip
TIED = Job(
    decoder, sentences, by_token, of_sentences, SENTENCES.example, {"tied": True}
)  # fmt: skip
MLPS = Job(mlps, points, by_item, of_points, lambda batch: batch["x"])
GATED = Job(gated, points, by_item, of_points, lambda batch: batch["x"])
TURNED = Job(turned, points, by_item, of_points, lambda batch: batch["x"])
OUTSIDE = Job(outside, points, by_item, of_points, lambda batch: batch["x"])


def reference(model: nn.Module, job: Job, batch: Any, max_norm: float | None = None, lr: float = 0.1) -> dict[str, Any]:
    """Loss and gradients of one process; the model is updated."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return full_batch_step(model, optimizer, job.loss, job.forward, batch, max_norm)
