"""Small models that mix rows, carry state or let padding in, and others that only look as if they did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from microbatch.models.built_in import build


def noise(*shape: int) -> Tensor:
    """The same numbers at every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def ids(*shape: int, vocabulary: int = 11) -> Tensor:
    """Token ids, none of them 0."""
    return torch.randint(1, vocabulary, shape, generator=torch.Generator().manual_seed(7))


class Rowwise(nn.Module):
    """Makes a module of a function of a tensor."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class Between(nn.Module):
    """A layer, the planted function in the module's own code, a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int = 8) -> None:
        super().__init__()
        self.before, self.after, self.function = nn.Linear(width, width), nn.Linear(width, width), function

    def forward(self, x: Tensor) -> Any:
        return self.after(self.function(self.before(x)))


def around(planted: nn.Module, width: int = 8) -> nn.Module:
    """The planted module between two harmless layers, with a harmless one of another kind before it."""
    net = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))
    net.add_module("planted", planted)
    net.add_module("tail", nn.Linear(width, 3))
    return net


def centred(x: Tensor) -> Tensor:
    return x - x.mean(0, keepdim=True)


def attended(x: Tensor) -> Tensor:
    return torch.softmax(x @ x.T, -1) @ x


def best_two(x: Tensor) -> Tensor:
    keep = torch.zeros_like(x).index_fill(0, x[:, 0].topk(2).indices, 1.0)
    return x * keep


def max_pooled(x: Tensor) -> Tensor:
    return x + x.amax(0)


def shuffled(x: Tensor) -> Tensor:
    return x + x.roll(1, 0)


