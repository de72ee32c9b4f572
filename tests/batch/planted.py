"""Models whose answer is known: which module is to blame and why, or that none is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from microbatch.models.built_in import build
from tests.batch.planted_models import (
    Balanced,
    Between,
    Cache,
    CallCount,
    Checkpointed,
    Counter,
    FixedExperts,
    Kept,
    LastBatch,
    Masked,
    Memory,
    Metered,
    MixedGradient,
    MovingAverage,
    Narrow,
    Noisy,
    Packed,
    PerRow,
    Positions,
    Rowwise,
    SelfAttention,
    Silent,
    Sole,
    Tied,
    TimeFirst,
    WithLoss,
    around,
    attended,
    best_two,
    built_in,
    centred,
    cnn,
    contrastive,
    cumulated,
    encoder,
    frozen,
    ids,
    max_pooled,
    mean_loss,
    moe,
    noise,
    normalised,
    of_eight,
    paired,
    permuted,
    shuffled,
    squares,
    two_terms,
    whitened,
)

BOTH = ("training", "inference")


@dataclass(frozen=True)
class Plant:
    """A model, its batch and what must be found: (module, kind), or None where it is exact."""

    make: Callable[[], nn.Module]
    batch: Any
    found: tuple[str, str] | None = None
    modes: tuple[str, ...] = BOTH
    options: dict[str, Any] = field(default_factory=dict)


ROWS, IMAGES, TOKENS = noise(6, 8), noise(6, 3, 6, 6), noise(6, 5, 8)
PADDED = {
    "input_ids": ids(4, 6),
    "attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [1] * 2 + [0] * 4, [1] * 6]),
}
ENDS = {"input_ids": ids(1, 9), "cu_seqlens": torch.tensor([0, 2, 6, 9])}
RESTARTS = {"input_ids": ids(1, 9), "position_ids": torch.tensor([[0, 1, 0, 1, 2, 3, 0, 1, 2]])}

MIXING: dict[str, Plant] = {
    "BatchNorm1d": Plant(lambda: around(nn.BatchNorm1d(8)), ROWS, ("planted", "batch_norm"), ("training",)),
    "BatchNorm2d": Plant(lambda: cnn(nn.BatchNorm2d), IMAGES, ("1", "batch_norm"), ("training",)),
    "BatchNorm without running statistics": Plant(
        lambda: cnn(lambda c: nn.BatchNorm2d(c, track_running_stats=False)), IMAGES, ("1", "batch_norm")
    ),
    "functional batch norm": Plant(
        lambda: Between(lambda x: functional.batch_norm(x, None, None, training=True)), ROWS, ("Between", "batch_norm")
    ),
    "two rows": Plant(lambda: around(nn.BatchNorm1d(8)), ROWS[:2], ("planted", "batch_norm"), ("training",)),
    "centred in the model's own code": Plant(lambda: Between(centred), ROWS, ("Between", "batch_statistic")),
    "centred in a block": Plant(lambda: around(Between(centred)), ROWS, ("planted", "batch_statistic")),
    "centred in a module": Plant(lambda: around(Rowwise(centred)), ROWS, ("planted", "batch_statistic")),
    "norm of the whole batch": Plant(lambda: around(Rowwise(normalised)), ROWS, ("planted", "batch_statistic")),
    "covariance": Plant(lambda: around(Rowwise(whitened)), ROWS, ("planted", "batch_statistic")),
    "attention in code": Plant(lambda: around(Rowwise(attended)), ROWS, ("planted", "attention")),
    "softmax over the batch": Plant(lambda: Between(lambda x: x.softmax(0)), ROWS, ("Between", "attention")),
    "attention, batch last": Plant(lambda: encoder(batch_first=False), TOKENS, ("layers.0.self_attn", "attention")),
    "a layer of MultiheadAttention": Plant(
        lambda: nn.Sequential(nn.Linear(8, 8), SelfAttention(nn.MultiheadAttention(8, 2))),
        TOKENS,
        ("1.attention", "attention"),
    ),
    "pooling": Plant(lambda: around(Rowwise(max_pooled)), ROWS, ("planted", "pooling")),
    "top two of the batch": Plant(lambda: around(Rowwise(best_two)), ROWS, ("planted", "top_k")),
    "rolled": Plant(lambda: around(Rowwise(shuffled)), ROWS, ("planted", "mixing")),
    "mixed with a shuffled batch": Plant(lambda: around(Rowwise(permuted)), ROWS, ("planted", "mixing")),
    "cumulative sum": Plant(lambda: around(Rowwise(cumulated)), ROWS, ("planted", "mixing")),
    "pairs of rows": Plant(lambda: around(Rowwise(paired)), noise(8, 8), ("planted", "shape")),
    "a batch size in the code": Plant(lambda: around(Rowwise(of_eight)), ROWS, ("planted", "shape")),
    "squeezed": Plant(lambda: nn.Sequential(nn.Linear(8, 1), Rowwise(lambda x: x.squeeze())), ROWS, ("1", "shape")),
    "ExpertChoice": Plant(lambda: moe("gate=experts"), noise(16, 8), ("0.layer.router", "capacity")),
    "TokenChoice with a capacity": Plant(lambda: moe("capacity=1.0"), noise(16, 8), ("0.layer.router", "capacity")),
    "Switch with a capacity": Plant(lambda: around(FixedExperts(0.5)), noise(8, 8), ("planted", "capacity")),
    "balancing loss": Plant(Balanced, noise(8, 8), ("Balanced", "batch_statistic")),
    "a meter is innocent": Plant(lambda: Metered(Between(centred)), ROWS, ("planted", "batch_statistic")),
    "in a list called by hand": Plant(lambda: Silent(Rowwise(centred)), ROWS, ("blocks.1", "batch_statistic")),
    "after tokens times rows": Plant(
        lambda: nn.Sequential(
            Rowwise(lambda x: x.transpose(0, 1).reshape(-1, 8)),  # (tokens·rows, width), the rows being the inner order
            nn.Linear(8, 8),
            Rowwise(lambda x: x.reshape(5, -1, 8).transpose(0, 1)),
            Rowwise(centred),
        ),
        TOKENS,
        ("3", "batch_statistic"),
    ),
    "the caller's forward": Plant(
        lambda: nn.Linear(8, 8), ROWS, ("forward", "batch_statistic"), options={"forward": lambda m, b: centred(m(b))}
    ),
}

STATE: dict[str, Plant] = {
    "hidden state": Plant(lambda: around(Kept()), ROWS, ("planted", "state")),
    "last batch in a buffer": Plant(lambda: around(LastBatch()), ROWS, ("planted", "state")),
    "counter": Plant(lambda: around(Counter()), ROWS, ("planted", "state")),
    "cache": Plant(lambda: around(Cache()), ROWS, ("planted", "state")),
    "LSTM goes on": Plant(lambda: nn.Sequential(nn.Linear(8, 8), Memory()), TOKENS, ("1", "state")),
    "LSTM goes on, odd pieces": Plant(lambda: nn.Sequential(nn.Linear(8, 8), Memory()), TOKENS[:5], ("1", "state")),
    "moving average": Plant(lambda: around(MovingAverage()), ROWS, ("planted", "state")),
    "spectral norm": Plant(
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))),
        ROWS,
        ("0.parametrizations.weight.0", "state"),
        ("training",),
    ),
}

TIME: dict[str, Plant] = {
    "LSTM, time first": Plant(lambda: Sole(nn.LSTM(8, 8)), TOKENS, ("inner", "time")),
    "GRU, time first": Plant(lambda: Sole(nn.GRU(8, 8)), TOKENS, ("inner", "time")),
}

PADDING: dict[str, Plant] = {
    "attention without its mask": Plant(lambda: Masked(in_attention=False), PADDED, ("attention", "padding")),
    "pooling without its mask": Plant(lambda: Masked(in_pooling=False), PADDED, ("pooling", "padding")),
    "packed sequences see each other": Plant(lambda: Packed(apart=False), ENDS, ("attention", "packing")),
    "packed by position ids": Plant(lambda: Positions(apart=False), RESTARTS, ("attention", "packing")),
}

TRAINING: dict[str, Plant] = {
    "InfoNCE": Plant(lambda: nn.Linear(8, 8), ROWS, ("loss", "loss"), ("training",), {"loss": contrastive}),
    "a mean as the sum": Plant(lambda: nn.Linear(8, 8), ROWS, ("loss", "loss"), ("training",), {"loss": mean_loss}),
    "a weight that does not add up": Plant(
        lambda: nn.Linear(8, 8), ROWS, ("loss", "loss"), ("training",), {"loss": lambda o, b: (o.square().sum(), 1)}
    ),
    "a backward pass that mixes, and a loss": Plant(
        lambda: nn.Sequential(nn.Linear(8, 8), Rowwise(MixedGradient.apply)),
        ROWS,
        ("0", "gradient"),
        ("training",),
        {"loss": squares},
    ),
    "a backward pass that mixes": Plant(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Rowwise(MixedGradient.apply), nn.Linear(8, 3)),
        ROWS,
        ("1", "gradient"),
        ("training",),
    ),
}

CLEAN: dict[str, Plant] = {
    "MLP": Plant(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 3)), ROWS),
    "BatchNorm in inference": Plant(lambda: cnn(nn.BatchNorm2d), IMAGES, modes=("inference",)),
    "frozen BatchNorm": Plant(frozen, IMAGES),
    "InstanceNorm": Plant(lambda: cnn(nn.InstanceNorm2d), IMAGES),
    "GroupNorm": Plant(lambda: cnn(lambda c: nn.GroupNorm(2, c)), IMAGES),
    "LayerNorm": Plant(lambda: around(nn.LayerNorm(8)), ROWS),
    "encoder": Plant(lambda: encoder(batch_first=True), TOKENS),
    "encoder along dimension 1": Plant(lambda: encoder(batch_first=False), TOKENS, options={"batch_dimension": 1}),
    "LSTM": Plant(lambda: Sole(nn.LSTM(8, 8, num_layers=2, dropout=0.3, batch_first=True)), TOKENS),
    "LSTM along dimension 1": Plant(lambda: Sole(nn.LSTM(8, 8)), TOKENS, options={"batch_dimension": 1}),
    "time first inside": Plant(TimeFirst, TOKENS),
    "experts without a limit": Plant(lambda: moe(""), noise(16, 8)),
    "Switch without a limit": Plant(lambda: around(FixedExperts(None)), noise(8, 8)),
    "random numbers of every sort": Plant(Noisy, ROWS),
    "checkpointed": Plant(Checkpointed, ROWS),
    "float32 inside": Plant(Narrow, ROWS),
    "calls are counted": Plant(lambda: around(CallCount()), ROWS),
    "a meter": Plant(lambda: Metered(nn.Linear(8, 8)), ROWS),
    "own mean loss": Plant(WithLoss, (ROWS, torch.tensor([0, 1, 2, 0, 1, 2]))),
    "masked": Plant(Masked, PADDED),
    "masked, not pooled": Plant(lambda: Masked(pooled=False), PADDED),
    "packed apart": Plant(lambda: Packed(apart=True), ENDS),
    "packed apart by position ids": Plant(lambda: Positions(apart=True), RESTARTS),
    "sums and weights": Plant(lambda: nn.Linear(8, 8), ROWS, modes=("training",), options={"loss": squares}),
    "two terms": Plant(lambda: nn.Linear(8, 8), ROWS, modes=("training",), options={"loss": two_terms}),
    "nothing to train": Plant(nn.ReLU, ROWS),
    "a result for each row": Plant(lambda: nn.Sequential(nn.Linear(8, 8), PerRow()), noise(5, 8)),
    "tied weights": Plant(Tied, ids(6, 5)),
    "many rows": Plant(lambda: nn.Linear(8, 2), noise(64, 8)),
    **{
        name: Plant(partial(built_in, name), build(name).args)
        for name in ("mlp:depth=2,width=16", "transformer:width=16,sequence=5", "pool", "pool:kind=mean")
    },
}
