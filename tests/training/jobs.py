"""Training jobs that the tests share: small models, batches of sequences of very different lengths, losses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.reference.training_step import full_batch_step

VOCABULARY, WIDTH, LONGEST, ITEMS = 23, 16, 12, 13


class Tagger(nn.Module):
    """Tokens to one score per token and word; rows do not see each other, padding is masked."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=dropout, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        hidden: Tensor = self.block(self.embed(tokens), src_key_padding_mask=padding)
        scores: Tensor = self.head(hidden)
        return scores


def tagger(dtype: torch.dtype = torch.float64, seed: int = 0) -> Tagger:
    torch.manual_seed(seed)
    return Tagger().to(dtype)


def sequences(seed: int = 0, items: int = ITEMS, order: str = "as drawn") -> dict[str, Tensor]:
    """Lengths from log-uniform; targets only where a sequence goes on, and none at all in some rows."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (LONGEST ** torch.rand(items, generator=generator)).round().long()
    if order == "sorted":
        lengths = lengths.sort().values
    tokens = torch.randint(VOCABULARY, (items, LONGEST), generator=generator)
    targets = torch.randint(VOCABULARY, (items, LONGEST), generator=generator)
    padding = torch.arange(LONGEST)[None] >= lengths[:, None]
    targets[padding] = -100
    targets[: max(1, items // 4)] = -100
    return {
        "tokens": tokens,
        "padding": padding,
        "targets": targets,
        "advantages": torch.randn(items, generator=generator),
    }


def forward(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(batch["tokens"], batch["padding"])


def by_token(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    targets = batch["targets"].flatten()
    losses = functional.cross_entropy(output.flatten(0, 1), targets, ignore_index=-100, reduction="sum")
    return losses, (targets != -100).sum()


def mean_times_number(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """As people write it who have a masked mean: 0 / 0 * 0 in a piece without targets, and NaN is its gradient."""
    mask = batch["targets"] != -100
    chosen = output.log_softmax(-1).gather(-1, batch["targets"].clamp(min=0)[..., None]).squeeze(-1)
    return -(chosen * mask).sum() / mask.sum() * mask.sum(), mask.sum()


def by_sample(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return output.mean((1, 2)).square().sum(), len(output)


def not_divided(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
    """A sum that stays one: every piece has its share of a total weight of 1."""
    return output.square().sum(), len(output) / ITEMS


def policy_gradient(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A mask that only the output decides."""
    chosen = output.log_softmax(-1).gather(-1, batch["tokens"][..., None]).squeeze(-1)
    mask = ((chosen.detach() < -3.0) & ~batch["padding"]).to(output.dtype)
    return -(chosen * batch["advantages"].to(output.dtype)[:, None] * mask).sum(), mask.sum()


def same_weights(output: Tensor, batch: dict[str, Tensor]) -> dict[str, Any]:
    losses, tokens = by_token(output, batch)
    kept = (batch["targets"] != -100)[..., None]
    return {"cross_entropy": (losses, tokens), "z": (1e-2 * (output.logsumexp(-1, True) ** 2 * kept).sum(), tokens)}


def own_weights(output: Tensor, batch: dict[str, Tensor]) -> dict[str, Any]:
    return {
        "tokens": by_token(output, batch),
        "samples": by_sample(output, batch),
        "policy": policy_gradient(output, batch),
    }


def some_terms(output: Tensor, batch: dict[str, Tensor]) -> dict[str, Any]:
    """A term that is absent where it does not apply."""
    terms: dict[str, Any] = {"samples": by_sample(output, batch)}
    if (batch["targets"] != -100).any():
        terms["tokens"] = by_token(output, batch)
    return terms


LOSSES: dict[str, Callable[..., Any]] = {
    loss.__name__: loss
    for loss in (
        by_token,
        mean_times_number,
        by_sample,
        not_divided,
        policy_gradient,
        same_weights,
        own_weights,
        some_terms,
    )
}


@dataclass(frozen=True)
class Reference:
    """The ordinary step: its loss, the gradients that it stepped with, and the weights after it."""

    loss: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def reference(
    model: nn.Module,
    loss: Callable[..., Any],
    batch: Any,
    *,
    run: Any = forward,
    max_norm: float | None = None,
    lr: float = 0.1,
) -> Reference:
    """One plain SGD step of a copy of the model over the whole batch."""
    own = copy.deepcopy(model)
    step = full_batch_step(own, torch.optim.SGD(own.parameters(), lr=lr), loss, run, batch, max_norm)
    return Reference(step.pop("loss"), step, {name: p.detach() for name, p in own.named_parameters()})


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference over the largest expected value, over all tensors together."""
    assert found.keys() == expected.keys()
    largest = max(value.abs().max().item() for value in expected.values())
    return max((found[n].double() - expected[n].double()).abs().max().item() for n in expected) / largest