def permuted(x: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


def cumulated(x: Tensor) -> Tensor:
    return x.cumsum(0)


def paired(x: Tensor) -> Tensor:
    a, b = x.reshape(-1, 2, x.shape[-1]).unbind(1)
    return torch.stack([a + b, a - b], 1).reshape(x.shape)


def normalised(x: Tensor) -> Tensor:
    whole: Tensor = torch.linalg.vector_norm(x)
    return x / whole


def whitened(x: Tensor) -> Tensor:
    return x @ (x.T @ x)


def of_eight(x: Tensor) -> Tensor:
    return x.view(6, 8) * 2


def squeezed(x: Tensor) -> Tensor:
    return x.unsqueeze(-1).squeeze()


class Kept(nn.Module):
    """Adds a hidden state that it keeps from the call before."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.hidden = nn.RNNCell(8, 8), cast(Any, None)

    def forward(self, x: Tensor) -> Any:
        self.hidden = self.cell(x, self.hidden)
        return self.hidden


class LastBatch(nn.Module):
    """Adds the mean of the batch before."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = nn.Buffer(torch.zeros(8))

    def forward(self, x: Tensor) -> Any:
        out = x + self.last
        self.last = x.detach()[0]
        return out


class Counter(nn.Module):
    """Grows with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return x * self.calls


class Cache(nn.Module):
    """Adds what all calls so far have left in it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        out = x if not self.seen else x + torch.stack(self.seen).sum(0)
        self.seen.append(x.detach().mean(0))
        return out


class Memory(nn.Module):
    """An LSTM that goes on from where the call before ended."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.state: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Any:
        out, self.state = self.lstm(x, self.state)
        return out


class MovingAverage(nn.Module):
    """Its output is clean; a buffer follows the mean of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.average: Any = nn.Buffer(torch.zeros(8))

    def forward(self, x: Tensor) -> Any:
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x * 2


class CallCount(nn.Module):
    """Counts calls and stores its last output; neither is ever read."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Any = nn.Buffer(torch.tensor(0))
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        self.seen = x
        return x * 2


class Meter(nn.Module):
    """Computes a statistic over the batch that nobody uses."""

    def forward(self, x: Tensor) -> Any:
        return x.mean(0)


class Metered(nn.Module):
    """A harmless meter before the module that is to blame."""

    def __init__(self, planted: nn.Module) -> None:
        super().__init__()
        self.meter, self.planted = Meter(), planted

    def forward(self, x: Tensor) -> Any:
        self.meter(x)
        return self.planted(x)


class MixedGradient(torch.autograd.Function):
    """The identity; its backward pass subtracts the mean over the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(0)


class FixedExperts(nn.Module):
    """Switch routing: each expert takes at most `capacity_factor`·tokens/experts tokens, the first that come."""

    def __init__(self, capacity_factor: float | None) -> None:
        super().__init__()
        self.gate, self.capacity_factor = nn.Linear(8, 2), capacity_factor
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        scores = self.gate(x).softmax(-1)
        chosen = scores.argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if self.capacity_factor is not None:
                rows = rows[: int(self.capacity_factor * len(x) / 2)]
            out[rows] = expert(x[rows]) * scores[rows, number, None]
        return x + out


class Balanced(nn.Module):
    """Tokens, and the balancing loss of their batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        chances = self.gate(x).softmax(-1)
        load = functional.one_hot(chances.argmax(-1), 4).to(x).mean(0)
        return self.out(x), (chances.mean(0) * load).sum()


class WithLoss(nn.Module):
    """Returns its own mean loss beside the logits, as many libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.out(x)
        return functional.cross_entropy(logits, labels), logits


class Masked(nn.Module):
    """One layer of attention over tokens, and its mean; the mask is obeyed as far as told."""

    def __init__(self, *, in_attention: bool = True, in_pooling: bool = True, pooled: bool = True) -> None:
        super().__init__()
        self.embedding, self.attention = nn.Embedding(11, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.pooling = Pooling(in_pooling) if pooled else None
        self.in_attention, self.head = in_attention, nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        x = self.embedding(input_ids)
        hidden = (attention_mask == 0) if self.in_attention else None
        x = x + self.attention(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
        return self.head(x if self.pooling is None else self.pooling(x, attention_mask))


class Pooling(nn.Module):
    """The mean over the tokens of a row, those of the mask or all."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.masked = masked

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        weights = mask.to(x)[..., None] if self.masked else torch.ones_like(x[..., :1])
        return (x * weights).sum(1) / weights.sum(1)


class Packed(nn.Module):
    """Attention over sequences that lie end to end; `apart`: each sees itself only."""

    def __init__(self, *, apart: bool) -> None:
        super().__init__()
        self.embedding, self.attention = nn.Embedding(11, 8), PackedAttention(apart)

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor) -> Any:
        return self.attention(self.embedding(input_ids), cu_seqlens)


class PackedAttention(nn.Module):
    """(1, tokens, width) to the same."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.apart, self.query = apart, nn.Linear(8, 8)

    def forward(self, x: Tensor, offsets: Tensor) -> Any:
        place = torch.arange(x.shape[1])
        sequence = torch.searchsorted(offsets[1:].contiguous(), place, right=True)
        allowed = sequence[:, None] == sequence if self.apart else None
        return functional.scaled_dot_product_attention(self.query(x), x, x, attn_mask=allowed)


class Positions(nn.Module):
    """The same with position ids instead of offsets."""

    def __init__(self, *, apart: bool) -> None:
        super().__init__()
        self.embedding, self.attention = nn.Embedding(11, 8), PackedAttention(apart)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        starts = (position_ids[0] == 0).nonzero().flatten()
        ends = torch.cat([starts, torch.tensor([position_ids.shape[1]])])
        return self.attention(self.embedding(input_ids), ends)


class Checkpointed(nn.Module):
    """A layer whose activations are computed again in the backward pass, with dropout inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4), nn.ReLU(inplace=True), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


class Narrow(nn.Module):
    """Computes in float32 and bfloat16 inside, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 64)

    def forward(self, x: Tensor) -> Any:
        hidden = self.up(x).to(torch.float32)
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
        product = hidden.softmax(-1, dtype=torch.float32) @ self.up.weight.to(torch.float32)
        return product.to(torch.bfloat16) + 2.0**-9 * product


class TimeFirst(nn.Module):
    """(tokens, batch, width) inside, (batch, tokens, width) outside."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.attention = nn.LSTM(8, 8), nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Any:
        x = self.lstm(x.transpose(0, 1))[0]
        x = self.attention(x, x, x, need_weights=False)[0]
        return x.flatten(0, 1).unflatten(0, x.shape[:2]).transpose(0, 1)


class Noisy(nn.Module):
    """Random numbers of every sort."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Any:
        if not self.training:
            return self.layer(x)
        x = functional.dropout(self.layer(x), 0.3) + torch.randn_like(x) * 0.1 + torch.rand(x.shape)
        x = x * torch.empty(len(x), 1).bernoulli_(0.8) / 0.8 + torch.bernoulli(x.sigmoid())
        return self.drop(functional.alpha_dropout(functional.rrelu(x, training=True), 0.2, training=True))


class Silent(nn.Module):
    """The `planted` one inside a list that is called by hand."""

    def __init__(self, planted: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), planted, nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return {"logits": x}


def contrastive(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    """InfoNCE over the pairs of a batch."""
    z = functional.normalize(output, dim=-1)
    return functional.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)), reduction="sum"), len(z)


def squares(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return (output - batch).square().sum(), batch.numel()


def two_terms(output: Tensor, batch: Tensor) -> dict[str, tuple[Tensor, Any]]:
    return {"fit": squares(output, batch), "size": (output.abs().sum(), (batch > 0).sum())}


def mean_loss(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return (output - batch).square().mean(), 1


def cnn(norm: Callable[[int], nn.Module]) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), norm(4), nn.Flatten())


def frozen() -> nn.Module:
    """In training mode, but for a BatchNorm that is frozen."""
    net = cnn(nn.BatchNorm2d)
    net.train()
    for module in net:
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return net


def encoder(*, batch_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class SelfAttention(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Any:
        return x + self.attention(x, x, x)[0]


class Sole(nn.Module):
    """The first output of the module inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)[0]


class PerRow(nn.Module):
    """A list with a dict for each row, as detectors answer."""

    def forward(self, x: Tensor) -> Any:
        return [{"box": row[:4], "score": row[4:].sum()} for row in x]


class Tied(nn.Module):
    """Logits by the embedding's own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Any:
        return self.out(self.embedding(tokens))


def built_in(name: str) -> nn.Module:
    return build(name).model


def moe(settings: str) -> nn.Module:
    """The built-in mixture of experts, small."""
    return build(f"moe:depth=2,width=8,hidden=8,experts=4,{settings}").model
