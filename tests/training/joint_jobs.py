"""Joint losses that the tests share: encoders, batches of pairs, contrastive losses, experts with a balanced gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from microbatch.training.joint.terms import JointTerm

ITEMS, WIDTH, EXPERTS, TOKENS = 13, 6, 4, 5


class TwoTowers(nn.Module):
    """An encoder of images, one of texts, and a temperature."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Dropout(dropout), nn.Linear(12, WIDTH))
        self.text = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, WIDTH))
        self.log_scale = nn.Parameter(torch.tensor(1.0))
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        return {"image": self.image(image), "text": self.text(text)}


@dataclass
class Embedded:
    """Outputs in a data class; a part that has no rows is one value for all."""

    image: Tensor
    text: Tensor
    scale: Tensor
    kind: str = "embedded"


class Views(NamedTuple):
    """Outputs in a named tuple."""

    one: Tensor
    other: Tensor


@dataclass(frozen=True)
class Job:
    """A loss on the whole batch: ``loss(model)`` gives the loss, which may use the model's parameters."""

    forward: Callable[[Any, Any], Any]
    loss: Callable[[TwoTowers], Callable[[Any, Any], Any]]


def pairs(seed: int = 0, items: int = ITEMS, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "image": torch.randn(items, 8, generator=generator).to(dtype),
        "text": torch.randn(items, 5, generator=generator).to(dtype),
        "labels": torch.randint(4, (items,), generator=generator),
    }


def towers(dropout: float = 0.0, dtype: torch.dtype = torch.float64, seed: int = 0) -> TwoTowers:
    torch.manual_seed(seed)
    return TwoTowers(dropout).to(dtype)


def info_nce(one: Tensor, other: Tensor, scale: Tensor | float) -> Tensor:
    """Sum over rows of the cross entropy of each row's partner among all others."""
    scores = scale * functional.normalize(one, dim=-1) @ functional.normalize(other, dim=-1).T
    return functional.cross_entropy(scores, torch.arange(len(scores)), reduction="sum")


def both(model: Any, batch: Any) -> Any:
    return model(batch["image"], batch["text"])


def clip(model: TwoTowers) -> Callable[[Any, Any], Any]:
    def loss(output: Any, batch: Any) -> Any:
        image, text, scale = output["image"], output["text"], model.log_scale.exp()
        return info_nce(image, text, scale) + info_nce(text, image, scale), 2 * len(image)

    return loss


def of_data_class(model: TwoTowers) -> Callable[[Any, Any], Any]:
    return lambda output, batch: (info_nce(output.image, output.text, output.scale), len(output.image))


def sim_cse(model: TwoTowers) -> Callable[[Any, Any], Any]:
    return lambda output, batch: (info_nce(output[0], output[1], 20.0), len(output[0]))


def supervised(model: TwoTowers) -> Callable[[Any, Any], Any]:
    """Supervised contrastive (Khosla et al. 2020), with a projection that acts on the joint batch."""

    def loss(output: Tensor, batch: Any) -> Any:
        rows = functional.normalize(model.project(output), dim=-1)
        scores = (rows @ rows.T / 0.1).masked_fill(torch.eye(len(rows), dtype=torch.bool), -torch.inf)
        same = (batch["labels"][:, None] == batch["labels"]) & ~torch.eye(len(rows), dtype=torch.bool)
        positives = same.sum(1)
        log = scores.log_softmax(1).masked_fill(~same, 0.0).sum(1)
        return -(log / positives.clamp(min=1)).sum(), (positives > 0).sum()

    return loss


def two_terms(model: TwoTowers) -> Callable[[Any, Any], Any]:
    """Terms of different weights, one of them a product of means."""

    def loss(output: Any, batch: Any) -> Any:
        image, text = output
        spread = image.mean(0).square().sum() * text.var(0).sum()
        return {"nce": (info_nce(image, text, 5.0), len(image)), "spread": (spread, 1)}

    return loss


JOBS: dict[str, Job] = {
    "two towers, a temperature": Job(both, clip),
    "a data class, a value for all": Job(lambda m, b: Embedded(**both(m, b), scale=m.log_scale.exp()), of_data_class),
    "one encoder twice": Job(lambda m, b: Views(m.image(b["image"]), m.image(b["image"])), sim_cse),
    "labels and a projection": Job(lambda m, b: m.image(b["image"]), supervised),
    "two terms of a tuple": Job(lambda m, b: (m.image(b["image"]), m.text(b["text"])), two_terms),
}


class Experts(nn.Module):
    """A layer of experts behind a gate that takes the best one (Fedus et al. 2021, Switch), and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.gate(tokens).softmax(-1)
        best, chosen = probabilities.max(-1)
        out = torch.stack([expert(tokens) for expert in self.experts], -2)
        picked = out.gather(-2, chosen[..., None, None].expand(*chosen.shape, 1, WIDTH)).squeeze(-2)
        return self.head(tokens + best[..., None] * picked), probabilities


def experts(dtype: torch.dtype = torch.float64) -> Experts:
    torch.manual_seed(0)
    return Experts().to(dtype)


def token_batch(seed: int = 0, items: int = ITEMS) -> dict[str, Tensor]:
    """Rows of tokens, some of them padding; targets of the others."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, TOKENS + 1, (items, 1), generator=generator)
    return {
        "tokens": torch.randn(items, TOKENS, WIDTH, generator=generator, dtype=torch.float64),
        "mask": torch.arange(TOKENS)[None] < lengths,
        "targets": torch.randint(3, (items, TOKENS), generator=generator),
    }


def by_token(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    losses = functional.cross_entropy(output[0].flatten(0, 1), batch["targets"].flatten(), reduction="none")
    return losses[batch["mask"].flatten()].sum(), batch["mask"].sum()


def switched(probabilities: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Σ of chosen experts, Σ of probabilities and number of tokens."""
    kept = probabilities[mask]
    chosen = functional.one_hot(kept.argmax(-1), EXPERTS).to(kept.dtype)
    return chosen.sum(0), kept.sum(0), mask.sum()


def balance(means: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """E·Σ f_e·P_e."""
    return EXPERTS * (means[0] * means[1]).sum(), 1


def balanced_whole(output: Any, batch: Any) -> dict[str, Any]:
    """The loss as it is written for a whole batch."""
    chosen, probable, number = switched(output[1], batch["mask"])
    return {"tokens": by_token(output, batch), "balance": balance((chosen / number, probable / number))}


def balanced_by_means(output: Any, batch: Any) -> dict[str, Any]:
    chosen, probable, number = switched(output[1], batch["mask"])
    return {"tokens": by_token(output, batch), "balance": JointTerm.of_means((chosen, probable), number, balance)}


def balanced_by_rows(output: Any, batch: Any) -> dict[str, Any]:
    def of_rows(rows: Any) -> tuple[Tensor, int]:
        chosen, probable, number = switched(rows["probabilities"], rows["mask"])
        return balance((chosen / number, probable / number))

    values = {"probabilities": output[1].flatten(0, 1), "mask": batch["mask"].flatten()}
    return {"tokens": by_token(output, batch), "balance": JointTerm(values, of_rows)}


BALANCED = {"means": balanced_by_means, "rows": balanced_by_rows}
